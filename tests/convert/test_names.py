"""Names that are equal, taken or not in English, and attributes that other languages wrote."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

import mxamp as amp
from helpers import values, with_avx512

S = mx.sym
X = S.var("data")
SHAPE = (2, 3, 16, 16)
BFLOAT16 = amp.Policy.default("bfloat16")

pytestmark = pytest.mark.usefixtures("unfused")

FUSED = [
    pytest.param({"policy": BFLOAT16, "fuse": True}, marks=with_avx512, id="fused"),
    pytest.param({"policy": BFLOAT16.in_float32(), "fuse": True}, id="fused float32"),
]
OPTIONS = [
    *FUSED,
    pytest.param({"target_dtype": "float16"}, id="float16"),
    pytest.param(
        {"policy": BFLOAT16, "cast_optional_params": True}, marks=with_avx512, id="bfloat16"
    ),
]


def conv(data, weight, channels=16, **more):
    return S.Convolution(data, weight, kernel=(3, 3), num_filter=channels, name="c", **more)


def norm(data, k=""):
    parameters = [S.var(f"{name}{k}") for name in ("gamma", "beta", "mean", "variance")]
    return S.BatchNorm(data, *parameters, fix_gamma=False, name="norm")


def layer(k, data=X):
    return norm(conv(data, S.var(f"w{k}"), no_bias=True), k)


def dense(data, weight, **more):
    return S.FullyConnected(data, weight, num_hidden=24, name="rows", **more)


def behind(k):
    return dense(norm(S.exp(S.Flatten(X)), k), S.var(f"w{k}"), no_bias=True)


def with_taken(name):
    taken = S.Group([layer(""), S.var(name) * 3])
    return taken if name.endswith("weight") else S.Group([taken[0], taken[1] + 1])


MODELS = {
    "twins": lambda: layer(1) + 2 * layer(2),
    "twins behind norms": lambda: behind(1) + 2 * behind(2),
    "twins of odd channels": lambda: conv(conv(X, S.var("a"), 24), S.var("b"), 24),
    "a bias's name": lambda: with_taken("c_folded_bias"),
    "an image's name": lambda: with_taken("c_data_four_weight"),
    "a barrier's name": lambda: S.tanh(S._internal._mul_scalar(layer(""), scalar=3, name="x_amp_apart")),
    "a slice's name": lambda: S.Group([conv(X, S.var("a"), 24), S.var("c_channels") * 2]),
    "one parameter twice": lambda: S.Group([dense(X, S.var("w")), S.exp(S.var("w"))]),
    "a bias that is a beta": lambda: norm(conv(X, S.var("w"), bias=S.var("beta"))),
    "German": lambda: S.Convolution(X, kernel=(3, 3), num_filter=16, name="größe"),
    "an attribute": lambda: conv(X, S.var("w", attr={"__note__": "größe\x01\b\f\n\\u0041\\b\"日本"})),
}  # fmt: skip


def parameters(symbol):
    shapes, _, states = symbol.infer_shape_partial(data=SHAPE)
    random = np.random.RandomState(0)

    def made(names, sizes):
        known = {name: size for name, size in zip(names, sizes) if size}  # of one of two
        return {
            name: nd.array(random.rand(*known.get(name, (4, 3, 1, 1))) / 3 + 0.1)
            for name in dict.fromkeys(names)
            if name != "data"
        }

    return made(symbol.list_arguments(), shapes), made(symbol.list_auxiliary_states(), states)


def run(symbol, args, auxs, data):
    """Run a graph as a block does: executors refuse what has a name twice."""
    given = {**args, **auxs, "data": data}
    names = symbol.list_inputs()
    outputs = mx.nd.CachedOp(symbol)(*[given[name] for name in names])
    outputs = outputs if isinstance(outputs, list) else [outputs]
    return [values(output) for output in outputs]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.backend
def test_models_with_any_names(name, options):
    symbol = MODELS[name]()
    args, auxs = parameters(symbol)
    data = nd.array(np.random.RandomState(1).randn(*SHAPE))
    converted = amp.convert_model(symbol, args, auxs, **options)
    for wanted, got in zip(run(symbol, args, auxs, data), run(*converted, data)):
        assert got.dtype == np.float32
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error < 0.02, error
    assert len(set(converted[0].list_inputs())) == len(converted[0].list_inputs())


def test_attributes_come_back_as_they_were():
    symbol = MODELS["an attribute"]()
    args, auxs = parameters(symbol)
    converted, *_ = amp.convert_model(symbol, args, auxs, "float16")
    assert converted.attr_dict()["w"]["__note__"] == 'größe\x01\b\f\n\\u0041\\b"日本'
