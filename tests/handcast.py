"""The oracle of conversion: a graph computed node by node, with casts written by hand.

It shares nothing with mxamp but MXNet: classes of a dozen operators stand below, and each node
casts what it reads for itself.
"""

import mxnet as mx

from helpers import down, kind, up
from mxamp.backends.onednn.cpu import onednn_features

LOW = {"float16": {"FullyConnected", "Convolution", "dot"},
       "bfloat16": {"FullyConnected", "Convolution"}}  # fmt: skip
FP32 = {"float16": {"softmax", "LayerNorm", "mean", "sum"},
        "bfloat16": {"softmax", "LayerNorm", "mean", "sum", "sigmoid", "relu", "transpose", "elemwise_mul",
                     "dot", "Embedding", "where"}}  # fmt: skip
NEUTRAL = {"sigmoid", "relu", "transpose", "Embedding", "Activation", "SliceChannel", "Reshape",
           "elemwise_add", "elemwise_mul", "broadcast_add", "Concat", "where", "Pooling"}  # fmt: skip
NAMES = {"split": "SliceChannel", "reshape": "Reshape", "concat": "Concat"}
FLOATS = ("float16", "bfloat16", "float32")


def computed_in(op, attrs, kinds, dtype):
    """The dtype a node computes in, by hand."""
    floats = [k for k in kinds if k in FLOATS]
    if op in LOW[dtype]:
        return dtype
    if op in FP32[dtype] or (op == "Activation" and attrs["act_type"] == "softrelu"):
        return "float32"
    assert op in NEUTRAL, op
    return "float32" if len(set(floats)) != 1 else floats[0]


def has_kernel(op, dtype):
    if dtype == "float16":
        return op not in LOW[dtype]
    # Of bfloat16: oneDNN has products for avx512 only; MXNet's own broadcast_add has none.
    if "avx512" in onednn_features():
        return op != "broadcast_add"
    return op in ("elemwise_add", "Reshape", "Concat", "SliceChannel")


def read(array, dtype):
    if kind(array) not in FLOATS or kind(array) == dtype:
        return array
    return up(array) if dtype == "float32" else down(up(array), dtype)


def call(op, attrs, arrays):
    texts = {name: text for name, text in attrs.items() if not name.startswith("__")}
    out = getattr(mx.nd, op)(*arrays, **texts)
    return list(out) if isinstance(out, (list, tuple)) else [out]


def evaluate(graph, inputs, dtype):
    """The outputs of a `Graph` for arrays by name, in the dtypes of plain MXNet's."""
    found = []
    for node in graph.nodes:
        if node.is_variable:
            found.append([inputs[node.name]])
            continue
        arrays = [found[i][k] for i, k in node.inputs]
        op = NAMES.get(node.op, node.op)
        if op == "Cast":
            # The user's own cast reads what it would have read without mixed precision.
            found.append(call("Cast", node.attrs, [up(arrays[0])]))
            continue
        if op == "amp_cast":
            found.append([read(arrays[0], node.attrs["dtype"])])
            continue
        if op.startswith("_"):
            found.append(call(op.lstrip("_"), node.attrs, arrays))
            continue
        wanted = computed_in(op, node.attrs, [kind(a) for a in arrays], dtype)
        arrays = [read(a, wanted) for a in arrays]
        if wanted == dtype and not has_kernel(op, dtype):
            outputs = [down(out, dtype) for out in call(op, node.attrs, [up(a) for a in arrays])]
        else:
            outputs = call(op, node.attrs, arrays)
        found.append(outputs)
    return [read(found[i][k], "float32") for i, k in graph.heads]
