"""Convolutions padded to multiples of 16 output channels: the same answers, other kernels."""

import mxnet as mx
import numpy as np
import pytest
from fusion import after, run, same_after
from fusion import model as random_model
from mxnet import nd

import mxamp as amp
from helpers import operators_of, randn, same, with_avx512
from mxamp.backends.onednn.pad_channels import _ELEMENTWISE, pad_channels
from mxamp.backends.passes import Pass
from mxamp.graph.ir import Graph

pytestmark = pytest.mark.usefixtures("unfused")

B = amp.Policy.default("bfloat16")
S = mx.sym
X = S.var("data")
PADDING = Pass("padded_channels", pad_channels)


def conv(data, channels=24, kernel=1, name=None, **more):
    pad = (kernel // 2,) * 2
    options = {"num_filter": channels, "kernel": (kernel, kernel), "pad": pad, **more}
    return S.Convolution(data, name=name, **options)


def depthwise(data, channels=24, times=1, **more):
    return conv(data, channels * times, 3, num_group=channels, **more)


def norm(data, **more):
    return S.BatchNorm(data, **{"fix_gamma": False, **more})


def model(symbol, shape=(2, 16, 5, 5), seed=0):
    return random_model(symbol, shape, seed, scale=0.25)


def padded(symbol, params, policy=B):
    return after(PADDING, symbol, params, policy)


def filters(symbol):
    """The output channels of each convolution."""
    nodes = Graph.from_symbol(symbol).nodes
    return [int(node.attrs["num_filter"]) for node in nodes if node.op == "Convolution"]


def joint(*channels, behind=S.relu):
    return conv(behind(S.concat(*(conv(X, each) for each in channels), dim=1)), 32)


def residual(data):
    first = conv(data)
    return conv(first + conv(S.relu(conv(first, 144))), 32)


def gated(join):
    data = conv(X)
    gate = conv(S.relu(conv(S.Pooling(data, global_pool=True, pool_type="avg"), 12)), 24)
    return conv(join(data, S.clip(gate + 3, 0, 6) / 6), 32)


def read_and_returned(data):
    return S.Group([conv(data), data, data])


def shared(weight):
    return conv(X, weight=weight, no_bias=True) + conv(X, weight=weight, no_bias=True)


#: A graph, the output channels of its convolutions then, and how many slices it has.
GRAPHS = {
    "an output": (lambda: conv(X), [32], 1),
    "read and returned": (lambda: read_and_returned(conv(X)), [32, 32], 2),
    "1000 to 1008": (lambda: S.Flatten(S.Pooling(S.relu(conv(X, 1000)), global_pool=True)), [1008], 1),
    "a chain": (lambda: conv(S.clip(conv(S.relu(conv(X, 40)), 24), 0, 6), 32), [48, 32, 32], 0),
    "depthwise": (lambda: conv(S.relu(depthwise(S.relu(conv(X)))), 32), [32, 32, 32], 0),
    "depthwise times 2": (lambda: conv(depthwise(conv(X), times=2), 32), [32, 64, 32], 0),
    "a bias or none": (lambda: conv(depthwise(conv(X, no_bias=True), no_bias=True), 24), [32] * 3, 1),
    "residual": (lambda: residual(conv(X, 32)), [32, 32, 144, 32, 32], 0),
    "gated": (lambda: gated(S.broadcast_mul), [32, 16, 32, 32], 0),
    "norms of fixed gamma": (lambda: conv(norm(conv(X), fix_gamma=True), 32), [32, 32], 0),
    "concat and a norm": (lambda: joint(24, 32, 40, behind=norm), [32, 32, 48, 32], 0),
    "dense behind flatten": (lambda: S.FullyConnected(S.Dropout(S.Flatten(conv(X))), num_hidden=3), [32], 0),
    "dense of a concat": (lambda: S.FullyConnected(S.concat(conv(X), conv(X, 40), dim=1), num_hidden=3), [32, 48], 0),
    "transposed": (lambda: S.transpose(conv(X), axes=(0, 2, 3, 1)), [32], 1),
    "leaky, elu, gelu": (lambda: conv(S.LeakyReLU(S.LeakyReLU(S.LeakyReLU(conv(X)), act_type="elu"), act_type="gelu"), 32), [32, 32], 0),
    "borders": (lambda: conv(S.pad(conv(X), mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 2, 2)), 32), [32, 32], 0),
    "pooled": (lambda: conv(S.Pooling(S.Pooling(conv(X), kernel=(2, 2)), pool_type="avg", kernel=(2, 2), pad=(1, 1)), 32), [32, 32], 0),
}  # fmt: skip
#: Graphs whose convolutions stay as they are.
LEFT = {
    "more than a third": lambda: conv(conv(X, 20), 8),
    "odd inputs": lambda: conv(S.concat(X, S.slice_axis(X, axis=1, begin=0, end=1), dim=1)),
    "groups": lambda: conv(conv(X, num_group=4), 32),
    "read by groups": lambda: conv(conv(X), 32, num_group=2),
    "read by softmax": lambda: S.softmax(conv(X), axis=1),
    "added to others": lambda: conv(S.elemwise_add(conv(X), S.tile(X, reps=(1, 2, 1, 1)).slice_axis(axis=1, begin=0, end=24)), 32),
    "added to other channels": lambda: S.broadcast_add(conv(X), conv(X, 1)),
    "beside unknown channels": lambda: conv(S.concat(conv(X), X, dim=1), 32),
    "a shared weight": lambda: shared(S.var("w")),
    "rows of pixels": lambda: S.FullyConnected(conv(X), num_hidden=3, flatten=False),
    "exponentials": lambda: conv(S.exp(conv(X)), 32),
    "large values": lambda: conv(conv(X) * 1e5 + 1e5, 32),
    "sums of windows": lambda: conv(S.Pooling(conv(X) + 1, pool_type="sum", kernel=(2, 2)), 32),
    "statistics": lambda: S.Group(list(norm(conv(X), output_mean_var=True))),
    "dropout that always runs": lambda: conv(S.Dropout(conv(X), mode="always"), 32),
    "prelu": lambda: conv(S.LeakyReLU(conv(X), act_type="prelu"), 32),
}  # fmt: skip


