"""The rewritten graph, as readable text."""

import mxnet as mx
import pytest

import mxamp as amp
from mxamp.backends import NONE
from mxamp.graph.casts.insert import rewrite, rewritten_graph
from mxamp.graph.ir import Graph, Usage
from nets import Control

GPU = amp.Policy.default("float16", "gpu")
CPU = amp.Policy.default("float16", "cpu")
var = mx.sym.var


def rewritten(symbol, policy=GPU, **usage):
    return rewrite(Graph.from_symbol(symbol), policy, Usage(**usage))


def text(symbol, policy=GPU, **usage):
    """One line an operator: name = op(inputs)."""
    graph = rewritten(symbol, policy, **usage).graph
    lines = []
    for node in graph.nodes:
        if not node.is_variable:
            inputs = ", ".join(
                graph.nodes[i].name + (f"[{k}]" if graph.nodes[i].num_outputs > 1 else "")
                for i, k in node.inputs
            )
            dtype = f" {node.attrs['dtype']}" if node.op in ("amp_cast", "Cast") else ""
            lines.append(f"{node.name} = {node.op}{dtype}({inputs})")
    lines.append("return " + ", ".join(graph.nodes[i].name for i, _ in graph.heads))
    return lines


def dense(data, name, weight=None):
    weight = weight if weight is not None else var(f"{name}_weight")
    return mx.sym.FullyConnected(data, weight, no_bias=True, num_hidden=4, name=name)


def test_casts_around_a_product():
    assert text(dense(var("x"), "fc")) == [
        "x_amp_cast_float16 = amp_cast float16(x)",
        "fc_weight_amp_cast_float16 = amp_cast float16(fc_weight)",
        "fc = FullyConnected(x_amp_cast_float16, fc_weight_amp_cast_float16)",
        "fc_amp_cast_float32 = amp_cast float32(fc)",
        "return fc_amp_cast_float32",
    ]


def test_a_cast_up_is_undone_by_reading_what_was_cast():
    low = dense(var("x"), "a")
    out = dense(mx.sym.Cast(low, dtype="float32", name="up"), "b")
    lines = text(out)
    # The user's own Cast reads float32, as it would without mxamp, and is not cast down again.
    assert "a_amp_cast_float32 = amp_cast float32(a)" in lines
    user = mx.sym.amp_cast(
        mx.sym.Cast(var("x"), dtype="float16", name="down"), dtype="float32", name="up"
    )
    assert "b = FullyConnected(down, b_weight_amp_cast_float16)" in text(dense(user, "b"))


def test_a_missing_kernel_runs_between_casts():
    assert text(dense(var("x"), "fc"), CPU) == [
        "x_amp_cast_float16 = amp_cast float16(x)",
        "x_amp_cast_float32 = amp_cast float32(x_amp_cast_float16)",
        "fc_weight_amp_cast_float16 = amp_cast float16(fc_weight)",
        "fc_weight_amp_cast_float32 = amp_cast float32(fc_weight_amp_cast_float16)",
        "fc = FullyConnected(x_amp_cast_float32, fc_weight_amp_cast_float32)",
        "fc_amp_cast_float16 = amp_cast float16(fc)",
        "fc_amp_cast_float32 = amp_cast float32(fc_amp_cast_float16)",
        "return fc_amp_cast_float32",
    ]


def test_accumulated_gradients_get_a_copy_before_bfloat16_casts():
    policy = amp.Policy.default("bfloat16")
    lines = text(dense(var("x"), "fc"), policy, accumulated=frozenset({"fc_weight"}))
    assert "fc_weight_amp_copy = _copy(fc_weight)" in lines
    assert "fc_weight_amp_cast_bfloat16 = amp_cast bfloat16(fc_weight_amp_copy)" in lines
    assert "x_amp_cast_bfloat16 = amp_cast bfloat16(x)" in lines
    assert "copy" not in " ".join(text(dense(var("x"), "fc"), accumulated=frozenset({"fc_weight"})))


def test_a_graph_with_nothing_to_lower_runs_as_it_is():
    symbol = mx.sym.softmax(var("x"))
    graph = Graph.from_symbol(symbol)
    assert rewritten_graph(graph, GPU, Usage(), NONE) is graph


@pytest.mark.parametrize("read, dtype", [
    ("uint8", "float32"), ("int32", "float64"), ("int32", "float16"), ("bool", "float32"),
    ("float32", "float16"), ("float16", "float32"),
])  # fmt: skip
def test_a_cast_by_hand_stays_whatever_its_name(read, dtype):
    # Conversions never cast integers, and take Cast for float64 alone.
    name = f"x_amp_cast_{dtype}"
    by_hand = mx.sym.Cast(var("x"), dtype=dtype, name=name)
    assert text(by_hand, dtypes={"x": read})[0] == f"{name} = Cast {dtype}(x)"


@pytest.mark.parametrize("back", ["amp_cast", "Cast"])
def test_casts_of_a_conversion_give_way(back):
    x = mx.sym.amp_cast(var("x", dtype="float32"), dtype="float16", name="x_amp_cast_float16")
    wide = mx.sym.amp_cast(x, dtype="float32", name="x_amp_cast_float32")
    if back == "Cast":
        wide = mx.sym.Cast(wide, dtype="float64", name="x_amp_cast_float64")
        wide = mx.sym.Cast(wide, dtype="float32", name="x_amp_cast_float321")
    assert text(mx.sym.exp(wide, name="exp")) == ["exp = exp(x)", "return exp"]
    # MXNet's own conversion has amp_cast before integers as well, where it does nothing.
    ids = mx.sym.amp_cast(var("ids", dtype="int32"), dtype="float16", name="ids_amp_cast_float16")
    table = mx.sym.Embedding(ids, var("w"), input_dim=4, output_dim=2, name="table")
    assert text(table, dtypes={"ids": "int32"})[0] == "table = Embedding(ids, w)"


def test_casts_make_room_for_the_name_of_one_by_hand():
    x, y = var("x"), var("y")
    by_hand = mx.sym.Cast(y, dtype="float32", name="x_amp_cast_float16")
    lines = text(mx.sym.Group([dense(x, "fc"), by_hand]), dtypes={"y": "uint8"})
    assert "x_amp_cast_float16 = Cast float32(y)" in lines
    assert "x_amp_cast_float161 = amp_cast float16(x)" in lines


def test_device_groups_are_inherited():
    with mx.AttrScope(ctx_group="dev1"):
        symbol = dense(var("x"), "fc")
    graph = rewritten(symbol).graph
    casts = [node for node in graph.nodes if node.op == "amp_cast"]
    assert casts
    assert all(node.attrs["__ctx_group__"] == "dev1" for node in casts)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["foreach", "cond", "while_loop"])
def test_operators_in_bodies_follow_their_loop(name, training):
    result = rewritten(Control(name)(var("data")), CPU, training=training)
    inside = [node.name for holder, node, _ in result.decided() if holder is not result.graph]
    assert bool(inside) == (not training or name == "foreach")
