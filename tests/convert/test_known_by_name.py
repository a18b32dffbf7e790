"""Casts that only their names tell: of earlier versions, of MXNet's own conversion, of a model.

files_before_roles.json holds symbols that an earlier version has converted, by model, dtype, and
whether the parameters were cast offline.
"""

import json
from pathlib import Path

import mxnet as mx
import pytest
from mxnet.contrib import amp as stock

import mxamp as amp
from helpers import check_python, operators_of, randn, same
from mxamp.graph.ir import Graph

S = mx.sym
FILES = json.loads(Path(__file__).with_name("files_before_roles.json").read_text())
DTYPES = ("float32", "float16", "bfloat16")
GPU = amp.Policy.default("float16", "gpu")
DATA = {"data": randn(4, 64, seed=3)}


def dense():
    x = S.relu(S.FullyConnected(S.var("data"), num_hidden=16, name="a"), name="r")
    net = S.softmax(S.FullyConnected(x, num_hidden=8, no_bias=True, name="b"), name="s")
    parts = S.split(net, num_outputs=2, name="split")
    return S.FullyConnected(parts[1], num_hidden=2, name="c")


def loop():
    def step(data, states):
        weight = S.var("w")
        return S.FullyConnected(data, weight, num_hidden=4, no_bias=True, name="in"), states

    with mx.name.NameManager():
        return S.contrib.foreach(step, S.var("data"), [S.var("state")])[0]


def params(net):
    shapes = zip(net.list_arguments(), net.infer_shape(data=(4, 64))[0])
    return {name: randn(*shape, scale=0.1) for name, shape in shapes if name != "data"}


def nodes(symbol):
    nodes = Graph.from_symbol(symbol).all_nodes
    return [(node.op, node.name, node.attrs.get("dtype"), node.inputs) for node in nodes]


def inserted(symbol):
    nodes = Graph.from_symbol(symbol).all_nodes
    return {node.name for node in nodes if node.is_inserted_cast or node.is_inserted_copy}


def called_amp(symbol):
    nodes = Graph.from_symbol(symbol).all_nodes
    return {node.name for node in nodes if "_amp_" in node.name}


@pytest.mark.parametrize("then", DTYPES)
@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("empty")])
@pytest.mark.backend
def test_an_earlier_file_is_converted_again(name, then):
    saved = S.load_json(json.dumps(FILES[name]))
    assert inserted(saved) == called_amp(saved) != set()
    model, dtype, offline = name.split()
    net = loop() if model == "loop" else dense()
    policy = GPU if dtype == "float16" else amp.Policy.default(dtype)
    own = amp.convert_symbol(
        net, policy=policy, cast_optional_params=offline == "True", data_names=["data"]
    )
    assert nodes(amp.convert_symbol(saved, then)) == nodes(amp.convert_symbol(own, then))
    if model == "dense" and offline == "False" and then == "float32":
        again = amp.convert_model(saved, params(net), {}, then, fuse=True)
        direct = amp.convert_model(net, params(net), {}, then, fuse=True)
        assert nodes(again[0]) == nodes(direct[0])


def test_an_earlier_file_for_arrays_that_may_be_empty():
    saved = S.load_json(json.dumps(FILES["empty float16 False"]))
    assert inserted(saved) == called_amp(saved) != set()
    assert "Cast" not in operators_of(amp.convert_symbol(saved, "float32"))


@pytest.mark.parametrize("then", DTYPES)
@pytest.mark.parametrize("offline", [False, True])
def test_a_model_that_mxnet_has_converted(then, offline):
    net, options = dense(), {"target_dtype": "float16", "cast_optional_params": offline}
    saved, args, _ = stock.convert_model(net, params(net), {}, **options)
    assert inserted(saved) == {name for name in called_amp(saved) if "multicast" not in name}
    again = amp.convert_model(saved, args, {}, then)
    assert nodes(again[0]) == nodes(amp.convert_symbol(net, then))


def test_the_model_that_is_explained_and_run():
    saved = S.load_json(json.dumps(FILES["dense float16 False"]))
    own = amp.convert_symbol(dense(), policy=GPU)
    assert str(amp.explain(saved)) == str(amp.explain(own))
    with amp.autocast(policy=amp.Policy.default("float16", "cpu")):
        outputs = [
            one.bind(mx.cpu(), {**params(dense()), **DATA}).forward()[0] for one in (saved, own)
        ]
    assert same(*outputs)


def test_a_file_keeps_the_roles_of_its_casts_and_runs_in_plain_mxnet(tmp_path, dtype):
    net = dense()
    model = amp.convert_model(net, params(net), {}, dtype, cast_optional_params=True)
    mx.model.save_checkpoint(str(tmp_path / "low"), 0, *model)
    loaded = mx.model.load_checkpoint(str(tmp_path / "low"), 0)
    assert Graph.from_symbol(loaded[0]) == Graph.from_symbol(model[0])
    # No names are looked at where nodes have roles.
    renamed = json.loads(loaded[0].tojson(remove_amp_cast=False))
    for node in renamed["nodes"]:
        node["name"] = node["name"].replace("_amp_", "_")
    again = S.load_json(json.dumps(renamed))
    assert len(inserted(again)) == len(inserted(loaded[0])) > 0
    assert nodes(amp.convert_symbol(again, "float32")) == nodes(amp.convert_symbol(net, "float32"))
    expected = amp.compare_models((net, params(net), {}), model, DATA)
    code = f"""
        import mxamp, mxnet as mx  # MXNet alone can't be imported beside a new NumPy
        model = mx.model.load_checkpoint({str(tmp_path / "low")!r}, 0)
        args = {{**model[1], "data": mx.nd.ones((4, 64))}}
        print(model[0].bind(mx.cpu(), args).forward()[0].shape)
    """
    assert expected and "(4, 2)" in check_python(code)


# ---------------------------------------------------------------------- a model's own casts


def rounding(cast):
    """A net that rounds its data to float16 on purpose, in a cast with a conversion's name."""
    x = cast(S.var("data"), dtype="float16", name="data_amp_cast_float16")
    return S.Cast(x, dtype="float32", name="up") * 3


@pytest.mark.parametrize("way", ["converted", "explained", "autocast", "loaded"])
def test_a_models_own_cast_rounds_whatever_its_name(way):
    net = rounding(S.amp_cast if way == "autocast" else S.Cast)
    assert inserted(net) == set()
    third = mx.nd.array([1 / 3])
    expected = net.bind(mx.cpu(), {"data": third}).forward()[0]
    assert not same(expected, third * 3)
    if way == "explained":
        assert amp.explain(net, "bfloat16")["data_amp_cast_float16"].reason.startswith("casts, ")
    if way in ("converted", "loaded"):
        net = amp.convert_symbol(net, "bfloat16")
        net = amp.convert_symbol(S.load_json(net.tojson()) if way == "loaded" else net, "float32")
    with amp.autocast(policy=amp.Policy.default("float16", "cpu"), enabled=way == "autocast"):
        assert same(net.bind(mx.cpu(), {"data": third}).forward()[0], expected)


def test_a_name_that_is_not_the_producers():
    files = FILES["dense float16 False"]
    text = (
        json.dumps(files).replace("r_amp_cast", "q_amp_cast").replace("data_amp_cast", "x_amp_cast")
    )
    saved = S.load_json(text)
    assert called_amp(saved) - inserted(saved) == {"x_amp_cast_float16"}