@with_avx512
@pytest.mark.parametrize("name", GRAPHS)
def test_padded_graphs_answer_the_same(name):
    make, channels, slices = GRAPHS[name]
    symbol = make()
    params, _ = model(symbol)
    sizes = ((2, 16, 5, 5), (1, 16, 7, 5)) if "dense" not in name else ((2, 16, 5, 5),)
    batches = [randn(*size) for size in sizes]
    new, _ = same_after(PADDING, symbol, params, B, *batches, tolerance=1e-5)
    assert filters(new) == channels
    assert operators_of(new).count("slice_axis") == slices
    assert new.list_inputs() == symbol.list_inputs()
    size = {"data": (2, 16, 5, 5)}
    assert new.infer_shape(**size)[1] == symbol.infer_shape(**size)[1]


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_it_is(name):
    symbol = LEFT[name]()
    params, _ = model(symbol)
    new, values_now = padded(symbol, params)
    assert filters(new) == filters(symbol)
    assert operators_of(new) == operators_of(symbol)
    assert all(same(values_now[key], params[key]) for key in params)


@with_avx512
def test_what_is_infinite_makes_no_silent_number():
    symbol = GRAPHS["depthwise"][0]()
    params, data = model(symbol)
    data[0, 0, 2, 2] = np.inf
    [plain], [found] = run(symbol, params, data), run(*padded(symbol, params), data)
    wrong = ~np.isclose(found, plain, rtol=2e-5, atol=2e-6)
    assert wrong.any() and not np.isfinite(found[wrong]).any()


#: Calls whose output is bounded by a bound of their input, and calls whose output is not known.
BOUNDED = [
    *[("Activation", {"act_type": kind}) for kind in ("sigmoid", "softrelu", "relu")],
    *[("LeakyReLU", {"act_type": kind, "slope": "3.0"}) for kind in ("leaky", "elu", "gelu")],
    ("clip", {"a_min": "-1", "a_max": "2"}), ("clip", {"a_min": "-6", "a_max": "-4"}),
    ("Dropout", {"p": "0.5"}), ("Pooling", {"kernel": "(2, 2)", "pool_type": "avg"}),
    ("Pooling", {"kernel": "(2, 2)", "pool_type": "max"}),
    ("Pad", {"mode": "constant", "pad_width": "(0,0,0,0,1,1,1,1)", "constant_value": "7"}),
    ("relu", {}), ("hard_sigmoid", {}),
    *[(f"_{name}_scalar", {"scalar": scalar})
      for name in ("plus", "minus", "rminus", "maximum", "minimum", "mul", "div")
      for scalar in ("4.0", "-0.5")],
]  # fmt: skip


@pytest.mark.parametrize("operator, attrs", BOUNDED, ids=str)
@pytest.mark.parametrize("bound", [0.0, 0.5, 2.5])
def test_bounds_of_padding_channels_hold(operator, attrs, bound):
    data = nd.array(np.linspace(-bound, bound, 36)).reshape((1, 1, 6, 6))
    node = S.__dict__.get(operator) or getattr(S._internal, operator)
    output = node(S.var("data"), **attrs).bind(mx.cpu(), {"data": data}).forward()[0]
    found = _ELEMENTWISE[operator](attrs, bound)
    assert abs(output.asnumpy()).max() <= found + 1e-6
    assert found <= max(10.0, 8 * bound)  # no looser than the operators need
