"""Optimization levels."""

import copy

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd

import digits
import mxamp as amp
from helpers import backpropagate, initialized, kind, randn, same, scaled_backward, sequential
from mxamp.frontends import apex
from training import assert_same_weights, batches, poisoned, setup, train


@pytest.mark.filterwarnings("ignore:Accumulating with float16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("options", [{}, {"loss_scale": 8.0}, {"loss_scale": "dynamic"}])
def test_one_script_runs_at_every_level(level, dtype, options):
    layers = gluon.nn.Dense(3, in_units=2), gluon.nn.BatchNorm(in_channels=3)
    net = sequential(*layers, gluon.nn.Dense(1, in_units=3), hybridize=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25})
    net, trainer = amp.initialize(net, trainer, level, dtype=dtype, ctx=mx.cpu(), **options)
    before = net[2].bias.data().asnumpy()
    scaled_backward(lambda: net(randn(4, 2)), trainer)
    amp.unscale(trainer)
    trainer.step(4)
    if trainer.amp_last_step.stepped:  # 65536 times four ones are too much for float16
        assert net[2].bias.data().asnumpy() == before - 0.25
    assert amp.is_enabled() == (level != "O0")
    default = "dynamic" if level in ("O1", "O2") and dtype == "float16" else 1.0
    scale = options.get("loss_scale", default)
    assert trainer.amp_last_step.loss_scale == (2.0**16 if scale == "dynamic" else scale)
    cast = level in ("O2", "O3") and dtype == "float16"
    assert kind(net[0].weight.data()) == ("float16" if cast else "float32")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("first", [True, False], ids=["init('auto')", "dtype='auto'"])
def test_every_level_is_float32_where_auto_is(first, level, on_machine):
    on_machine()
    if first:
        amp.init("auto")
    (net, trainer), (control, plain) = setup(), setup()
    options = {} if first else {"dtype": "auto"}
    net, trainer = amp.initialize(net, trainer, level, loss_scale=128.0, **options)
    for data in (*batches(), poisoned(batches()[0])):
        train(net, trainer, data)
        train(control, plain, data, scaled=False)
    assert_same_weights(net, control)
    assert (trainer.amp_loss_scale, trainer.amp_steps, trainer.amp_skips) == (1, 5, 0)
    assert not trainer._optimizer.multi_precision
    assert not amp.is_enabled()
    if first or level != "O0":
        with pytest.raises(amp.StateError, match="float32"):
            amp.init("bfloat16")


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_initialize_after_float32_says_that_it_stays_so(level, caplog):
    amp.init("float32")
    net, trainer = setup()
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(amp.StateError, match="Policy float32 .* instead of <Policy b?float16"):
            amp.initialize(net, trainer, level, dtype=dtype)
    amp.initialize(net, trainer, level)
    assert "float32 is in force, and every opt_level is O0" in caplog.text
    assert kind(net[0].weight.data()) == "float32"
    assert trainer.amp_loss_scale == 1


def test_o2_keeps_master_weights():
    net = initialized(gluon.nn.Dense(1, in_units=1, use_bias=False), init=mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})
    net, trainer = amp.initialize(net, trainer, "O2", loss_scale=8.0, ctx=mx.cpu())
    for _ in range(10):
        scaled_backward(lambda: net(nd.ones((1, 1))).sum(), trainer)
        trainer.step(1)
    # Each step is below float16's resolution at 1; ten of them are not.
    assert net.weight.data().asscalar() == np.float16(1 - 1e-3)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_parameter_files_stay_float32(level, tmp_path):
    net = digits.network()
    path = str(tmp_path / "net.params")
    amp.initialize(net, opt_level=level, ctx=mx.cpu())
    net.save_parameters(path)
    assert {v.dtype for v in nd.load(path).values()} == {np.float32}
    other = digits.network(seed=1)
    amp.shutdown()
    amp.initialize(other, opt_level=level, ctx=mx.cpu())
    other.load_parameters(path)
    for mine, theirs in zip(other.collect_params().values(), net.collect_params().values()):
        assert same(mine.data(), theirs.data())


