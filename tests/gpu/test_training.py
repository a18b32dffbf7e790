"""Training on one GPU and on two: every front end, scaler and kvstore, beside the same on CPUs."""

import contextlib
import itertools
import os
import sys
from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import mxamp as amp
from helpers import python, same, scaled_backward
from models import module_of
from training import batches, end_step, poisoned, run_backward

pytestmark = pytest.mark.gpu
STORES = [("device", False), ("device", True), ("local", False), ("local", True), (None, False)]


def make(contexts, **settings):
    """Return a net with BatchNorm, hybridized, and its trainer, with the same values each time."""
    np.random.seed(2)
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(8, in_units=4), gluon.nn.BatchNorm(in_channels=8))
        net.add(gluon.nn.Activation("relu"), gluon.nn.Dense(2, in_units=8))
    net.initialize(ctx=contexts)
    for name, param in net.collect_params().items():
        if name.endswith("weight"):
            param.set_data(mx.nd.array(np.random.randn(*param.shape) * 0.3))
    net.hybridize()
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, **settings)


def losses_of(net, parts):
    return [(net(part).astype("float32") ** 2).sum() for part in parts]


def backward(net, trainer, parts):
    scaled_backward(partial(losses_of, net, parts), trainer)


def by_scale_loss(net, trainer, parts, rows):
    backward(net, trainer, parts)
    trainer.step(rows)


def clipped(net, trainer, parts, rows):
    backward(net, trainer, parts)
    trainer.allreduce_grads()
    amp.clip_grad_global_norm(trainer, 0.5)
    trainer.update(rows)


def unscaled(net, trainer, parts, rows):
    backward(net, trainer, parts)
    trainer.allreduce_grads()
    amp.unscale(trainer)
    trainer.update(rows)


def train(contexts, step=by_scale_loss, begin=None, data=None, **settings):
    """Return the weights after some steps on these devices, the trainer, and the net."""
    net, trainer = make(contexts, **settings)
    kind = contexts[0].device_type
    policy = amp.Policy.default("float16", kind)
    if begin is not None:
        step = begin(net, trainer, mx.Context(kind)) or step
        around = contextlib.nullcontext()
    else:
        amp.init_trainer(trainer, amp.LossScaler(init_scale=64, growth_interval=1000))
        around = amp.autocast(policy=policy)
    with around:
        for batch in batches(4) if data is None else data:
            parts = gluon.utils.split_and_load(batch, contexts)
            step(net, trainer, parts, len(batch))
    mx.nd.waitall()
    amp.shutdown()
    params = net.collect_params().values()
    return [p.data(contexts[0]).astype("float32").asnumpy() for p in params], trainer, net


def cpus(count):
    return [mx.cpu(i) for i in range(count)]


def assert_near(mine, theirs, tolerance=5e-3):
    for a, b in zip(mine, theirs):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.abs(b).max())))


STEPS = [by_scale_loss, clipped, unscaled]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_steps(step, count, devices, fusion):
    settings = {"update_on_kvstore": False}
    found, trainer, _ = train(devices[:count], step, **settings)
    wanted, _, _ = train(cpus(count), step, **settings)
    assert trainer.amp_steps == 4
    assert_near(found, wanted)


@pytest.mark.parametrize("store, on_kvstore", STORES)
def test_kvstores_of_two_gpus(store, on_kvstore, devices, fusion):
    if devices[0] == devices[1]:
        pytest.skip("needs two GPUs")
    settings = {"kvstore": store, "update_on_kvstore": on_kvstore}
    if store is None:
        settings = {"kvstore": None}
    found, trainer, net = train(devices, **settings)
    assert_near(found, train(cpus(2), **settings)[0])
    for param in net.collect_params().values():
        if store is not None and param.grad_req != "null":
            assert same(param.data(devices[0]), param.data(devices[1]))


