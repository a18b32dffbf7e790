"""Converted blocks: called as the original, tuned to their inputs, saved as they were converted."""

import warnings

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import (
    backpropagate,
    casting_small_layers,
    down,
    initialized,
    kind,
    operators_of,
    randn,
    same,
    sequential,
    untuned,
    up,
    values,
    with_avx512,
)
from models import model
from nets import convolutional, made, perceptron

B = casting_small_layers()


class Net(gluon.HybridBlock):
    """Much that is tuned: colours, relu6, a split, LayerNorm, a mean over rows, dense layers."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.Conv2D(16, 3, in_channels=3, use_bias=False)
            self.bn = nn.BatchNorm(in_channels=16)
            self.second = nn.Conv2D(24, 1, in_channels=16)
            self.ln = nn.LayerNorm(in_channels=24)
            self.dense = nn.Dense(48, flatten=False, in_units=24)
            self.last = nn.Dense(64, in_units=24)

    def hybrid_forward(self, F, x):
        x = F.clip(self.bn(self.first(x)), 0, 6)
        x = F.transpose(F.reshape(self.second(x), shape=(0, 0, -1)), axes=(0, 2, 1))
        a, b = F.split(self.dense(self.ln(x)), num_outputs=2, axis=-1)
        return self.last(F.mean(a * F.sigmoid(b), axis=1))


@pytest.fixture
def net():
    mx.random.seed(5)
    block = initialized(Net(), init=mx.init.Xavier(), hybridize=True)
    block(randn(1, 3, 6, 6))
    return block


def trained(block, x):
    """Return the output and the gradients of what has any."""
    with autograd.record():
        out = block(x)
        loss = (out * out).sum()
    loss.backward()
    params = block.collect_params().items()
    return [values(out), *(values(p.grad()) for _, p in sorted(params) if p.grad_req != "null")]


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.backend
def test_it_runs_as_a_block_does_under_the_policy(net, offline):
    low = amp.convert_hybrid_block(net, policy=B, cast_optional_params=offline)
    there = operators_of(low._cached_graph[1])
    for rows in (40, 1, 40):
        x = randn(rows, 3, 6, 6)
        out = low(x)
        if rows > 1 or not offline:
            with amp.autocast(policy=B):
                assert same(out, net(x))
        with amp.autocast(policy=B.untuned()):
            assert not same(out, net(x))
    assert operators_of(low._cached_graph[1]) == there
    assert "clip" in there and "Concat" not in there


def test_it_trains_as_a_block_does_under_the_policy(net):
    low = amp.convert_hybrid_block(net, policy=B)
    x = randn(8, 3, 6, 6)
    with amp.autocast(policy=B):
        expected = trained(net, x)
    for mine, theirs in zip(trained(low, x), expected):
        assert same(mine, theirs)
    for param in low.collect_params().values():
        if param.grad_req != "null":
            param.grad_req = "add"
            param.zero_grad()
    for _ in range(2):
        twice = trained(low, x)
    for mine, theirs in zip(twice[1:], expected[1:]):
        np.testing.assert_allclose(mine, 2 * theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())


def test_it_runs_as_converted_whatever_is_on(net):
    x = randn(30, 3, 6, 6)
    low = amp.convert_hybrid_block(net, policy=B)
    out = low(x).asnumpy()
    for other in ({"enabled": False}, {"dtype": "float16"}, {"policy": B}):
        with amp.autocast(**other):
            assert same(low(x), out)
    amp.init("float16", ctx=mx.cpu())
    assert same(low(x), out)
    amp.shutdown()
    low.hybridize(static_alloc=True, static_shape=True)
    assert same(low(x), out)


@pytest.mark.parametrize("kind_given", ["float32", "float16", "bfloat16"])
def test_without_the_types_of_the_original_it_casts_data_that_it_is_given(dtype, kind_given):
    net, x = sequential(nn.Dense(4, in_units=6, activation="relu"), nn.Dense(2)), randn(3, 6)
    low = amp.convert_hybrid_block(net, dtype, keep_io_types=False, example_inputs=x)
    given = x.copy() if kind_given == "float32" else down(x, kind_given)
    rounded_once = down(x if kind_given == "float32" else up(given), dtype)
    out = low(given)
    assert kind(out) == dtype
    assert same(out, low(rounded_once))
    given.attach_grad()
    backpropagate(lambda: up(low(given)).sum())
    assert kind(given.grad) == kind_given
    assert values(given.grad).any()


@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_it_is_saved_in_full_before_and_after_its_first_call(net, offline, dtype, called, tmp_path):
    policy, x = amp.Policy.default(dtype, "cpu"), randn(3, 3, 6, 6)

    def converted():
        return amp.convert_hybrid_block(net, policy=policy, cast_optional_params=offline)

    low, other = converted(), converted()
    if called:
        low(x)
    low.export(str(tmp_path / "model"))
    names = {key.split(":")[1] for key in nd.load(str(tmp_path / "model-0000.params"))}
    assert names == set(low.collect_params())
    assert "amp_cast" in (tmp_path / "model-symbol.json").read_text()
    low.save_parameters(str(tmp_path / "params"))
    for param in other.collect_params().values():
        param.set_data(nd.zeros_like(param.data()))
    other.load_parameters(str(tmp_path / "params"))
    assert same(other(x), low(x))


class TwoInputs(gluon.HybridBlock):
    """A block that reads one of its inputs, or both."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        with self.name_scope():
            self.dense = nn.Dense(40, in_units=40)

    def hybrid_forward(self, F, x, y):
        if self.read == "both":
            return F.FullyConnected(x, y, num_hidden=40, no_bias=True)
        return self.dense(x if self.read == "first" else y)


