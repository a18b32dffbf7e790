"""Translation of MXNet's operators to ONNX, with MXNet's own translations corrected."""

from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Sequence

import numpy as np

from ..errors import ArgumentError
from ..framework.operators import resolve
from ..graph.inspect import TensorType
from ..graph.ir import Node
from ..policy.values import is_true, parse_integers

#: The version of ONNX's operators that MXNet 1.9.1 writes, and of the file format that has them.
OPSET, IR_VERSION = 13, 7


class OnnxCall:
    """An MXNet operator call to translate, and the ONNX nodes and constants made for it.

    `names` are its inputs, `shape` is the shape of the first, which may vary but for its length,
    and `attrs` are its attributes as texts, defaults included.
    """

    def __init__(
        self, onnx: Any, name: str, node: Node, names: List[str], inputs: Sequence[TensorType]
    ) -> None:
        self.onnx, self.name, self.node, self.names, self.inputs = onnx, name, node, names, inputs
        self.attrs = {**resolve(node.op).defaults, **node.attrs}
        self.shape = inputs[0].shape or () if inputs else ()
        self.nodes: List[Any] = []
        self.constants: List[Any] = []

    def __call__(self, op: str, *inputs: object, outputs: int = 1, **attrs: object) -> Any:
        """Add an ONNX node with names or constant values as inputs; return its output names."""
        names = [one if isinstance(one, str) else self.constant(one) for one in inputs]
        made = [f"{self.name}:{len(self.nodes)}.{k}" for k in range(outputs)]
        self.nodes.append(self.onnx.helper.make_node(op, names, made, **attrs))
        return made[0] if outputs == 1 else made

    def constant(self, value: object) -> str:
        """Add an ONNX constant, in float32 or int64; return its name."""
        name, array = f"{self.name}:c{len(self.constants)}", np.asarray(value)
        array = array.astype("float32") if array.dtype.kind == "f" else array
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def require(self, holds: object, reason: str) -> None:
        """Raise `ArgumentError` unless a condition for exporting the operator holds."""
        if not holds:
            raise ArgumentError(reason)


def translate(call: OnnxCall, count: int) -> List[str]:
    """Translate an operator call to ONNX nodes; return the names of its outputs."""
    made = _CORRECTIONS.get(call.node.operator, _by_mxnet)(call) or _by_mxnet(call)
    made = [made] if isinstance(made, str) else made
    call.require(len(made) >= count, f"its output {count - 1}, counted from 0")
    for one in call.nodes:
        one.name = one.output[0]  # ONNX Runtime's optimizer fails for nodes without a name
    return made


def _by_mxnet(call: OnnxCall) -> List[str]:
    call.require(not is_true(call.attrs.get("exclude", "0")), "exclude")  # MXNet's ignore it
    call.require(is_true(call.attrs.get("align_corners", "1")), "align_corners=False")  # and this
    op, count = call.node.operator.replace("_contrib_Sync", ""), len(call.names)  # BatchNorm
    dtypes = [np.dtype(tensor.dtype) for tensor in call.inputs]
    node: Dict[str, Any] = {"op": op, "name": call.name, "inputs": [(k, 0) for k in range(count)]}
    attrs = {k: v for k, v in call.attrs.items() if k in (*call.node.attrs, *_FLAGS, "knorm")}
    node["attrs"] = {k: str(is_true(v)) if k in _FLAGS else v for k, v in attrs.items()}
    tensors = [[SimpleNamespace(name=n, dtype=d)] for n, d in zip(call.names, dtypes)]
    more = {"initializer": call.constants, "idx": call.name, "opset_version": OPSET}
    try:
        from mxnet.onnx.mx2onnx._export_onnx import MXNetGraph

        nodes, _ = MXNetGraph.convert_layer(node, outputs_lookup=tensors, **more)
    except Exception as error:  # of any kind, for attributes that a translation doesn't know
        raise ArgumentError(" ".join(str(error).split())) from error
    call.nodes += [one for one in nodes if isinstance(one, call.onnx.NodeProto)]
    made = {name for one in call.nodes for name in one.output}
    numbered = [f"{call.name}{k}" for k in range(call.node.num_outputs)]
    return [name for name in numbered if name in made] or [call.name]


#: Attributes that MXNet's translations know as "True" and "False" alone, or give other defaults.
_FLAGS = ("flatten", "global_pool", "no_bias", "use_length")


def _batch_norm(c: OnnxCall) -> None:
    if is_true(c.attrs["fix_gamma"]):  # ONNX reads gamma nevertheless
        c.names[1] = c.constant(np.ones(c.inputs[1].shape or (), "float32"))


def _leaky_relu(c: OnnxCall) -> None:
    if c.attrs["act_type"] == "prelu":  # MXNet's slopes are by channel, ONNX's by the last axis
        c.names[1] = c("Reshape", c.names[1], [-1] + [1] * (len(c.shape) - 2))


