"""Self-attention on oneDNN's fused bfloat16 matrix products, in models for inference.

MXNet's `batch_dot` has no bfloat16 kernel. oneDNN's matrix product has one, and two operators of
MXNet call it: `_sg_mkldnn_selfatt_qk` for the scores, `_sg_mkldnn_selfatt_valatt` for the mixed
values. Both read an array of the shape (length, batch, heads * 3 * size) that holds query, key and
value of each head side by side. One dense layer with interleaved weights computes that array.
GluonNLP's models compute it themselves, and call MXNet's float32 operators for the products.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError
from mxnet.ndarray.ndarray import NDArray

from ...framework.operators import registry, with_trait
from ...graph.edit import Edit
from ...graph.ir import VERSION, Graph, Node, Output, Shape
from ...policy.regions import policy_for_node
from ...policy.values import flattens_data, is_true, parse_integers
from .fusible import FusionView, float32_array

#: The float32 operators that read such arrays: for scores, and for mixed values.
_INTERLEAVED = (
    "_contrib_interleaved_matmul_selfatt_qk", "_contrib_interleaved_matmul_selfatt_valatt",
)  # fmt: skip
_SCORES, _MIXED = "_sg_mkldnn_selfatt_qk", "_sg_mkldnn_selfatt_valatt"

# A batch and a length that are constants of no model: shapes inferred from them hold for all.
_BATCH, _LENGTH = 10007, 10009

_SWAPPED = {"axes": "(1, 0, 2)"}  # (batch, length, units) to (length, batch, units), and back


class _Projection(NamedTuple):
    """The queries, keys or values of an attention: a dense layer's output, split into heads."""

    dense: int  #: the node
    third: int | None  #: None for the whole output
    heads: int
    size: int


class _Scores(NamedTuple):
    """The attention scores: their node, the product of queries and keys, and its scale."""

    node: int
    product: int
    scale: float


def fuse_attention(view: FusionView, edit: Edit) -> None:
    """Replace the matrix products of self-attention with oneDNN's fused ones in bfloat16.

    Conditions: queries, keys and values come from dense layers that read the same data, or from one
    layer. They are merged to one, in float32, with the scale of the scores in its weight. An
    attention stays where its dense layers or heads have another consumer, where its operators are
    not the usual ones, and where the policy keeps one of its products in float32 or gives
    `batch_dot` a class.
    """
    given = view.policy.rule("batch_dot").given
    if not view.policy.lowers or registry().get(_MIXED) is None:
        return
    _lower_interleaved(view, edit)
    for i, node in enumerate(view.graph.nodes):
        values = _projection(view, i, 1) if node.op == "batch_dot" and not given else None
        scores = _scores_above(view, i, values.heads) if values is not None else None
        if values is None or scores is None:
            continue
        queries, keys = (_projection(view, scores.product, k) for k in (0, 1))
        joined = _node_that_joins_heads(view, i, values)
        if queries is None or keys is None or joined is None:
            continue
        projections = [queries, keys, values]
        if _belong_together(view, projections):
            _replace(view, edit, projections, scores, i, joined)


# ---------------------------------------------------------------------- matching


def _scores_above(view: FusionView, i: int, heads: int) -> _Scores | None:
    """Return the attention scores that batch_dot node i reads, or None if it reads no scores."""
    nodes = view.graph.nodes
    if _transposes(nodes[i]) != (False, False) or not _is_lowered(view, i):
        return None
    reader, (source, _) = i, nodes[i].inputs[0]
    reshapes: list[Node] = []
    while nodes[source].op in with_trait("keeps_shape") or nodes[source].operator == "Reshape":
        if nodes[source].operator == "Reshape":
            reshapes.insert(0, nodes[source])
        reader, (source, _) = source, nodes[source].inputs[0]
    shape = (_BATCH * heads, _LENGTH, _LENGTH)
    if reshapes and _shapes_behind(reshapes, shape)[-1:] != [shape]:
        return None
    product = nodes[source]
    is_fit = product.op == "batch_dot" and _transposes(product) == (False, True)
    if not is_fit or not _is_lowered(view, source):
        return None
    power = {"_mul_scalar": 1, "_div_scalar": -1}.get(nodes[reader].op)
    scalar = float(nodes[reader].attrs.get("scalar", "1"))
    if power is None or not view.is_read_once(source) or not 0 < abs(scalar) < math.inf:
        return _Scores(source, source, 1.0)
    return _Scores(reader, source, scalar**power)


