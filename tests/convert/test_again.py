"""Models that were converted already, converted again: with the same arguments and with others."""

import itertools

import mxnet as mx
import pytest

import mxamp as amp
from helpers import kind, randn
from mxamp.graph.ir import Graph
from nets import Control

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

LISTS = {"default": {}, "excluded": {"excluded_sym_names": ["a"]}}
WAYS = [
    pytest.param({"target_dtype": low, "cast_optional_params": offline, **LISTS[lists]},
                 id=f"{low}-{offline}-{lists}")
    for low, offline, lists in itertools.product(("float16", "bfloat16"), (False, True), LISTS)
]  # fmt: skip


def nodes(symbol):
    nodes = Graph.from_symbol(symbol).nodes
    return [(node.op, node.name, node.attrs.get("dtype")) for node in nodes]


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
        kinds = ({n: kind(a) for n, a in model[1].items()} for model in (again, direct))
        assert next(kinds) == next(kinds)


@pytest.mark.parametrize("way", ["converted", "autocast"])
@pytest.mark.parametrize("read, to", [("int32", "float64"), ("uint8", "float32")])
def test_casts_of_integers_that_are_written_by_hand_stay(dtype, way, read, to):
    whole = S.Cast(S.var("data") * 10, dtype=read)
    net = S.Cast(S.Cast(whole, dtype=to, name=f"i_amp_cast_{to}") * 0.1, dtype="float32")
    if way == "converted":
        net = amp.convert_symbol(amp.convert_symbol(net, dtype), dtype)
    with amp.autocast(dtype, enabled=way == "autocast"):
        out = net.bind(mx.cpu(), {"data": mx.nd.array([1.5, 2.5])}).forward()[0]
    assert out.asnumpy().tolist() == pytest.approx([1.5, 2.5], rel=0.01)


def types(symbol, **known):
    return [None if found is None else list(found) for found in symbol.infer_type(**known)]


@pytest.mark.parametrize("name", ["foreach", "while_loop", "cond", "product"])
def test_types_and_shapes_are_inferred_as_before(name, dtype):
    data, weight = S.relu(S.var("data")), S.transpose(S.var("weight"))
    if name == "product":
        symbol = S.FullyConnected(data, weight, num_hidden=4, no_bias=True)
    else:
        symbol = Control(name).hybrid_forward(S, data, weight)
    converted = amp.convert_symbol(symbol, dtype)
    assert types(converted, data="float32") == types(symbol, data="float32")
    assert types(converted, data="float32")[1] is not None
    shapes = {"data": (4, 4) if name == "product" else (3, 2, 4), "weight": (4, 4)}
    assert converted.infer_shape_partial(**shapes) == symbol.infer_shape_partial(**shapes)


@pytest.mark.filterwarnings("ignore:Cannot decide type")
def test_a_model_that_mxnet_saved_without_its_casts_is_converted_again(tmp_path, dtype):
    converted = amp.convert_model(NET, PARAMS, {}, dtype, cast_optional_params=True)
    mx.model.save_checkpoint(str(tmp_path / "low"), 0, *converted)
    files = [str(tmp_path / f"low-{name}") for name in ("symbol.json", "0000.params")]
    block = mx.gluon.SymbolBlock.imports(files[0], ["data"], files[1])
    block(INPUTS["data"])
    block.export(str(tmp_path / "stripped"))
    stripped = mx.model.load_checkpoint(str(tmp_path / "stripped"), 0)
    assert "amp_cast" not in stripped[0].tojson(remove_amp_cast=False)
    again = amp.convert_model(*stripped, dtype, cast_optional_params=True)
    assert nodes(again[0]) == nodes(converted[0]) and error(again) <= 2 * error(converted)