def _from_start(c: OnnxCall) -> None:  # MXNet's translations take no axis from the end
    c.attrs["axis"] = str(*(k % len(c.shape) for k in parse_integers(c.attrs["axis"]))) or "None"


def _like(c: OnnxCall) -> object:
    # MXNet's translations of slice_like and broadcast_like fail in OpenVINO.
    every = range(len(c.shape))
    axes = [[*(parse_integers(v) or every)] for k, v in c.attrs.items() if k.endswith("axes")]
    sizes = c("Gather", c("Shape", c.names[1]), axes[-1])
    if c.node.operator == "slice_like":
        return c("Slice", c.names[0], [0] * len(axes[0]), sizes, axes[0])
    return c("Expand", c.names[0], c("ScatterElements", [1] * len(every), axes[0], sizes))


def _l2_normalization(c: OnnxCall) -> object:
    rank, x = len(c.shape), c.names[0]
    axes = {"instance": range(1, rank), "channel": [1], "spatial": range(2, rank)}
    total = c("ReduceSumSquare", x, axes=[*axes[c.attrs["mode"]]])
    return c("Div", x, c("Sqrt", c("Add", total, float(c.attrs["eps"]))))


def _softmax(c: OnnxCall) -> object:
    by_channel = c.attrs.get("mode") == "channel" or is_true(c.attrs.get("multi_output", "0"))
    of_rows = "mode" in c.attrs or is_true(c.attrs["preserve_shape"])
    axis = 1 if by_channel else -1 if of_rows else None
    return None if axis is None else c("Softmax", c.names[0], axis=axis)


def _reshape(c: OnnxCall) -> object:
    step, shape = -1 if is_true(c.attrs["reverse"]) else 1, c("Shape", c.names[0])
    sizes = [c("Slice", shape, [k], [k + 1]) for k in range(len(c.shape))][::step]
    codes, rest, join, split = parse_integers(c.attrs["shape"])[::step], -2, -3, -4
    c.require(codes and sizes and (step > 0 or split not in codes), f"shape={c.attrs['shape']}")
    parts: List[Any] = []
    while codes:
        code = codes.pop(0)
        if code == rest:
            parts += sizes
        elif code == join:
            parts.append(c("Mul", sizes.pop(0), sizes.pop(0)))
        elif code == split:
            size, pair = sizes.pop(0), [codes.pop(0), codes.pop(0)]
            parts += [c("Div", size, [max(pair)]) if one == -1 else [one] for one in pair]
        else:
            size = sizes.pop(0) if sizes else None
            parts.append([code] if code else size)
    return c("Reshape", c.names[0], c("Concat", *parts[::step], axis=0))


def _box_nms(c: OnnxCall) -> Any:
    x, least, topk = c.names[0], float(c.attrs["valid_thresh"]), int(c.attrs["topk"])
    corners = c.attrs["in_format"] == c.attrs["out_format"] == "corner"
    c.require(corners and len(c.shape) == 3, "other than corners, in a batch")  # noqa: PLR2004

    def columns(rows: str, index: str, count: int = 1) -> Any:
        return c("Gather", rows, [int(c.attrs[index]) + k for k in range(count)], axis=2)

    def best(rows: str, scores: str) -> Any:
        scores, order = c("TopK", scores, count, axis=1, outputs=2)
        return c("GatherND", rows, order, batch_dims=1), scores

    total, scores = c("Slice", c("Shape", x), [1], [2]), columns(x, "score_index")
    count = c("Min", total, [topk]) if topk > 0 else total
    has_classes = int(c.attrs["id_index"]) >= 0
    if has_classes:
        background = c("Equal", columns(x, "id_index"), float(c.attrs["background_id"]))
        scores = c("Where", background, least, scores)
    rows, scores = best(x, scores)
    boxes = columns(rows, "coord_start", 4)
    if has_classes and not is_true(c.attrs["force_suppress"]):
        # Boxes of other classes don't suppress: each class moves to a place of its own.
        width = c("Sub", c("ReduceMax", boxes, keepdims=0), c("ReduceMin", boxes, keepdims=0))
        boxes = c("Add", boxes, c("Mul", columns(rows, "id_index"), c("Add", width, 1.0)))
    overlap, by_class = float(c.attrs["overlap_thresh"]), c("Transpose", scores, perm=[0, 2, 1])
    kept = c("NonMaxSuppression", boxes, by_class, count, [overlap], [least])
    kept = c("Gather", kept, [0, 2, 1], axis=1)  # the class, of which there is one, comes last
    none = c("Expand", least, c("Shape", scores))
    rows, scores = best(rows, c("ScatterND", none, kept, c("GatherND", scores, kept)))
    rows = c("Where", c("Greater", scores, least), rows, -1.0)
    return c("Pad", rows, c("Concat", [0] * 4, c("Sub", total, count), [0], axis=0), -1.0)