@pytest.mark.filterwarnings("ignore:The .* input to HybridBlock is not used")
@pytest.mark.filterwarnings("ignore:Parameter .* is not used")
@pytest.mark.parametrize("read", ["first", "second"])
@pytest.mark.parametrize("fuse", [False, pytest.param(True, marks=with_avx512)])
def test_inputs_that_are_not_read_are_taken_all_the_same(read, fuse):
    block, x = initialized(TwoInputs(read), hybridize=True), randn(40, 40)
    index = nd.zeros((2,), dtype="int32")
    data = (x, index) if read == "first" else (index, x)
    plain = block(*data).asnumpy()
    names = ("data1", "data0") if read == "first" else ("data0", "data1")
    low = amp.convert_hybrid_block(block, "bfloat16", input_dtypes={names[0]: "int32"}, fuse=fuse)
    np.testing.assert_allclose(low(*data).asnumpy(), plain, atol=0.02)


@pytest.mark.filterwarnings("ignore:Parameter .* is not used")
@pytest.mark.parametrize("example", [False, True])
def test_float64_stays_float64(dtype, example):
    block = initialized(TwoInputs("both"), hybridize=True)
    x, y = randn(40, 40).astype("float64"), randn(40, 40, seed=1).astype("float64")
    plain, policy = block(x, y), amp.Policy.default(dtype, "cpu")
    low = amp.convert_hybrid_block(block, policy=policy, example_inputs=[x, y] if example else None)
    assert same(low(x, y), plain)
    if example:
        assert "amp_cast" not in operators_of(low._cached_graph[1])
    assert low(x.astype("float32"), y.astype("float32")).dtype == np.float32


def test_recurrent_layers_with_states(dtype):
    layer, x = gluon.rnn.LSTM(6, num_layers=2, layout="NTC", input_size=5), randn(2, 3, 5)
    initialized(layer, hybridize=True, init=mx.init.Xavier())
    states = [randn(2, 2, 6, seed=i) for i in range(2)]
    plain, plain_states = layer(x, states)
    low = amp.convert_hybrid_block(layer, policy=untuned(dtype))
    out, new_states = low(x, states)
    assert [s.shape for s in new_states] == [s.shape for s in plain_states]
    np.testing.assert_allclose(out.asnumpy(), plain.asnumpy(), rtol=0.1, atol=0.02)
    zero, _ = low(x)
    assert same(low(x, low.begin_state(batch_size=2))[0], zero)
    # Models of users have a begin_state alone.
    assert vars(low).pop("state_info")(2) == layer.state_info(2)
    again = amp.convert_hybrid_block(low, policy=untuned(dtype))
    assert same(again(x)[0], zero)


def test_a_block_that_has_not_run(dtype):
    for make in (convolutional, perceptron):
        net, data = made(make)
        low = amp.convert_hybrid_block(net, policy=untuned(dtype), example_inputs=data[0])
        assert not net._cached_graph
        assert not net._active
        with amp.autocast(policy=untuned(dtype)):
            net.hybridize()
            assert same(low(*data), net(*data))
    layer = initialized(gluon.rnn.LSTM(6))
    low = amp.convert_hybrid_block(layer, policy=untuned(dtype), example_inputs=randn(3, 2, 5))
    assert low(randn(3, 2, 5)).shape == (3, 2, 6)
    for words, example in (("does not run", randn(2, 2)), ("example_inputs", None)):
        with pytest.raises(amp.StateError, match=words):
            amp.convert_hybrid_block(nn.Dense(2), example_inputs=example)


