"""BatchNorm folded in float32 into the product before it."""

import mxnet as mx
import pytest
from fusion import after, model, same_after

import mxamp as amp
from helpers import operators_of, same, with_avx512
from mxamp.backends.onednn.fuse import fold_into_producers
from mxamp.backends.passes import Pass

B = amp.Policy.default("bfloat16")
INTO_PRODUCERS = Pass(None, fold_into_producers)


def conv(data, name="conv", **more):
    options = {"kernel": (3, 3), "num_filter": 6, **more}
    return mx.sym.Convolution(data, name=name, **options)


X = mx.sym.var("data")
FOLDED = {
    "bias": lambda: mx.sym.BatchNorm(conv(X), fix_gamma=False),
    "no bias": lambda: mx.sym.BatchNorm(conv(X, no_bias=True), fix_gamma=False, eps=1e-5),
    "fixed gamma": lambda: mx.sym.BatchNorm(conv(X, no_bias=True)),
    "groups": lambda: mx.sym.BatchNorm(conv(X, num_group=2), fix_gamma=False),
    "dense": lambda: mx.sym.BatchNorm(mx.sym.FullyConnected(X, num_hidden=5), fix_gamma=False),
    "two": lambda: mx.sym.BatchNorm(
        conv(mx.sym.relu(mx.sym.BatchNorm(conv(X, "a"), name="na")), "b"), name="nb"
    ),
}


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("name", FOLDED)
def test_folding_in_float32_keeps_values(name):
    symbol = FOLDED[name]()
    params, data = model(symbol, (2, 4, 8, 8))
    new, values = same_after(INTO_PRODUCERS, symbol, params, B, data)
    assert "BatchNorm" not in operators_of(new)
    assert set(values) == set(new.list_inputs()) - {"data"}


def shared_weight(channels=4):
    options = {"weight": mx.sym.var("weight"), "pad": (1, 1), "num_filter": channels}
    return conv(mx.sym.BatchNorm(conv(X, "a", **options), name="n"), "b", **options)


def read_twice(join):
    product = conv(X)
    return join(mx.sym.BatchNorm(product, name="n"), product)


LEFT = {
    "read twice": lambda: read_twice(mx.sym.elemwise_add),
    "shared weight": shared_weight,
    "an output": lambda: read_twice(lambda *outputs: mx.sym.Group(outputs)),
    "first": lambda: conv(mx.sym.BatchNorm(X, name="n")),
    "channels last": lambda: mx.sym.BatchNorm(conv(X), axis=-1),
    "kept": lambda: mx.sym.BatchNorm(conv(X), name="kept"),
    "rows": lambda: mx.sym.BatchNorm(mx.sym.FullyConnected(X, num_hidden=5, flatten=False)),
    "statistics": lambda: mx.sym.BatchNorm(conv(X), output_mean_var=True),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_can_not_be_folded_stays(name):
    symbol = LEFT[name]()
    params, _ = model(symbol, (2, 4, 8, 8))
    new, values = after(INTO_PRODUCERS, symbol, params, B.override(fp32_layers=["kept"]))
    assert operators_of(new) == operators_of(symbol)
    assert all(same(values[key], params[key]) for key in values)


@pytest.mark.parametrize("policy, error", [
    (B.in_float32(), 1e-5), pytest.param(B, 0.02, marks=with_avx512),
])  # fmt: skip
def test_mxnet_does_not_fold_what_has_to_stay(policy, error):
    symbol = shared_weight(channels=16)
    params, data = model(symbol, (2, 16, 8, 8))
    auxs = {name: params.pop(name) for name in symbol.list_auxiliary_states()}
    fast = amp.convert_model(symbol, params, auxs, policy=policy, fuse=True)
    assert operators_of(fast[0]).count("BatchNorm") == operators_of(symbol).count("BatchNorm") > 0
    assert amp.compare_models((symbol, params, auxs), fast, {"data": data})[0].relative < error
