"""Converted blocks run tuned to what they are given, and export what they were converted to."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import down, exported, float16_policy, kind, operators_of, randn, same, up, values
from mxamp.framework.machine import BFLOAT16

B = amp.Policy.default("bfloat16")


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
    block = Net()
    block.initialize(mx.init.Xavier())
    block.hybridize()
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
def test_it_runs_as_a_block_does_under_the_policy(net, offline):
    low = amp.convert_hybrid_block(net, "bfloat16", cast_optional_params=offline)
    there = operators_of(low._cached_graph[1])
    for rows in (40, 1, 40):
        x = randn(rows, 3, 6, 6)
        out = low(x)
        if rows > 1 or not offline:
            with amp.autocast("bfloat16"):
                assert same(out, net(x))
        with amp.autocast(policy=B.untuned()):
            assert not same(out, net(x))
    assert operators_of(low._cached_graph[1]) == there
    assert "clip" in there
    assert "Concat" not in there


def test_dense_layers_of_few_rows_are_bfloat16_where_their_weight_is(net):
    x = randn(2, 3, 6, 6)
    with amp.autocast(enabled=False):
        plain = net(x).asnumpy()

    def is_rounded(out):
        low = nd.amp_cast(nd.array(out), dtype=BFLOAT16)
        return same(nd.amp_cast(low, dtype="float32"), out)

    cast, live = (
        amp.convert_hybrid_block(net, "bfloat16", cast_optional_params=offline)(x).asnumpy()
        for offline in (True, False)
    )
    assert is_rounded(cast)
    assert not is_rounded(live)
    for out in (cast, live):
        assert 0 < np.linalg.norm(out - plain) < 0.02 * np.linalg.norm(plain)


def test_it_trains_as_a_block_does_under_the_policy(net):
    low = amp.convert_hybrid_block(net, "bfloat16")
    x = randn(8, 3, 6, 6)
    with amp.autocast("bfloat16"):
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
    low = amp.convert_hybrid_block(net, "bfloat16")
    out = low(x).asnumpy()
    for other in (amp.autocast(enabled=False), amp.autocast("float16"), amp.autocast("bfloat16")):
        with other:
            assert same(low(x), out)
    amp.init("float16", ctx=mx.cpu())
    assert same(low(x), out)
    amp.shutdown()
    low.hybridize(static_alloc=True, static_shape=True)
    assert same(low(x), out)


@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize(
    "options",
    [
        {"policy": B.untuned()}, {"target_dtype": "bfloat16", "keep_io_types": False},
        {"policy": float16_policy()},
    ],
)  # fmt: skip
def test_where_nothing_is_tuned_it_runs_what_it_exports(net, options, tmp_path):
    low, x = amp.convert_hybrid_block(net, **options), randn(3, 3, 6, 6)
    out = low(x)
    assert same(values(out), values(exported(low, tmp_path)(x)))


@pytest.mark.parametrize("kind_given", ["float32", "float16", "bfloat16"])
def test_without_the_types_of_the_original_it_casts_data_that_it_is_given(dtype, kind_given):
    net, x = nn.HybridSequential(), randn(3, 6)
    net.add(nn.Dense(4, in_units=6, activation="relu"), nn.Dense(2, in_units=4))
    net.initialize()
    low = amp.convert_hybrid_block(net, dtype, keep_io_types=False, example_inputs=x)
    given = x.copy() if kind_given == "float32" else down(x, kind_given)
    rounded_once = down(x if kind_given == "float32" else up(given), dtype)
    out = low(given)
    assert kind(out) == dtype
    assert same(out, low(rounded_once))
    outer = gluon.nn.HybridSequential()
    outer.add(low)
    outer.hybridize()
    assert same(outer(given), out)
    given.attach_grad()
    with mx.autograd.record():
        loss = up(low(given)).sum()
    loss.backward()
    assert kind(given.grad) == kind_given
    assert values(given.grad).any()


def test_without_the_types_of_the_original_data_read_in_float32_is_cast_too(net):
    x = randn(3, 3, 6, 6)
    low = amp.convert_hybrid_block(net, "bfloat16", keep_io_types=False)
    for half in ("float16", "bfloat16"):
        assert same(low(down(x, half)), low(up(down(x, half))))


@pytest.mark.filterwarnings("ignore:Cannot decide type")
def test_what_it_exports_differs_from_it_by_rounding_alone(net, tmp_path):
    x = randn(30, 3, 6, 6)
    with amp.autocast(enabled=False):
        plain = net(x).asnumpy()
    low = amp.convert_hybrid_block(net, "bfloat16", cast_optional_params=True)
    out = low(x).asnumpy()
    other = exported(low, tmp_path)(x).asnumpy()
    assert not same(out, other)
    assert np.linalg.norm(out - other) < 2 * np.linalg.norm(other - plain)


@pytest.mark.parametrize(
    "make", [lambda: gluon.nn.Dense(2, in_units=4), lambda: gluon.rnn.LSTM(2, input_size=4)]
)
def test_its_representation_has_a_public_name(make):
    block = make()
    block.initialize()
    block.hybridize()
    block(randn(1, 1, 4) if hasattr(block, "begin_state") else randn(1, 4))
    low = amp.convert_hybrid_block(block, "bfloat16")
    assert repr(low).startswith("Converted")
    assert low.name.startswith("converted")


def test_states_and_nested_inputs_stay():
    cell = gluon.rnn.LSTMCell(8, input_size=6)
    cell.initialize()
    x, states = randn(30, 6), [randn(30, 8, seed=1), randn(30, 8, seed=2)]
    cell.hybridize()
    cell(x, states)
    low = amp.convert_hybrid_block(cell, "bfloat16", cast_optional_params=True)
    out, (first, second) = low(x, states)
    with amp.autocast("bfloat16"):
        expected, (h, c) = cell(x, states)
    for mine, theirs in ((out, expected), (first, h), (second, c)):
        assert same(mine, theirs)


@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("before", ["nothing", "a call", "hybridize"])
def test_it_is_saved_in_full_before_and_after_its_first_call(net, offline, dtype, before, tmp_path):
    policy, x = amp.Policy.default(dtype, "cpu"), randn(3, 3, 6, 6)

    def converted():
        return amp.convert_hybrid_block(net, policy=policy, cast_optional_params=offline)

    low, other = converted(), converted()
    if before != "nothing":
        low(x)
    if before == "hybridize":
        low.hybridize()
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
@pytest.mark.parametrize("fuse", [False, True])
def test_inputs_that_are_not_read_are_taken_all_the_same(read, fuse):
    block, x = TwoInputs(read), randn(40, 40)
    block.initialize()
    block.hybridize()
    index = nd.zeros((2,), dtype="int32")
    data = (x, index) if read == "first" else (index, x)
    plain = block(*data).asnumpy()
    names = ("data1", "data0") if read == "first" else ("data0", "data1")
    low = amp.convert_hybrid_block(block, "bfloat16", input_dtypes={names[0]: "int32"}, fuse=fuse)
    np.testing.assert_allclose(low(*data).asnumpy(), plain, atol=0.02)


def test_sparse_gradients_stay_sparse(dtype):
    block = nn.HybridSequential()
    block.add(nn.Embedding(10, 3, sparse_grad=True), nn.Dense(2, in_units=6))
    block.initialize()
    data = nd.array([[1, 2], [2, 4]])
    low = amp.convert_hybrid_block(block, dtype, example_inputs=data)
    with autograd.record():
        loss = low(data).sum()
    loss.backward()
    weight = low.collect_params()[block[0].weight.name]
    assert weight.list_data()[0].grad.stype == "row_sparse"


@pytest.mark.filterwarnings("ignore:Parameter .* is not used")
@pytest.mark.parametrize("example", [False, True])
def test_float64_stays_float64(dtype, example):
    block = TwoInputs("both")
    block.initialize()
    block.hybridize()
    x, y = randn(40, 40).astype("float64"), randn(40, 40, seed=1).astype("float64")
    plain = block(x, y)
    policy = amp.Policy.default(dtype, "cpu")
    low = amp.convert_hybrid_block(block, policy=policy, example_inputs=[x, y] if example else None)
    assert same(low(x, y), plain)
    if example:
        assert "amp_cast" not in operators_of(low._cached_graph[1])
    assert low(x.astype("float32"), y.astype("float32")).dtype == np.float32
