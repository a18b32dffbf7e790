"""Small eager dense layers run as graphs: the same bits as single calls, in one call of MXNet."""

import threading

import mxnet as mx
import pytest
from mxnet import autograd, nd

import mxamp as amp
from conftest import DTYPES
from helpers import down, kind, randn, same
from mxamp.framework import arrays
from mxamp.framework.arrays import leaf_casts
from mxamp.patches import eager_graphs
from mxamp.patches.eager_graphs import DenseGraphs
from mxamp.policy.active import current_policy

SHAPES = {
    "flattened": ((4, 2, 3), True), "not flattened": ((2, 4, 6), False), "plain": ((4, 6), True),
    "a row": ((1, 6), True),
}  # fmt: skip


@pytest.fixture
def single_calls(monkeypatch):
    """Return a function that turns graphs off."""
    return lambda: monkeypatch.setattr(DenseGraphs, "run", lambda *_: None)


@pytest.fixture
def no_single_casts(monkeypatch):
    """Fail at a cast in a call of its own."""
    monkeypatch.setattr(arrays, "invoke", None)


@pytest.fixture(autouse=True)
def _no_graphs_yet():
    """Policies, and with them their graphs, live on between tests."""
    for dtype in DTYPES:
        amp.Policy.default(dtype, "cpu").caches.eager = None


def graphs():
    return current_policy().caches.eager.dense_graphs._ops


