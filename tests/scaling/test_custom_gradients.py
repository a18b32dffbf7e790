"""Custom operators whose gradients are not in proportion to those that come to them."""

from functools import partial
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import (
    backpropagate,
    check_python,
    custom_operator,
    initialized,
    leaf,
    pairwise,
    scaled_backward,
    scaled_trainer,
    untuned,
)
from models import module_of
from mxamp.frontends import automatic
from mxamp.frontends.backward import backward_patches
from mxamp.policy.rules import custom_operators
from training import end_step, run_backward, trainer_in

SCALE = 2.0**8
X = nd.array([[1, 2, 3], [4, 5, 6]])


def inner_pass(function, x, dy):
    """Run a function's backward pass inside that of an operator."""
    x = leaf(x.copy())
    with autograd.record():
        y = function(x)
    y.backward(dy)
    return x.grad


class Op(mx.operator.CustomOp):
    """A loss: half the sum of squares; or what else `kind` says of its backward pass."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * 2)
        if aux:
            aux[0][:] = aux[0] + 1

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        gradient = {
            "ignores": lambda: in_data[0] - 1,
            "reads": lambda: out_grad[0] * 2,
            "returns": lambda: out_grad[0],
            "unpacks": lambda: next(one * 2 for one in out_grad),
            "joins": lambda: (in_data + out_grad)[-1] * 2,
            "clips": lambda: nd.clip(out_grad[0], -1, 1) * 2,
            "sometimes": lambda: in_data[0] if in_data[0].size == 4 else out_grad[0] * 2,
            "shape": lambda: in_data[0] + len(out_grad[0].shape),
            "numpy": lambda: nd.array(out_grad[0].asnumpy()) * 2,
            "inner": lambda: inner_pass(lambda x: x * 2, in_data[0], out_grad[0]),
        }[self.kind]()
        self.assign(in_grad[0], req[0], gradient)
        if aux:
            aux[0][:] = aux[0] + 10


class Prop(mx.operator.CustomOpProp):
    needed, states = True, ()

    def __init__(self, kind="ignores"):
        super().__init__(need_top_grad=self.needed)
        self.kind = kind

    def list_auxiliary_states(self):
        return list(self.states)

    def infer_shape(self, in_shape):
        return in_shape, [in_shape[0]], [(1,)] * len(self.states)

    def create_operator(self, ctx, shapes, dtypes):
        return Op(self.kind)


#: By name: what the operator's properties are beside those of `Prop`.
OPERATORS = {
    "test_gradients": {},
    "test_no_top_gradient": {"needed": False},
    "test_state": {"states": ("count",)},
    "test_state_no_top_gradient": {"needed": False, "states": ("count",)},
    "test_no_dependency": {"declare_backward_dependency": lambda prop, grads, data, outs: data},
}
for name, properties in OPERATORS.items():
    mx.operator.register(name)(type(name, (Prop,), properties))


class Net(nn.HybridBlock):
    def __init__(self, kind, op_type, units=2):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(units, in_units=3, use_bias=False)
            if "state" in op_type:
                self.count = self.params.get("count", shape=(1,), init="zeros", grad_req="null")
        self.attributes = {"kind": kind, "op_type": op_type}

    def hybrid_forward(self, F, x, **states):
        return F.Custom(self.dense(x), *states.values(), **self.attributes)


def trained(way, net, passes):
    """Train with plain MXNet or by one of the ways; return gradients, as the step uses them."""
    optimizer = mx.optimizer.SGD(learning_rate=1)
    trainer, scaler = trainer_in(way, net.dense.collect_params(), SCALE, optimizer)
    if way == "automatic" and backward_patches.default_scale is not None:
        backward_patches.default_scale.scaler.set_scale(SCALE)
    before = net.dense.weight.data().copy()
    for _ in range(passes):
        run_backward(lambda: net(X).sum() * 3, trainer, way, scaler)
    end_step(trainer, scaler)
    return before - net.dense.weight.data()


WAYS = ("scale_loss", "GradScaler", "decorate", "automatic")
KINDS = (
    "ignores", "reads", "returns", "unpacks", "joins", "clips", "sometimes", "shape", "numpy", "inner",
)  # fmt: skip


def compared(way, dtype, kind, op_type, units=2, req="write", hybrid=True, passes=1):
    """Compare one step, and auxiliary states, with plain MXNet's."""
    steps, counts = [], []
    for run in (None, way):
        if run == "automatic":
            automatic.start(policy=untuned(dtype))
        elif run is not None:
            amp.init(policy=untuned(dtype))
        net = initialized(Net(kind, op_type, units), init=mx.init.One())
        net.dense.weight.grad_req = req
        if hybrid:
            net.hybridize()
        steps.append(trained(run, net, passes).asnumpy())
        counts.append([p.data().asnumpy() for p in net.collect_params(".*count").values()])
    np.testing.assert_array_equal(steps[1], steps[0])
    np.testing.assert_array_equal(counts[1], counts[0])