def _transposes(product: Node) -> tuple[bool, bool]:
    """Return, for both inputs of a batch_dot, whether it transposes the input."""
    first, second = (product.attrs.get(f"transpose_{name}", "False") for name in "ab")
    return is_true(first), is_true(second)


def _is_lowered(view: FusionView, i: int) -> bool:
    """Return whether the model's policy runs matrix product i in bfloat16."""
    node = view.graph.nodes[i]
    return policy_for_node(view.policy, node.attrs) is view.policy and not view.stays_float32(node)


def _projection(view: FusionView, product: int, position: int) -> _Projection | None:
    """Return the queries, keys or values that a product reads; None for other inputs."""
    nodes = view.graph.nodes
    chain: list[Node] = []
    source, third = nodes[product].inputs[position]
    while nodes[source].operator in ("Reshape", "transpose") and view.is_read_once(source):
        chain.insert(0, nodes[source])
        source, third = nodes[source].inputs[0]
    parts = 1
    if nodes[source].operator == "SliceChannel" and _makes_thirds(nodes[source]):
        parts, split = 3, source
        if view.reads(split) > parts:
            return None
        source, _ = nodes[split].inputs[0]
    dense = nodes[source]
    if dense.op != "FullyConnected" or flattens_data(dense.attrs) or not _is_lowered(view, source):
        return None
    if not view.is_read_once(source) or not view.own_parameters(dense):
        return None
    units = int(dense.attrs["num_hidden"]) // parts
    shapes = _shapes_swapping_heads(chain, (_BATCH, _LENGTH, units))
    heads, size = shapes[0][2:] if shapes else (0, 0)
    expected = [
        (_BATCH, _LENGTH, heads, size),
        (_BATCH, heads, _LENGTH, size),
        (_BATCH * heads, _LENGTH, size),
    ]
    if shapes != expected:
        return None
    return _Projection(source, third if parts > 1 else None, heads, size)


def _makes_thirds(split: Node) -> bool:
    """Return whether a SliceChannel splits the last axis into three parts."""
    squeezes = is_true(split.attrs.get("squeeze_axis", "False"))
    on_last = split.attrs.get("axis", "1") in ("-1", "2")
    return split.attrs["num_outputs"] == "3" and on_last and not squeezes


def _belong_together(view: FusionView, projections: Sequence[_Projection]) -> bool:
    """Return whether these queries, keys and values belong to one self-attention."""
    sources = {view.graph.nodes[one.dense].inputs[0] for one in projections}
    sizes = {one[2:] for one in projections}
    layers = {one.dense for one in projections}
    thirds = {one.third for one in projections}
    in_one, apart = (1, {0, 1, 2}), (3, {None})
    return len(sources) == len(sizes) == 1 and (len(layers), thirds) in (in_one, apart)


def _node_that_joins_heads(view: FusionView, i: int, one: _Projection) -> int | None:
    """Return the node that merges the heads in the output of product i, or None."""
    chain = []
    for _ in range(3):
        if not view.is_read_once(i):
            return None
        [(i, _)] = view.consumers[i, 0]
        chain.append(view.graph.nodes[i])
    shapes = _shapes_swapping_heads(chain, (_BATCH * one.heads, _LENGTH, one.size))
    expected = [
        (_BATCH, one.heads, _LENGTH, one.size),
        (_BATCH, _LENGTH, one.heads, one.size),
        (_BATCH, _LENGTH, one.heads * one.size),
    ]
    return i if shapes == expected else None


def _shapes_swapping_heads(chain: Sequence[Node], shape: Shape) -> list[Shape]:
    """Return the output shapes of nodes that swap axes 1 and 2 by Reshape and transpose; else [].

    The first Reshape makes four axes then, as the transpose needs.
    """
    if [node.operator for node in chain] != ["Reshape", "transpose", "Reshape"]:
        return []
    swaps = parse_integers(chain[1].attrs.get("axes", "()")) == [0, 2, 1, 3]
    return _shapes_behind(chain, shape) if swaps else []


def _shapes_behind(chain: Sequence[Node], shape: Shape) -> list[Shape]:
    """Return the output shapes of a chain of operators on data of `shape`; [] if unknown."""
    linked = [node.with_inputs([(k, 0)]) for k, node in enumerate(chain)]
    graph = Graph([Node("null", "data"), *linked], [(k + 1, 0) for k in range(len(chain))], VERSION)
    try:
        return list(graph.to_symbol().infer_shape_partial(data=shape)[1] or ())
    except MXNetError:
        return []


# ---------------------------------------------------------------------- replacement