def dense(function, data, weight, bias, **attrs):
    units = weight.shape[0]
    if function == "nd":
        inputs = [data, weight] if bias is None else [data, weight, bias]
        return nd.FullyConnected(*inputs, num_hidden=units, no_bias=bias is None, **attrs)
    inputs = [array.as_np_ndarray() for array in (data, weight, bias) if array is not None]
    return mx.npx.fully_connected(*inputs, num_hidden=units, no_bias=bias is None, **attrs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("low_data", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("function", ["nd", "npx"])
def test_outputs_have_the_bits_of_single_calls(
    dtype, function, with_bias, low_data, shape, single_calls
):
    shape, flatten = SHAPES[shape]
    data, weight = randn(*shape), randn(5, 6, seed=1)
    bias = randn(5, seed=2) if with_bias else None
    with amp.autocast(dtype):
        data = down(data, dtype) if low_data else data
        found = dense(function, data, weight, bias, flatten=flatten)
        assert list(graphs().values()) != [None]
        single_calls()
        expected = dense(function, data, weight, bias, flatten=flatten)
    assert type(found) is type(expected)
    assert kind(found) == kind(expected) == dtype
    assert same(found, expected)


#: The leaves among data, weight and bias.
TRAINED = [(0, 1, 2), (1, 2), (0,), (1,), (2,)]


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("train_mode", [False, True])
def test_gradients_have_the_bits_of_single_calls(
    dtype, grad_req, train_mode, trained, single_calls
):
    def run():
        leaves = randn(4, 6), randn(5, 6, seed=1), randn(5, seed=2)
        for i in trained:
            leaves[i].attach_grad(grad_req=grad_req)
        for _ in range(2):
            with autograd.record(train_mode=train_mode):
                once = dense("nd", *leaves)
                loss = (once * dense("nd", *leaves)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return [once, loss, *(leaves[i].grad for i in trained)]

    with amp.autocast(dtype):
        found = run()
        assert len(graphs()) == ({1, 2} <= {*trained})
        single_calls()
        expected = run()
    assert all(map(same, found, expected))
    assert all(abs(gradient.asnumpy()).max() > 0 for gradient in found[2:])


def test_a_call_makes_no_cast_of_its_own(no_single_casts):
    data, weight, bias = randn(4, 6), randn(5, 6, seed=1), randn(5, seed=2)
    weight.attach_grad(), bias.attach_grad()
    with amp.autocast("bfloat16"):
        dense("nd", data, weight, bias)
        with autograd.record():
            dense("nd", data, weight, bias).backward()
        assert len(graphs()) == 2


@pytest.mark.parametrize("recorded", [False, True])
def test_weights_written_in_place_are_read_anew(recorded):
    data, weight, bias = randn(4, 6), randn(5, 6, seed=1), randn(5, seed=2)
    weight.attach_grad(), bias.attach_grad()
    with amp.autocast("bfloat16"):
        found = []
        for _ in range(3):
            with autograd.record() if recorded else autograd.pause():
                found.append(dense("nd", data, weight, bias))
            weight *= 3
            bias[:] = 7
            assert same(found[-1], found[-1].copy())
        expected = dense("nd", data, randn(5, 6, seed=1) * 9, nd.full((5,), 7))
    assert not same(found[0], found[1]) and not same(found[1], found[2])
    assert same(found[2], expected)


def test_recorded_uses_of_a_larger_weight_share_a_cast(monkeypatch):
    weight = randn(5, 6)
    weight.attach_grad()
    for limit, kept in ((29, 1), (30, 0)):
        monkeypatch.setattr(eager_graphs, "_SMALL_WEIGHT", limit)
        with amp.autocast("bfloat16"), autograd.record():
            dense("nd", randn(4, 6), weight, None), dense("nd", randn(4, 6), weight, None)
            assert len(leaf_casts._casts) == kept


def test_calls_that_a_graph_refuses_are_made_singly(single_calls):
    weight, bias = randn(5, 6), randn(5)
    shared = nd.empty((4, 6), ctx=mx.Context("cpu_shared", 0))
    shared[:] = randn(4, 6)
    with amp.autocast("bfloat16"):
        found = dense("nd", shared, weight, bias)
        out = nd.zeros((4, 5))
        nd.FullyConnected(randn(4, 6), weight, bias, num_hidden=5, out=out)
        assert same(out, found.astype("float32"))
        assert same(found, dense("nd", randn(4, 6), weight, bias))
        wrong = [(randn(4, 6), randn(5, 3), bias), (randn(4, 6), weight)]
        errors = [error_of(*arrays) for arrays in wrong]
        single_calls()
        assert errors == [error_of(*arrays) for arrays in wrong]


def error_of(*arrays):
    """Return the text of MXNet's error for a wrong call of a dense layer."""
    with pytest.raises(mx.MXNetError) as error:
        nd.FullyConnected(*arrays, num_hidden=5)
    return str(error.value)


def test_policies_that_keep_dense_layers_in_float32_get_no_graph():
    policy = amp.Policy.default("bfloat16", "cpu").override(fp32=["FullyConnected"])
    with amp.autocast(policy=policy):
        assert kind(dense("nd", randn(4, 6), randn(5, 6), None)) == "float32"
        assert list(graphs().values()) == [None]


def test_threads_have_graphs_of_their_own():
    found = []

    def work():
        with amp.autocast("bfloat16"):
            output = dense("nd", randn(4, 6), randn(5, 6), None)
            found.append((output, list(graphs().values())))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (here, mine), (there, theirs) = found
    assert same(here, there) and mine[0] is not theirs[0]


def test_the_number_of_graphs_is_limited(monkeypatch):
    monkeypatch.setattr(eager_graphs, "_MANY_GRAPHS", 3)
    with amp.autocast("bfloat16"):
        graphs_before = []
        for units in range(1, 8):
            dense("nd", randn(4, 6), randn(units, 6), None)
            graphs_before.append(len(graphs()))
    assert max(graphs_before) == 3


def test_casts_are_observed():
    data, weight, bias = randn(4, 6), randn(5, 6), randn(5)
    with amp.autocast("bfloat16"):
        dense("nd", data, weight, bias)
        with amp.debugging.operator_stats() as stats:
            dense("nd", data, weight, bias)
    assert "FullyConnected" in str(stats) and "3" in str(stats)


def test_second_order_gradients_are_refused():
    x, weight = randn(4, 6), randn(5, 6)
    x.attach_grad(), weight.attach_grad()
    with amp.autocast("bfloat16"), autograd.record():
        y = dense("nd", x, weight, None)
        with pytest.raises(mx.MXNetError):
            autograd.grad(y, [x], create_graph=True)
