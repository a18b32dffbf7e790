"""What mxamp does with arrays on GPUs, run on the CPU: see the fixture `as_on_gpus`."""

import math

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

import mxamp as amp
from helpers import initialized, kind, scaled_backward
from mxamp.graph.ir import Graph
from mxamp.scaling import finite

pytestmark = [pytest.mark.usefixtures("as_on_gpus"), pytest.mark.backend]
BAD = [np.inf, -np.inf, np.nan]


@pytest.fixture(params=["nd", "np"])
def array(request):
    """Make an array of `mx.nd` or of `mx.np`."""
    if request.param == "nd":
        return lambda values, dtype="float32": nd.array(np.asarray(values), dtype=dtype)
    mx.npx.set_np()
    return lambda values, dtype="float32": mx.np.array(np.asarray(values), dtype=dtype)


@pytest.fixture
def waits(monkeypatch):
    """Count how often Python waits for an array's values."""
    counted, original = [], nd.NDArray.asnumpy
    monkeypatch.setattr(nd.NDArray, "asnumpy", lambda a: counted.append(a.shape) or original(a))
    return counted


@pytest.mark.parametrize("value", [*BAD, 0.0, 65000.0])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_overflow_check(array, dtype, value, waits):
    arrays = [array([1, 2]), array([[3, 4]], "float16"), array([1, value], dtype)]
    assert finite.all_finite(arrays) == math.isfinite(value)
    assert len(waits) == 1


def test_many_arrays_of_two_devices_and_dtypes(array, waits):
    arrays = [array([1.0] * k, ("float16", "float32")[k % 2]) for k in range(1, 450)]
    arrays += [a.as_in_context(mx.cpu(1)) for a in arrays]
    assert finite.all_finite(arrays)
    assert len(waits) == 1
    assert finite.square_sum(arrays) == 449 * 450
    assert len(waits) == 2
    arrays[-1][7] = np.nan
    assert not finite.all_finite(arrays)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sums_of_squares(array, dtype, waits):
    arrays = [array([3, 4], dtype), array([[2], [2]]), array([1], "float16")]
    assert finite.square_sum(arrays) == 25 + 8 + 1
    assert len(waits) == 1
    assert finite.square_sum([]) == 0
    if mx.util.is_np_array():
        assert finite.square_sum([mx.np.array(2.0), mx.np.zeros((0, 2))]) == 4


def test_sums_of_squares_beyond_float32(array, waits):
    arrays = [array([1.0]), array([2e19, 1e19]), array([60000], "float16")]
    np.testing.assert_allclose(finite.square_sum(arrays), 5e38, rtol=1e-6)
    assert len(waits) == 2
    assert finite.square_sum([array([1.0, np.inf])]) == math.inf
    assert math.isnan(finite.square_sum([array([1.0, np.nan])]))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_unscaled_arrays(array, dtype):
    arrays = [array([8.0, 4.0], dtype), array([np.inf, 1], dtype), array([2.0])]
    arrays += [array([np.nan])]
    assert finite.divide_and_check(arrays, 4.0) == [1, 3]
    assert arrays[0].asnumpy().tolist() == [2, 1]
    assert arrays[2].asnumpy().tolist() == [0.5]


class Products(gluon.Block):
    """Two weights, of products and sums alone, which have a kernel everywhere."""

    def __init__(self, values):
        super().__init__()
        with self.name_scope():
            constant = mx.init.Constant
            self.a = self.params.get("a", shape=(2,), init=constant(values[0]))
            self.b = self.params.get("b", shape=(1,), init=constant(values[1]))

    def forward(self, x):
        return (x * self.a.data()).sum() + (x * self.b.data()).sum()


def trained(values, scale=None):
    net = initialized(Products(values))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    if scale is not None:
        amp.init_trainer(trainer, amp.StaticLossScaler(scale))
    return net, trainer


def backward(net, trainer, x):
    scaled_backward(lambda: net(x), trainer)


@pytest.mark.parametrize("large", [1.0, 2e19])
def test_clipped_gradients(array, large, waits):
    net, trainer = trained((0.0, 0.0), 2.0)
    backward(net, trainer, array([3 * large, 4 * large]))
    norm = amp.clip_grad_global_norm(trainer, 1.0)
    np.testing.assert_allclose(norm, large * math.sqrt(9 + 16 + 49), rtol=1e-6)
    # The overflow check, the norm, and the norm again where float32 has no room for its square.
    assert len(waits) == (2 if large == 1 else 3)
    total = sum(float(np.square(p.grad().asnumpy()).sum()) for p in net.collect_params().values())
    np.testing.assert_allclose(total, 1, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_arrays_of_the_cpu_under_a_policy_for_gpus(dtype, monkeypatch):
    # As they are: left alone, an operator that starts the backward pass included.
    monkeypatch.undo()
    data, label = nd.array([[1, -np.inf, 2], [0, -0.0, 1]]).astype(dtype), nd.array([0, 1])
    data.attach_grad()
    results = []
    for policy in (None, amp.Policy.default("float16", "gpu")):
        with amp.autocast(policy=policy, enabled=policy is not None), autograd.record():
            out = nd.SoftmaxOutput(data, label.astype(dtype))
        out.backward()
        assert kind(out) == kind(data.grad) == dtype
        results.append((out.asnumpy().tolist(), data.grad.asnumpy().tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_norm_that_gluon_clips_by(dtype, check):
    arrays = [nd.array([3000.0, 4000.0]).astype(dtype), nd.zeros((2,)).astype(dtype)]
    if dtype == "float32":
        # MXNet's own.
        arrays = [a / 1000 for a in arrays]
    with amp.autocast(policy=amp.Policy.default("float16", "gpu")):
        norm = gluon.utils.clip_global_norm(arrays, 1.0, check_isfinite=check)
    norm = norm if check else norm.asscalar()
    assert norm == (5000 if dtype == "float16" else 5)
    np.testing.assert_allclose(arrays[0].asnumpy(), [0.6, 0.8], rtol=1e-3)


@pytest.mark.backend
def test_casts_in_graphs_of_arrays_that_may_be_empty():
    """Of NumPy's shapes: amp_cast would launch an empty grid on a GPU."""
    policy = amp.Policy.default("float16", "gpu")
    x = mx.sym.var("x").as_np_ndarray()

    def operators(policy):
        converted = amp.convert_symbol(mx.sym.npx.relu(mx.sym.np.exp(x)), policy=policy)
        again = amp.convert_symbol(converted, policy=policy)
        assert again.tojson() == converted.tojson()
        other = amp.convert_symbol(converted, policy=amp.Policy.default("bfloat16"))
        assert "float16" not in other.tojson().replace("bfloat16", "")
        nodes = Graph.from_symbol(converted).nodes
        return {node.name for node in nodes if node.is_inserted_cast and node.op == "Cast"}

    low = mx.sym.npx.fully_connected(x, mx.sym.var("w").as_np_ndarray(), num_hidden=2, no_bias=True)
    x = low
    assert operators(policy) == set()
    mx.npx.set_np()
    assert len(operators(policy)) >= 2
    assert operators(amp.Policy.default("float16", "cpu")) == set()