#: By MXNet's mode: ONNX's recurrent operator, its gates in ONNX's order, and its activations.
_RECURRENT = {
    "lstm": ("LSTM", (0, 3, 1, 2), ["Sigmoid", "Tanh", "Tanh"]),
    "gru": ("GRU", (1, 0, 2), ["Sigmoid", "Tanh"]),
    "rnn_tanh": ("RNN", (0,), ["Tanh"]),
    "rnn_relu": ("RNN", (0,), ["Relu"]),
}


def _rnn(c: OnnxCall) -> List[str]:
    for name in ("projection_size", "lstm_state_clip_min", "lstm_state_clip_max"):
        c.require(c.attrs[name] == "None", f"{name}: unroll cells, such as contrib's LSTMPCell")
    c.require(not is_true(c.attrs["use_sequence_length"]), "use_sequence_length")
    op, order, activations = _RECURRENT[c.attrs["mode"]]
    units, layers = int(c.attrs["state_size"]), int(c.attrs["num_layers"])
    sides = 1 + is_true(c.attrs["bidirectional"])
    options: Dict[str, Any] = {"linear_before_reset": 1} if op == "GRU" else {}
    options["direction"] = "bidirectional" if sides > 1 else "forward"
    options.update(hidden_size=units, activations=activations * sides)
    batch = c("Slice", c("Shape", c.names[0]), [1], [2])
    gates, widths = len(order), [c.shape[2], *[sides * units] * (layers - 1)]
    # First the weights of all layers and directions, then the biases, each of data and of states.
    sizes = [n for width in widths for n in [width, units] * sides] + [1] * (2 * layers * sides)
    parts = c("Split", c.names[1], np.repeat(sizes, gates) * units, outputs=len(sizes) * gates)
    ordered = np.reshape(parts, (-1, gates))[:, order]
    weights, biases = ordered.reshape(2, layers, sides, 2, gates)
    x, finals = c.names[0], []
    for layer in range(layers):
        of_data, of_states = weights[layer].swapaxes(0, 1)
        rows = [sides, gates * units, -1]
        given = (of_data, rows), (of_states, rows), (biases[layer], [sides, -1])
        read = [c("Reshape", c("Concat", *one.ravel(), axis=0), sizes) for one, sizes in given]
        states = [c("Slice", s, [layer * sides], [(layer + 1) * sides]) for s in c.names[2:]]
        # The zeros of a layer without given states have a batch of 1.
        states = [c("Expand", s, c("Concat", [sides], batch, [units], axis=0)) for s in states]
        y, *last = c(op, x, *read, "", *states, outputs=1 + len(states), **options)
        x = c("Reshape", c("Transpose", y, perm=[0, 2, 1, 3]), [0, 0, -1])
        finals.append(last)
    return [x, *(c("Concat", *one, axis=0) for one in zip(*finals))]


def _cross_attention(c: OnnxCall) -> object:
    heads, is_first = int(c.attrs["heads"]), c.node.operator.endswith("_qk")
    x, pairs = c.names if is_first else c.names[::-1]
    # The keys or the values, from (length, batch, heads * 2 * size).
    read = c("Gather", c("Reshape", pairs, [0, 0, heads, 2, -1]), 0 if is_first else 1, axis=3)
    if is_first:
        queries = c("Reshape", x, [0, 0, heads, -1])
        root = c("Sqrt", c("Cast", c("Slice", c("Shape", queries), [3], [4]), to=1))
        out = c("Einsum", c("Div", queries, root), read, equation="qbhs,kbhs->bhqk")
        return c("Reshape", out, c("Concat", [-1], c("Slice", c("Shape", out), [2], [4]), axis=0))
    weights = c("Reshape", x, c("Concat", [-1, heads], c("Slice", c("Shape", x), [1], [3]), axis=0))
    return c("Reshape", c("Einsum", weights, read, equation="bhqk,kbhs->qbhs"), [0, 0, -1])


#: Outputs of models for training that return their first input, and which MXNet does not export.
_OUTPUTS = ("LinearRegressionOutput", "MAERegressionOutput", "SVMOutput", "make_loss")
#: Translations in place of MXNet's. Those that return None correct the call for MXNet's.
_CORRECTIONS: Dict[str, Callable[[OnnxCall], Any]] = {
    "BatchNorm": _batch_norm, "_contrib_SyncBatchNorm": _batch_norm, "LeakyReLU": _leaky_relu,
    "L2Normalization": _l2_normalization, "RNN": _rnn, "Reshape": _reshape,
    "erf": lambda c: c("Erf", *c.names), "SoftmaxActivation": _softmax, "SoftmaxOutput": _softmax,
    **dict.fromkeys(_OUTPUTS, lambda c: c("Identity", c.names[0])),
    "_contrib_box_nms": _box_nms, "slice_like": _like, "broadcast_like": _like,
    "_contrib_interleaved_matmul_encdec_qk": _cross_attention, "_contrib_arange_like": _from_start,
    "_contrib_interleaved_matmul_encdec_valatt": _cross_attention, "_split_v2": _from_start,
}  # fmt: skip