@pytest.mark.parametrize("count", [1, 2])
def test_an_overflow_is_skipped_and_training_goes_on(count, devices, fusion):
    data = batches(6)
    data[1], data[3] = poisoned(data[1]), poisoned(data[3])
    settings = {"data": data, "update_on_kvstore": False}
    found, trainer, _ = train(devices[:count], **settings)
    wanted, on_cpu, _ = train(cpus(count), **settings)
    assert (trainer.amp_steps, trainer.amp_skips) == (4, 2)
    assert trainer.amp_loss_scale == on_cpu.amp_loss_scale == 16
    assert all(np.isfinite(array).all() for array in found)
    assert_near(found, wanted)


# ---------------------------------------------------------------------- front ends


def by_init(net, trainer, ctx):
    amp.init("float16", ctx=ctx)
    amp.init_trainer(trainer, amp.LossScaler(init_scale=64))


def by_grad_scaler(net, trainer, ctx):
    amp.init("float16", ctx=ctx)
    scaler = amp.GradScaler(init_scale=64)

    def step(net, trainer, parts, rows):
        run_backward(partial(losses_of, net, parts), trainer, "GradScaler", scaler)
        end_step(trainer, scaler, rows)

    return step


def by_level(level):
    def begin(net, trainer, ctx):
        amp.initialize(net, trainer, opt_level=level, loss_scale=64.0, ctx=ctx)

        def step(net, trainer, parts, rows):
            parts = [part.astype("float16") if level == "O3" else part for part in parts]
            by_scale_loss(net, trainer, parts, rows)

        return step

    begin.__name__ = level
    return begin


FRONT_ENDS = [by_init, by_grad_scaler, *map(by_level, ["O0", "O1", "O2", "O3"])]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.filterwarnings("ignore:Accumulating with float16")
@pytest.mark.parametrize("begin", FRONT_ENDS, ids=lambda begin: begin.__name__)
def test_front_ends(begin, count, devices, fusion):
    settings = {"begin": begin, "update_on_kvstore": False}
    found, _, _ = train(devices[:count], **settings)
    wanted, _, _ = train(cpus(count), **settings)
    # At O3 weights are float16: an update may round to the next of them.
    assert_near(found, wanted, 1e-2 if begin.__name__ == "O3" else 5e-3)


def test_a_decorated_optimizer_of_a_module(devices, fusion):
    found = []
    for contexts in (devices, cpus(2)):
        data = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="one")
        data = mx.sym.Activation(data, act_type="relu")
        data = mx.sym.FullyConnected(data, num_hidden=2, name="two")
        symbol = mx.sym.SoftmaxOutput(data, name="softmax")
        amp.init("float16", ctx=contexts[0])
        optimizer = amp.decorate("sgd", init_loss_scaling=64)
        used = contexts if contexts[0] != contexts[1] else contexts[:1]
        module = module_of(symbol, (4, 4), ("softmax_label", (4,)), context=used)
        rng = np.random.RandomState(0)
        shapes = {"one_weight": (8, 4), "one_bias": (8,), "two_weight": (2, 8), "two_bias": (2,)}
        given = {name: mx.nd.array(rng.randn(*shape) * 0.3) for name, shape in shapes.items()}
        module.set_params(given, {})
        module.init_optimizer(optimizer=optimizer, optimizer_params={"learning_rate": 0.5})
        for batch in batches(3):
            label = mx.nd.array([0, 1, 0, 1])
            module.forward_backward(mx.io.DataBatch([mx.nd.array(batch)], [label]))
            module.update()
        assert (optimizer.scaling.steps, optimizer.scaling.skips) == (3, 0)
        found.append([module.get_params()[0][name].asnumpy() for name in shapes])
        amp.shutdown()
    assert_near(*found)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_models_over_two_gpus(hybrid, optimizer, devices, fusion):
    """A module with `group2ctxs`, whose graph MXNet's fusion can't handle."""
    with mx.AttrScope(ctx_group="first"):
        data = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="one")
        data = mx.sym.Activation(data, act_type="tanh")
    with mx.AttrScope(ctx_group="second"):
        data = mx.sym.FullyConnected(data, num_hidden=2, name="two")
        data = mx.sym.exp(data * 0.5) if hybrid else data
        symbol = mx.sym.SoftmaxOutput(data, name="softmax")
    amp.init("float16", ctx=devices[0])
    decorated = amp.decorate(optimizer, init_loss_scaling=64)  # before `bind`: the graph is cast
    groups = dict(zip(("first", "second"), devices))
    options = {"context": devices[0], "group2ctxs": groups}
    module = module_of(symbol, (4, 4), ("softmax_label", (4,)), **options)
    module.init_optimizer(optimizer=decorated)
    for rows in (4, 2, 4):  # another batch size reshapes the executor
        data = mx.nd.array(batches(1)[0][:rows])
        module.forward_backward(mx.io.DataBatch([data], [mx.nd.zeros(rows)]))
        module.update()
    assert decorated.scaling.steps == 3
    assert np.isfinite(module.get_outputs()[0].asnumpy()).all()


