"""Models that were converted already, converted again: with the same arguments and with others."""

import itertools

import mxnet as mx
import pytest
from mxnet.contrib import amp as stock

import mxamp as amp
from helpers import kind, randn, with_avx512
from models import GPU
from mxamp.graph.ir import Graph
from nets import Control, convolutional, made

S = mx.sym
PARAMS = {
    "a_weight": randn(16, 64, scale=0.1),
    "a_bias": randn(16, seed=1),
    "b_weight": randn(8, 16, seed=2, scale=0.1),
}
NET = S.FullyConnected(S.var("data"), num_hidden=16, name="a")
NET = S.FullyConnected(S.relu(NET, name="r"), num_hidden=8, no_bias=True, name="b")
NET = S.softmax(NET, name="s")
INPUTS = {"data": randn(4, 64, seed=3)}

LISTS = {
    "default": {},
    "excluded": {"excluded_sym_names": ["a"]},
}
WAYS = [
    pytest.param({"target_dtype": low, "cast_optional_params": offline, **LISTS[lists]},
                 id=f"{low}-{offline}-{lists}")
    for low, offline, lists in itertools.product(("float16", "bfloat16"), (False, True), LISTS)
]  # fmt: skip


def nodes(symbol):
    return [
        (node.op, node.name, node.attrs.get("dtype")) for node in Graph.from_symbol(symbol).nodes
    ]


def error(converted):
    return amp.compare_models((NET, PARAMS, {}), converted, INPUTS)[0].relative


@pytest.mark.matrix
@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("then", WAYS)
def test_the_second_conversion_decides_alone(first, then):
    once = amp.convert_model(NET, PARAMS, {}, **first)
    again = amp.convert_model(*once, **then)
    direct = amp.convert_model(NET, PARAMS, {}, **then)
    rounded = 0.01 if first["cast_optional_params"] else 0.0  # what the parameters have lost
    assert error(again) <= 2 * max(error(direct), rounded)
    if not first["cast_optional_params"]:
        assert nodes(again[0]) == nodes(direct[0])
        assert {n: kind(a) for n, a in again[1].items()} == {
            n: kind(a) for n, a in direct[1].items()
        }


@pytest.mark.parametrize("before", [amp, stock])
def test_parameters_are_cast_later_as_by_stock(before):
    # Stock MXNet changes the dictionaries that it is given.
    once = before.convert_model(NET, dict(PARAMS), {}, target_dtype="float16")
    theirs = stock.convert_model(NET, dict(PARAMS), {}, target_dtype="float16")
    expected = stock.convert_model(*theirs, target_dtype="float16", cast_optional_params=True)[1]
    _, params, _ = amp.convert_model(*once, policy=GPU, cast_optional_params=True)
    assert {n: kind(a) for n, a in params.items()} == {n: kind(a) for n, a in expected.items()}
    assert {kind(array) for array in params.values()} == {"float16"}
    assert {kind(array) for array in once[1].values()} == {"float32"}


@pytest.mark.parametrize("way", ["converted", "autocast"])
@pytest.mark.parametrize(
    "read, to", [("int32", "float64"), ("int32", "float32"), ("uint8", "float32")]
)
def test_casts_of_integers_that_are_written_by_hand_stay(dtype, way, read, to):
    whole = S.Cast(S.var("data") * 10, dtype=read)
    net = S.Cast(S.Cast(whole, dtype=to, name=f"i_amp_cast_{to}") * 0.1, dtype="float32")
    if way == "converted":
        net = amp.convert_symbol(amp.convert_symbol(net, dtype), dtype)
    with amp.autocast(dtype, enabled=way == "autocast"):
        out = net.bind(mx.cpu(), {"data": mx.nd.array([1.5, 2.5])}).forward()[0]
    assert out.asnumpy().tolist() == pytest.approx([1.5, 2.5], rel=0.01)


@with_avx512
@pytest.mark.parametrize("first", ["float16", "bfloat16"])
@pytest.mark.parametrize("fuse", [False, True])
def test_blocks(first, fuse):
    net, (x,) = made(convolutional)
    net.hybridize()
    expected = net(x).asnumpy()
    once = amp.convert_hybrid_block(net, first)
    again = amp.convert_hybrid_block(once, "bfloat16", fuse=fuse, cast_optional_params=True)
    assert abs(again(x).asnumpy() - expected).max() < 0.05
    kept = amp.convert_hybrid_block(once, "bfloat16", excluded_sym_names=["*"])
    assert (kept(x).asnumpy() == expected).all()


def types(symbol, **known):
    return [None if found is None else list(found) for found in symbol.infer_type(**known)]


def behind(name):
    data, weight = S.relu(S.var("data")), S.transpose(S.var("weight"))
    if name != "product":
        return Control(name).hybrid_forward(S, data, weight)
    return S.FullyConnected(data, weight, num_hidden=4, no_bias=True)


@pytest.mark.parametrize("name", ["foreach", "while_loop", "cond", "product"])
@pytest.mark.parametrize("direct", [False, True])
def test_types_and_shapes_are_inferred_as_before(name, direct, dtype):
    symbol = Control(name)(S.var("data")) if direct and name != "product" else behind(name)
    converted = amp.convert_symbol(symbol, dtype)
    assert types(converted, data="float32") == types(symbol, data="float32")
    assert types(converted, data="float32")[1] is not None
    weight = next(n for n in symbol.list_arguments() if "weight" in n)
    shapes = {"data": (4, 4) if name == "product" else (3, 2, 4), weight: (4, 4)}
    assert converted.infer_shape_partial(**shapes) == symbol.infer_shape_partial(**shapes)