@pytest.mark.matrix
@pytest.mark.parametrize(
    "way, dtype, kind, hybrid", pairwise(WAYS, ["float16", "bfloat16"], KINDS, [False, True])
)
def test_gradients_are_those_of_float32(way, dtype, kind, hybrid):
    for units in (2, 4):
        amp.shutdown()
        compared(way, dtype, kind, "test_gradients", units, hybrid=hybrid)


ADDED = {"req": "add", "passes": 2}
eager_or_not = pytest.mark.parametrize("hybrid", [False, True], ids=["eager", "hybridized"])


@eager_or_not
@pytest.mark.parametrize("kind, op_type, options", [
    ("ignores", "test_no_top_gradient", {}), ("ignores", "test_no_dependency", {}),
    ("ignores", "test_gradients", ADDED), ("reads", "test_gradients", ADDED),
])  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
def test_operators_that_say_that_they_ignore_it_and_sums(way, kind, op_type, options, hybrid):
    compared(way, "float16", kind, op_type, hybrid=hybrid, **options)


@eager_or_not
@pytest.mark.parametrize("op_type", ["test_state", "test_state_no_top_gradient"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("way", ["scale_loss", "decorate"])
def test_auxiliary_states_are_updated(way, dtype, op_type, hybrid):
    compared(way, dtype, "ignores", op_type, hybrid=hybrid, passes=2)


@eager_or_not
@pytest.mark.parametrize("kind", ["ignores", "reads", "unpacks"])
@pytest.mark.parametrize("way", WAYS)
def test_operators_registered_in_half_precision(monkeypatch, way, kind, hybrid):
    monkeypatch.setitem(custom_operators, "test_gradients", "low")
    compared(way, "float16", kind, "test_gradients", hybrid=hybrid)


@pytest.mark.parametrize("kind", ["ignores", "reads"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_modules(dtype, kind):
    """One loss that MXNet knows, and a custom operator in another branch."""
    updates = []
    for run in (None, dtype):
        if run:
            amp.init(policy=untuned(run))
        dense = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, no_bias=True, name="fc")
        custom = mx.sym.Custom(dense, op_type="test_gradients", kind=kind, name="custom")
        losses = [mx.sym.LinearRegressionOutput(dense, mx.sym.var("label"), name="known")]
        losses.append(mx.sym.MakeLoss(custom))
        module = module_of(mx.sym.Group(losses), X.shape, ("label", (2, 2)))
        optimizer = amp.decorate("sgd", SCALE) if run else "sgd"
        module.init_optimizer(optimizer=optimizer, optimizer_params={"learning_rate": 1})
        module.forward_backward(mx.io.DataBatch([X], [nd.ones((2, 2))]))
        module.update()
        updates.append(module.get_params()[0]["fc_weight"].asnumpy())
    np.testing.assert_allclose(updates[-1], updates[0], rtol=2**-8 if dtype == "bfloat16" else 0)


PROGRAM = """
import mxamp as amp, mxnet as mx, sys
sys.path.insert(0, {tests!r})
from scaling.test_custom_gradients import Net, X, initialized
amp.init("bfloat16")
net = initialized(Net("ignores", {op_type!r}), hybridize=True)
with mx.autograd.record():
    net(X).backward()
mx.nd.waitall()
"""


@pytest.mark.slow
@pytest.mark.parametrize("op_type", ["test_no_top_gradient", "test_state_no_top_gradient"])
def test_a_program_ends_with_a_hybridized_net_alive(op_type):
    tests = str(Path(__file__).parents[1])
    check_python(PROGRAM.format(tests=tests, op_type=op_type))


class Checkpoint(autograd.Function):
    """Computes a block again in the backward pass, which then runs inside another."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        self.x = x.copy()
        with autograd.pause():
            return self.block(x)

    def backward(self, dy):
        return inner_pass(self.block, self.x, dy)


@custom_operator("test_checkpoint")
class CheckpointOp(mx.operator.CustomOp):
    block = None

    def forward(self, is_train, req, in_data, out_data, aux):
        with autograd.pause():
            self.assign(out_data[0], req[0], self.block(in_data[0]))

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], inner_pass(self.block, in_data[0], out_grad[0]))


@pytest.mark.parametrize("kind", ["function", "operator"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("req", ["write", "add"])
@pytest.mark.parametrize("way", ["scale_loss", "GradScaler", "automatic"])
def test_passes_inside_others_that_write_parameters(way, req, warm, kind, monkeypatch, caplog):
    """Activation checkpointing; before it, a step without, at another scale."""

    def trained(way):
        blocks = [nn.Dense(1, in_units=1, use_bias=False) for _ in range(2)]
        for block in blocks:
            block.initialize(mx.init.Constant(0.5))
            block.weight.grad_req = req
        monkeypatch.setattr(CheckpointOp, "block", blocks[0])
        params = [block.weight for block in blocks]
        trainer, scaler = trainer_in(way, params, 1024, interval=1)

        def loss_of(x, step):
            if warm and step == 0:
                return blocks[1](blocks[0](x)) ** 2
            if kind == "function":
                return blocks[1](Checkpoint(blocks[0])(x)) ** 2
            return blocks[1](nd.Custom(x, op_type="test_checkpoint")) ** 2

        for step in range(3):
            run_backward(partial(loss_of, leaf(nd.ones((1, 1))), step), trainer, way, scaler)
            nd.waitall()
            end_step(trainer, scaler)
            for param in params:
                param.zero_grad()
        return [block.weight.data().asscalar() for block in blocks]

    plain = trained(None)
    if way == "automatic":
        automatic.start(policy=amp.Policy.default("float16", "cpu"))
    tolerance = 2e-3 if way == "automatic" else 1e-6
    np.testing.assert_allclose(trained(way), plain, rtol=tolerance)
    assert "carry no loss scale" not in caplog.text


def custom_head(F, h):
    return F.Custom(h, kind="ignores", op_type="test_no_top_gradient")


def softmax_head(F, h):
    return F.SoftmaxOutput(h, F.zeros_like(F.sum(h, axis=1)))


@eager_or_not
@pytest.mark.parametrize(
    "head, inits", [(custom_head, False), (custom_head, True), (softmax_head, True)]
)
def test_losses_of_their_own_where_mixed_precision_is_off_around_them(head, inits, hybrid):
    """Operators that start the backward pass get the scale once, as anywhere."""
    dense, block = initialized(nn.Dense(2, in_units=3), init=mx.init.One()), nn.HybridLambda(head)
    block.hybridize(hybrid)
    backpropagate(lambda: block(dense(X)))
    expected = dense.bias.grad().asnumpy()
    if inits:
        amp.init("float16", ctx=mx.cpu())
    trainer = scaled_trainer(dense.collect_params(), amp.StaticLossScaler(SCALE))

    def loss():
        data = dense(X).astype("float32")
        with amp.autocast(enabled=False):
            return block(data)

    scaled_backward(loss, trainer)
    amp.unscale(trainer)
    np.testing.assert_allclose(dense.bias.grad().asnumpy(), expected, rtol=1e-3)


class Clipping(autograd.Function):
    """Clips its gradient, so it has to get one without the scale."""

    def forward(self, x):
        return x * 1

    def backward(self, dy):
        return nd.clip(dy, -1, 1)


def clipped_gradient(trainer, net):
    scaled_backward(lambda: Clipping()(net(X)).sum() * 3, trainer)
    amp.unscale(trainer)
    gradient = net.bias.grad().asscalar()
    trainer.step(1)
    return gradient


def test_functions_get_no_scale_from_the_first_loss_on(tmp_path, caplog):
    net = initialized(nn.Dense(1, in_units=3))
    trainer = scaled_trainer(net.collect_params(), amp.LossScaler(1, growth_interval=1))
    assert [clipped_gradient(trainer, net) for _ in range(3)] == [2, 2, 2]
    trainer.save_states(str(tmp_path / "states"))
    amp.shutdown()
    other = scaled_trainer(net.collect_params(), amp.LossScaler(1))
    other.load_states(str(tmp_path / "states"))
    assert other.amp_loss_scale == 8
    assert clipped_gradient(other, net) == 2
    amp.shutdown()
    assert "recorded before" not in caplog.text
    clipped_gradient(other, net)  # nothing saw the function
    assert "recorded before" in caplog.text
    assert clipped_gradient(other, net) == 2