@pytest.mark.filterwarnings("ignore:Cannot decide type")  # MXNet, whenever it imports
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_exported_models_are_float32(level, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layers = gluon.nn.Conv2D(4, 3, in_channels=1), gluon.nn.BatchNorm(in_channels=4)
    net = sequential(*layers, gluon.nn.Dense(3, in_units=16), init=mx.init.Xavier())
    data = randn(2, 1, 4, 4)
    plain = net(data).asnumpy()
    amp.initialize(net, opt_level=level, ctx=mx.cpu())
    original, net = net, copy.deepcopy(net)  # what it writes is its own
    original.initialize(mx.init.Zero(), force_reinit=True)
    net.hybridize()
    before, traced = net(data).asnumpy(), net._cached_graph
    net.export("net", epoch=7)
    assert same(net(data), before)  # and nothing has changed by it
    assert net._cached_graph is traced
    amp.shutdown()
    loaded = gluon.SymbolBlock.imports("net-symbol.json", ["data"], "net-0007.params")
    assert {kind(param.data()) for param in loaded.collect_params().values()} == {"float32"}
    np.testing.assert_allclose(loaded(data).asnumpy(), plain, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("level, sparse, embedding, norm", [
    ("O2", False, "float32", "float32"), ("O2", True, "float32", "float32"),
    ("O3", True, "float32", "float16"), ("O3", False, "float16", "float16"),
])  # fmt: skip
def test_embeddings_and_norms_that_stay_float32(level, sparse, embedding, norm):
    layers = gluon.nn.Embedding(7, 4, sparse_grad=sparse), gluon.nn.Dense(3, in_units=4)
    net = sequential(*layers, gluon.nn.LayerNorm(in_channels=3))
    amp.initialize(net, opt_level=level, ctx=mx.cpu())
    kinds = [kind(p.data()) for p in (net[0].weight, net[1].weight, net[2].gamma)]
    assert kinds == [embedding, "float16", norm]
    backpropagate(lambda: net(nd.array([1, 5, 5])))
    assert kind(net[0].weight.grad()) == embedding


def test_o3_keeps_float32_where_half_precision_has_no_kernel_or_is_wrong():
    amp.initialize(digits.network(), opt_level="O3", ctx=mx.cpu())
    low = nd.array([[3, 1, 2]]).astype("float16")
    assert nd.sort(low).asnumpy().tolist() == [[1, 2, 3]]
    row = nd.zeros((1, 4099))
    row[0, 4097] = 1
    assert nd.argmax(row.astype("float16"), axis=1).asscalar() == 4097
    assert nd.log(nd.clip(low * 0, 1e-8, 1)).asnumpy().min() > -19
    on_gpus = apex._o3_policy(amp.Policy.default("float16", "gpu"))
    for name in ("InstanceNorm", "CTCLoss", "sort", "_linalg_gemm2", "_contrib_Proposal"):
        assert on_gpus.rule(name).op_class == "fp32"


@pytest.mark.parametrize("options, words", [
    ({"opt_level": "02"}, "letter O"), ({"opt_level": "O2", "dtype": "int8"}, "'float16', 'bfloat16'"),
])  # fmt: skip
def test_wrong_arguments_change_nothing(options, words):
    net = digits.network()
    given = {"models": net, "ctx": mx.cpu(), **options}
    with pytest.raises(amp.ArgumentError, match=words):
        amp.initialize(**given)
    assert not amp.is_enabled()
    assert {kind(p.data()) for p in net.collect_params().values()} == {"float32"}


def test_it_comes_once_and_alone():
    net = digits.network()
    trainer = digits.trainer_of(net)
    amp.initialize(net, trainer, ctx=mx.cpu())
    with pytest.raises(amp.StateError, match="use one of the two"):
        amp.initialize(net, trainer)
    with pytest.raises(amp.StateError, match="initialize already; init_trainer"):
        amp.init_trainer(trainer)
    amp.shutdown()
    with pytest.raises(amp.StateError, match="already"):
        amp.initialize(net, trainer)
    net.cast("float16")
    with pytest.raises(amp.StateError, match="float16 already"):
        amp.initialize(net)