def _replace(
    view: FusionView,
    edit: Edit,
    projections: Sequence[_Projection],
    scores: _Scores,
    mixed: int,
    joined: int,
) -> None:
    """Replace a self-attention with one dense layer and two fused oneDNN products."""
    nodes, (first, *_) = view.graph.nodes, projections
    dense, name = nodes[first.dense], nodes[mixed].name
    biased = not all(is_true(nodes[one.dense].attrs.get("no_bias", "False")) for one in projections)
    # The operator divides scores by the root of the size.
    scales = [scores.scale * math.sqrt(first.size), 1.0, 1.0]
    parameters = [
        edit.add_parameter(f"{name}_{kind}", _interleaved(view, projections, position, scales))
        for position, kind in enumerate(("weight", "bias")[: 1 + biased], 1)
    ]
    units, count = 3 * first.heads * first.size, {"heads": str(first.heads)}
    attrs = {**dense.attrs, "num_hidden": str(units), "no_bias": str(not biased)}

    rows = edit.add("transpose", f"{name}_rows", [dense.inputs[0]], **_SWAPPED)
    heads = edit.add("FullyConnected", f"{name}_heads", [rows, *parameters], **attrs)
    read = _add_low(edit, name, heads)
    product = _add_scores(edit, nodes[scores.node].name, read, count)
    edit.redirect((scores.node, 0), product)
    product = _add_mixed(edit, name, read, nodes[mixed].inputs[0], count)
    batch = edit.add("transpose", f"{name}_batch", [product], **_SWAPPED)
    edit.redirect((joined, 0), batch)


def _lower_interleaved(view: FusionView, edit: Edit) -> None:
    """Replace MXNet's float32 interleaved_matmul operators with oneDNN's in bfloat16."""
    low: dict[Output, Output] = {}
    for i, node in enumerate(view.graph.nodes):
        if node.op not in _INTERLEAVED or view.policy.rule(node.op).given:
            continue
        if not _is_lowered(view, i):
            continue
        heads, *shares = node.inputs
        if heads not in low:
            low[heads] = _add_low(edit, node.name, heads)
        count = {"heads": node.attrs["heads"]}
        if shares:
            product = _add_mixed(edit, node.name, low[heads], shares[0], count)
        else:
            product = _add_scores(edit, node.name, low[heads], count)
        edit.redirect((i, 0), product)


# MXNet infers the shapes and dtypes of a fused operator from the graph inside, which writes
# float32. It runs oneDNN's product instead.


def _add_scores(edit: Edit, name: str, heads: Output, count: dict[str, str]) -> Output:
    """Add oneDNN's product of queries and keys in bfloat16; return the attention scores."""
    wide = mx.sym.amp_cast(mx.sym.var("heads"), dtype="float32")
    body = Graph.from_symbol(mx.sym.contrib.interleaved_matmul_selfatt_qk(wide, **count))
    return edit.add_node(Node(_SCORES, name, count, [heads], [body]))


def _add_mixed(
    edit: Edit, name: str, heads: Output, shares: Output, count: dict[str, str]
) -> Output:
    """Add oneDNN's bfloat16 product of attention weights (`shares`) and values (`heads`)."""
    read = [mx.sym.var("heads"), mx.sym.var("shares")]
    mixed = mx.sym.contrib.interleaved_matmul_selfatt_valatt(*read, **count)
    body = Graph.from_symbol(mx.sym.amp_cast(mixed, dtype="float32"))
    inputs = [heads, _add_low(edit, name, shares)]
    return edit.add_node(Node(_MIXED, name, count, inputs, [body]))


def _add_low(edit: Edit, name: str, output: Output) -> Output:
    """Add a cast to bfloat16 for the input of a fused operator; return the cast's output."""
    return edit.add("amp_cast", f"{name}_low", [output], dtype="bfloat16")


def _interleaved(
    view: FusionView, projections: Sequence[_Projection], position: int, scales: Sequence[float]
) -> NDArray:
    """Return one weight (`position` 1) or bias (2) with queries, keys and values interleaved."""
    thirds = []
    for one, scale in zip(projections, scales):
        name = view.own_parameter(view.graph.nodes[one.dense], position)
        units = one.heads * one.size
        rows = slice(units * (one.third or 0), units * ((one.third or 0) + 1))
        values = view.params[name].asnumpy()[rows] if name else np.zeros(units, np.float32)
        thirds.append(values.reshape(one.heads, one.size, *values.shape[1:]) * np.float32(scale))
    whole = np.stack(thirds, axis=1)
    return float32_array(whole.reshape(-1, *whole.shape[3:]))