def test_converted_blocks_keep_grad_req(dtype):
    net, data, _, _, _ = model(perceptron)
    first, *rest = net.collect_params().values()
    first.grad_req = "null"
    rest[0].grad_req = "add"
    rest[0].wd_mult = 0.5
    low = amp.convert_hybrid_block(net, policy=untuned(dtype)).collect_params()
    assert all(low[n].grad_req == p.grad_req for n, p in net.collect_params().items())
    assert low[rest[0].name].wd_mult == 0.5


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("devices", [1, 2])
def test_converted_blocks_export_with_numpy_semantics(dtype, offline, devices, tmp_path, caplog):
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = initialized(nn.Dense(4, in_units=3))
        data = mx.np.array(values(randn(5, 3)))
        fast = amp.convert_hybrid_block(
            net, policy=untuned(dtype), cast_optional_params=offline, example_inputs=data,
            ctx=[mx.cpu(i) for i in range(devices)],
        )  # fmt: skip
        expected = fast(data).asnumpy()
        fast.export(str(tmp_path / "fast"))
        assert ("under npx.set_np()" in caplog.text) == (offline and dtype == "bfloat16")
        assert (fast(data).asnumpy() == expected).all()
    # With NumPy's arrays MXNet can't make the gradients of parameters in bfloat16.
    files = (str(tmp_path / f"fast-{part}") for part in ("symbol.json", "0000.params"))
    with warnings.catch_warnings(), mx.util.np_shape(True):
        warnings.simplefilter("ignore")
        again = gluon.SymbolBlock.imports(next(files), ["data"], next(files))
        kinds = {kind(p.data()) for p in again.collect_params().values()}
        assert kinds == {dtype if offline else "float32"}
        assert (again(data.as_nd_ndarray()).asnumpy() == expected).all()


def test_copies_on_several_devices_are_averaged(dtype):
    net = initialized(nn.Dense(1, in_units=1, use_bias=False), ctx=[mx.cpu(0), mx.cpu(1)])
    for k, array in enumerate(net.weight.list_data()):
        array[:] = 2 * k + 1
    fast = amp.convert_hybrid_block(net, policy=untuned(dtype), example_inputs=nd.ones((1, 1)))
    assert fast(nd.ones((1, 1))).asscalar() == 2


@with_avx512
def test_a_fused_block_keeps_its_packed_weights():
    net = sequential(nn.Conv2D(16, 3, in_channels=16), nn.Activation("relu"))
    x = randn(2, 16, 8, 8)
    fused = amp.convert_hybrid_block(net, "bfloat16", example_inputs=x, fuse=True)
    assert {("static_alloc", True), ("static_shape", True)} <= set(fused._flags)
    plain = amp.convert_hybrid_block(net, "bfloat16", example_inputs=x)
    assert not dict(plain._flags).get("static_shape")
    first = values(fused(x))
    for rows in (3, 1, 2):  # shapes that change, and outputs that are kept
        fused(randn(rows, 16, 8, 8, seed=rows)).wait_to_read()
    np.testing.assert_array_equal(values(fused(x)), first)
    kept = fused(x)
    fused(randn(2, 16, 8, 8, seed=5)).wait_to_read()
    np.testing.assert_array_equal(values(kept), first)


class OwnCall(gluon.HybridBlock):
    """As GluonNLP's RoBERTaModel: `hybrid_forward` takes more than a call passes."""

    def __init__(self, before=lambda x: x, after=lambda x: x):
        super().__init__()
        self.dense, self.before, self.after = nn.Dense(4, in_units=3), before, after

    def __call__(self, x, factors):
        return self.after(super().__call__(self.before(x), [], factors))

    def forward(self, x, segments, factors):
        return super().forward(x * 2, segments, factors)

    def hybrid_forward(self, F, x, segments, factors):
        return F.broadcast_mul(self.dense(x), factors)


CALL = randn(2, 3), randn(1, 4, seed=1)


@pytest.mark.parametrize("functions", [(), (lambda x: x / 8, lambda y: y.softmax())], ids=len)
def test_what_a_call_of_the_block_does_is_converted(functions):
    net = initialized(OwnCall(*functions))
    converted = amp.convert_hybrid_block(net, example_inputs=CALL)
    np.testing.assert_allclose(values(converted(*CALL)), values(net(*CALL)), rtol=0.02, atol=1e-3)


def test_a_call_that_a_graph_cannot_hold_is_told(caplog):
    net = initialized(OwnCall(before=lambda x: x / x.asnumpy().max()), hybridize=True)
    net(*CALL)
    assert amp.convert_hybrid_block(net)(*CALL).shape == (2, 4)
    assert "give example_inputs, to convert what that does too" in caplog.text
    with pytest.raises(amp.ArgumentError, match=r"own __call__ or forward, which can't be traced"):
        amp.convert_hybrid_block(net, example_inputs=CALL)