# ---------------------------------------------------------------------- checkpoints, scripts


@pytest.mark.parametrize("first, second", itertools.permutations(["cpu", "gpu"]))
def test_checkpoints_move_between_devices(first, second, devices, tmp_path):
    places = {"cpu": mx.cpu(), "gpu": devices[0]}
    data, paths = batches(8), [str(tmp_path / name) for name in ("net.params", "trainer.states")]
    data[2] = poisoned(data[2])

    def run(place, batches_of, load=False):
        contexts = [places[place]]
        net, trainer = make(contexts, update_on_kvstore=False)
        if load:
            net.load_parameters(paths[0], ctx=contexts)
            trainer.load_states(paths[1])
        amp.init("float16", ctx=contexts[0])
        amp.init_trainer(trainer, None if load else amp.LossScaler(init_scale=64))
        for batch in batches_of:
            by_scale_loss(net, trainer, [mx.nd.array(batch, ctx=contexts[0])], 4)
        net.save_parameters(paths[0])
        trainer.save_states(paths[1])
        amp.shutdown()
        return net, trainer

    run(first, data[:4])
    net, trainer = run(second, data[4:], load=True)
    assert trainer.amp_loss_scale == 32
    assert (trainer.amp_steps, trainer.amp_skips) == (7, 1)
    wanted, _, _ = train([mx.cpu()], data=data, update_on_kvstore=False)
    found = [p.data(places[second]).asnumpy() for p in net.collect_params().values()]
    assert_near(found, wanted)


SCRIPT = """
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
ctx = mx.Context({device!r})
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(16, activation="relu", in_units=4), gluon.nn.Dense(2, in_units=16))
net.initialize(mx.init.Constant(0.05), ctx=ctx)
net.hybridize()
trainer = gluon.Trainer(net.collect_params(), "sgd", {{"learning_rate": 0.1}})
data = mx.nd.array(np.random.RandomState(0).randn(8, 4), ctx=ctx)
for _ in range(5):
    with autograd.record():
        loss = ((net(data) - 1) ** 2).mean()
    loss.backward()
    trainer.step(1)
    print("loss", loss.asscalar())
"""


def test_a_script_that_knows_nothing(devices, tmp_path):
    """`mxamp run` takes the GPU and float16, and its losses are those of float32."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(device=devices[0].device_type))
    found = []
    # mxamp makes MXNet importable with newer NumPy.
    plain = ["-c", "import mxamp, runpy, sys; runpy.run_path(sys.argv[1])"]
    for command in (plain, ["-m", "mxamp", "run", "--dtype", "float16"]):
        done = python(*command, script, PYTHONPATH=os.pathsep.join(sys.path))
        assert done.returncode == 0, done.stderr[-2000:]
        found.append([float(x.split()[1]) for x in done.stdout.splitlines() if x[:4] == "loss"])
    assert len(found[1]) == 5
    assert found[0] != found[1]
    np.testing.assert_allclose(*found, rtol=5e-3)
