"""Operator families: functions that add a random node to a graph, and know its output's shape.

A family takes a builder, a value of the graph and the value's shape. It adds a node that reads the
value, with random attributes and new parameters, or nothing if no attributes fit the shape.
"""

import random
from typing import Any, Callable, Dict, List, Sequence, Tuple

from .programs import Node, Ref

Shape = Tuple[int, ...]
Value = Tuple[Ref, Shape]

#: Operators with another name in `mx.np` and `mx.npx`; one without a line has none there.
NUMPY = {
    "Activation": "npx.activation", "BatchNorm": "npx.batch_norm",
    "Convolution": "npx.convolution", "Deconvolution": "npx.deconvolution",
    "Dropout": "npx.dropout", "Embedding": "npx.embedding",
    "FullyConnected": "npx.fully_connected", "LayerNorm": "npx.layer_norm",
    "LeakyReLU": "npx.leaky_relu", "Pooling": "npx.pooling", "abs": "np.abs",
    "batch_dot": "npx.batch_dot", "broadcast_add": "np.add", "broadcast_maximum": "np.maximum",
    "broadcast_mul": "np.multiply", "broadcast_sub": "np.subtract", "clip": "np.clip",
    "concat": "np.concatenate", "exp": "np.exp", "expand_dims": "np.expand_dims",
    "log_softmax": "npx.log_softmax", "max": "np.max", "mean": "np.mean", "min": "np.min",
    "negative": "np.negative", "one_hot": "npx.one_hot", "pick": "npx.pick", "relu": "npx.relu",
    "sigmoid": "npx.sigmoid", "softmax": "npx.softmax", "sqrt": "np.sqrt", "square": "np.square",
    "squeeze": "np.squeeze", "stack": "np.stack", "sum": "np.sum", "swapaxes": "np.swapaxes",
    "tanh": "np.tanh", "transpose": "np.transpose",
}  # fmt: skip


class Builder:
    """A random graph: its nodes, its parameters' shapes, and its values with their shapes."""

    def __init__(self, chance: random.Random, numpy: bool, shape: Shape) -> None:
        self.chance, self.numpy = chance, numpy
        self.nodes: List[Node] = []
        self.params: Dict[str, List[int]] = {}
        self.values: List[Value] = [("data", shape)]

    def pick(self, *options: Any) -> Any:
        """Return one of the options at random."""
        return self.chance.choice(options)

    def flag(self) -> bool:
        """Return False or True at random."""
        return self.chance.random() < 0.5

    def rarely(self, one_in: int = 6) -> bool:
        """Return True once in `one_in` calls, at random."""
        return self.chance.random() * one_in < 1

    def param(self, role: str, *shape: int) -> str:
        """Return the name of a parameter of a shape: a new one, or one of the same role."""
        same = [name for name, one in self.params.items()
                if one == list(shape) and name.rstrip("0123456789") == role]  # fmt: skip
        # BatchNorm writes its gamma, with fix_gamma, and its statistics.
        if same and not role.startswith(("running", "fixed")) and self.rarely(3):
            return same[-1]
        name = f"{role}{len(self.nodes)}"
        self.params[name] = list(shape)
        return name

    def add(self, op: str, inputs: Sequence[str], *shapes: Shape, **attrs: Any) -> None:
        """Add a node, and its outputs of these shapes; use the operator of `mx.np` if `numpy`."""
        if self.numpy and op in NUMPY:
            op = NUMPY[op]
            if op in ("np.clip", "np.expand_dims", "np.transpose", "np.swapaxes"):
                attrs = {_NUMPY_ATTRS.get((op, key), key): one for key, one in attrs.items()}
        name = f"v{len(self.nodes)}"
        self.nodes.append(Node(op, list(inputs), attrs, len(shapes)))
        refs = [name] if len(shapes) == 1 else [f"{name}[{k}]" for k in range(len(shapes))]
        self.values += zip(refs, shapes)

    def older(self, fits: Callable[[Shape], bool]) -> List[Value]:
        """Return the values whose shapes fit, the latest first."""
        return [value for value in reversed(self.values) if fits(value[1])]


_NUMPY_ATTRS = {("np.swapaxes", "dim1"): "axis1", ("np.swapaxes", "dim2"): "axis2"}

Family = Callable[[Builder, str, Shape], None]
#: By rank of the value: families, and whether each has operators of `mx.np`.
FAMILIES: Dict[int, List[Tuple[Family, bool]]] = {}


def family(*ranks: int, numpy: bool = True, weight: int = 2) -> Callable[[Family], Family]:
    """Return a decorator that registers a family for values of these ranks, by default all.

    `numpy` says whether it has operators of `mx.np`; `weight` is how often it is drawn.
    """

    def register(function: Family) -> Family:
        for rank in ranks or (1, 2, 3, 4, 5):
            FAMILIES.setdefault(rank, []).extend([(function, numpy)] * weight)
        return function

    return register


def grow(builder: Builder) -> None:
    """Add a node of a random family that reads one of the latest values."""
    ref, shape = builder.pick(*builder.values[-1:], *builder.values[-1:], *builder.values[-5:])
    fitting = [one for one, numpy in FAMILIES.get(len(shape), []) if numpy or not builder.numpy]
    if fitting:
        builder.pick(*fitting)(builder, ref, shape)


def _output_size(size: int, kernel: int, stride: int, pad: int, dilate: int = 1) -> int:
    """Return the size of a convolution's or a pooling's output along one axis."""
    return (size + 2 * pad - dilate * (kernel - 1) - 1) // stride + 1


@family(3, 4, weight=8)
def convolution(g: Builder, x: str, shape: Shape) -> None:
    n, channels, *sizes = shape
    kernel, stride, pad = g.pick(1, 3, 2), g.pick(1, 1, 2), g.pick(0, 1)
    dilate = g.pick(1, 1, 2)
    if min(sizes) + 2 * pad <= dilate * (kernel - 1):
        return
    divisors = [k for k in (1, channels, 2, 4, 8, 16) if channels % k == 0]
    groups = g.pick(1, 1, *divisors)
    filters = groups * g.pick(1, 2, 3, 4, 8) if groups > 1 else g.pick(4, 16, 8, 3, 1, 24, 32)
    rank = len(sizes)
    more = {"no_bias": True} if g.flag() else {}
    inputs = [x, g.param("weight", filters, channels // groups, *[kernel] * rank)]
    inputs += [] if more else [g.param("bias", filters)]
    for name, value, usual in (
        ("stride", stride, 1), ("pad", pad, 0), ("dilate", dilate, 1)
    ):  # fmt: skip
        more.update({name: (value,) * rank} if value != usual else {})
    more.update({"num_group": groups} if groups > 1 else {})
    out = tuple(_output_size(size, kernel, stride, pad, dilate) for size in sizes)
    g.add("Convolution", inputs, (n, filters, *out), kernel=(kernel,) * rank, num_filter=filters,
          **more)  # fmt: skip


@family(4)
def deconvolution(g: Builder, x: str, shape: Shape) -> None:
    n, channels, height, width = shape
    kernel, stride, filters = g.pick(2, 3), g.pick(1, 2), g.pick(4, 16, 3)
    bias = g.flag()
    inputs = [x, g.param("deconv_weight", channels, filters, kernel, kernel)]
    inputs += [g.param("bias", filters)] if bias else []
    out = [(size - 1) * stride + kernel for size in (height, width)]
    if max(out) < 40:
        g.add("Deconvolution", inputs, (n, filters, *out), kernel=(kernel, kernel),
              stride=(stride, stride), num_filter=filters, no_bias=not bias)  # fmt: skip


@family(2, 3, 4, weight=5)
def dense(g: Builder, x: str, shape: Shape) -> None:
    flatten = g.flag() if len(shape) > 2 else True
    width, units = shape[-1], g.pick(4, 8, 16, 3, 1, 32, 64)
    if flatten:
        width = 1
        for size in shape[1:]:
            width *= size
    if not 0 < width <= 4096:
        return
    more: Dict[str, Any] = {} if flatten else {"flatten": False}
    inputs = [x, g.param("weight", units, width)]
    if g.flag():
        more["no_bias"] = True
    else:
        inputs.append(g.param("bias", units))
    out = (shape[0], units) if flatten else (*shape[:-1], units)
    g.add("FullyConnected", inputs, out, num_hidden=units, **more)


@family(2, 4, weight=5)
def batch_norm(g: Builder, x: str, shape: Shape) -> None:
    more: Dict[str, Any] = {"fix_gamma": g.flag()}
    more.update({"use_global_stats": True} if g.rarely() else {})
    names = [
        g.param(role, shape[1]) for role in ("fixed_gamma", "beta", "running_mean", "running_var")
    ]
    g.add("BatchNorm", [x, *names], shape, **more)


@family(2, 3)
def layer_norm(g: Builder, x: str, shape: Shape) -> None:
    names = [g.param("gamma", shape[-1]), g.param("beta", shape[-1])]
    g.add("LayerNorm", [x, *names], shape, axis=-1)


@family(4, numpy=False)
def normalization(g: Builder, x: str, shape: Shape) -> None:
    op = g.pick("InstanceNorm", "L2Normalization", "GroupNorm")
    if op == "L2Normalization":
        g.add(op, [x], shape, mode=g.pick("instance", "channel", "spatial"))
    elif op == "InstanceNorm":
        g.add(op, [x, g.param("gamma", shape[1]), g.param("beta", shape[1])], shape)
    else:
        g.add(op, [x, g.param("gamma", 1), g.param("beta", 1)], shape, num_groups=1)


@family(weight=8)
def activation(g: Builder, x: str, shape: Shape) -> None:
    op = g.pick("relu", "sigmoid", "tanh", "Activation", "clip", "leaky", "prelu", "other")
    if op == "Activation":
        acts = "relu", "sigmoid", "tanh", "softrelu", "softsign"
        g.add(op, [x], shape, act_type=g.pick(*acts))
    elif op == "clip":
        low, high = g.pick((0, 6), (0, 6), (-1, 1), (0, 1))
        g.add(op, [x], shape, a_min=low, a_max=high)
    elif op == "leaky":
        g.add("LeakyReLU", [x], shape, act_type=op, slope=0.3)
    elif op == "prelu":
        if len(shape) > 1:
            slopes = g.param("slope", g.pick(1, shape[1], shape[1]))
            g.add("LeakyReLU", [x, slopes], shape, act_type=op)
    elif op == "other":
        g.add("LeakyReLU", [x], shape, act_type=g.pick("elu", "selu", "gelu"))
    else:
        g.add(op, [x], shape)


@family(3, 4, weight=3)
def pooling(g: Builder, x: str, shape: Shape) -> None:
    kind, rank = g.pick("avg", "max", "sum"), len(shape) - 2
    if g.flag():
        g.add("Pooling", [x], (*shape[:2], *[1] * rank), pool_type=kind, global_pool=True,
              kernel=(1,) * rank)  # fmt: skip
        return
    kernel, stride, pad = g.pick(2, 3), g.pick(2, 1), g.pick(0, 1)
    if min(shape[2:]) + 2 * pad < kernel:
        return
    out = [_output_size(size, kernel, stride, pad) for size in shape[2:]]
    more = {"count_include_pad": False} if g.rarely(3) and kind == "avg" else {}
    g.add("Pooling", [x], (*shape[:2], *out), pool_type=kind, kernel=(kernel,) * rank,
          stride=(stride,) * rank, pad=(pad,) * rank, **more)  # fmt: skip


@family(4, numpy=False)
def image_size(g: Builder, x: str, shape: Shape) -> None:
    op = g.pick("contrib.AdaptiveAvgPooling2D", "UpSampling", "pad")
    n, channels, height, width = shape
    if op == "UpSampling":
        if height * width < 200:
            out = (n, channels, 2 * height, 2 * width)
            g.add(op, [x], out, scale=2, sample_type="nearest")
    elif op == "pad":
        out = (n, channels, height + 2, width + 2)
        g.add(op, [x], out, mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 1, 1), constant_value=0)
    else:
        size = g.pick(1, 2)
        g.add(op, [x], (n, channels, size, size), output_size=size)


@family(weight=4)
def reduction(g: Builder, x: str, shape: Shape) -> None:
    op = g.pick("sum", "mean", "max", "min") if g.rarely(3) else g.pick("sum", "mean")
    axes = g.pick((1,), (-1,), (0,), (2, 3), (1, 2), (0, 1), (0, 2, 3), (1, 2, 3), ())
    axes = tuple(axis for axis in axes if axis < len(shape))
    keep = g.flag()
    if axes in ((-1,), (1,)) and g.flag():
        axis: Any = axes[0]
    else:
        axis = axes
    gone = {axis % len(shape) for axis in axes}
    if not axes and not g.numpy:
        gone = set(range(len(shape)))
    out = tuple(1 if k in gone else size for k, size in enumerate(shape) if keep or k not in gone)
    if not out and not g.numpy:
        out = (1,)
    if not axes and op in ("max", "min"):
        return
    g.add(op, [x], out, axis=axis, keepdims=keep)


@family(weight=1)
def softmax(g: Builder, x: str, shape: Shape) -> None:
    g.add(g.pick("softmax", "log_softmax"), [x], shape, axis=g.pick(-1, 0))


@family()
def unary(g: Builder, x: str, shape: Shape) -> None:
    # A root of what may be negative is NaN, which is no test of anything.
    made = g.nodes[int(x[1:])].op if x[1:].isdigit() else ""
    roots = ["sqrt"] * 3 if made.rpartition(".")[2] in ("relu", "clip", "sigmoid", "square") else []
    g.add(g.pick("square", "abs", "negative", "exp", *roots), [x], shape)


@family(weight=1)
def scalar_arithmetic(g: Builder, x: str, shape: Shape) -> None:
    text = g.pick("{} * 0.5", "{} + 1", "1 - {}", "{} / 2", "{} ** 2", "{} * 3")
    g.add(f"={text}", [x], shape)


@family(weight=4)
def elementwise(g: Builder, x: str, shape: Shape) -> None:
    others = g.older(lambda one: one == shape)
    y, _ = g.pick(*others)
    ops = ["=({} + {})", "broadcast_add", "broadcast_mul", "broadcast_sub", "broadcast_maximum"]
    g.add(g.pick(*ops, *([] if g.numpy else ["elemwise_add", "elemwise_mul"])), [x, y], shape)


@family(2, 3, 4)
def broadcasting(g: Builder, x: str, shape: Shape) -> None:
    others = g.older(lambda one: len(one) == len(shape) and one != shape
                     and all(a in (1, b) for a, b in zip(one, shape)))  # fmt: skip
    inner = [1] * len(shape)
    inner[g.pick(1, -1)] = -1
    sizes = [size if mark < 0 else 1 for mark, size in zip(inner, shape)]
    y = g.pick(*others)[0] if others and g.flag() else g.param("beta", *sizes)
    op = g.pick("broadcast_add", "broadcast_mul", "broadcast_sub", "broadcast_maximum")
    g.add(op, [x, y] if g.flag() else [y, x], shape)


@family(2, 3, 4)
def split(g: Builder, x: str, shape: Shape) -> None:
    axis = g.pick(1, len(shape) - 1)
    parts = g.pick(2, 3, 4)
    if shape[axis] % parts == 0 and shape[axis]:
        out = tuple(size // (parts if k == axis else 1) for k, size in enumerate(shape))
        attrs = {"axis": axis, "num_outputs": parts}
        if g.numpy:
            attrs = {"axis": axis, "indices_or_sections": parts}
        g.add("np.split" if g.numpy else "SliceChannel", [x], *[out] * parts, **attrs)


@family(2, 3, 4)
def concatenation(g: Builder, x: str, shape: Shape) -> None:
    if g.rarely(3):
        others = g.older(lambda one: one == shape)
        out = (shape[0], 2, *shape[1:])
        if len(out) < 5:
            g.add("stack", [x, g.pick(*others)[0]], out, axis=1)
        return
    others = g.older(
        lambda one: len(one) == len(shape) and (one[0], one[2:]) == (shape[0], shape[2:])
    )
    y, other = g.pick(*others)
    out = (shape[0], shape[1] + other[1], *shape[2:])
    g.add("concat", [x, y], out, **{"axis" if g.numpy else "dim": 1})


@family(2, 3, 4, weight=1)
def reshaping(g: Builder, x: str, shape: Shape) -> None:
    kind = g.pick("Flatten", "transpose", "expand_dims", "reshape", "swapaxes")
    rank, total = len(shape), 1
    for size in shape[1:]:
        total *= size
    if kind == "transpose":
        axes = (0, *range(2, rank), 1)
        g.add(kind, [x], tuple(shape[k] for k in axes), axes=axes)
    elif kind == "swapaxes" and rank > 2:
        out = list(shape)
        out[1], out[-1] = out[-1], out[1]
        g.add(kind, [x], tuple(out), dim1=1, dim2=rank - 1)
    elif kind == "expand_dims" and rank < 4:
        g.add(kind, [x], (shape[0], 1, *shape[1:]), axis=1)
    elif kind == "Flatten" and not g.numpy:
        g.add(kind, [x], (shape[0], total))
    elif rank > 2:
        attrs = {"newshape": (-2, -1)} if g.numpy else {"shape": (0, -1)}
        g.add("npx.reshape" if g.numpy else "reshape", [x], (shape[0], total), **attrs)


@family(2, 3, 4, numpy=False)
def slicing(g: Builder, x: str, shape: Shape) -> None:
    axis = g.pick(1, len(shape) - 1)
    if shape[axis] > 1:
        half = shape[axis] // 2
        out = tuple(half if k == axis else size for k, size in enumerate(shape))
        g.add("slice_axis", [x], out, axis=axis, begin=g.pick(0, 1), end=None)
        begin = g.nodes[-1].attrs["begin"]
        g.nodes[-1].attrs["end"] = begin + half


@family(weight=1)
def identity(g: Builder, x: str, shape: Shape) -> None:
    op = "Dropout" if g.numpy else g.pick("Dropout", "identity", "BlockGrad")
    g.add(op, [x], shape, **({"p": 0} if op == "Dropout" else {}))


@family(2, 3)
def indexing(g: Builder, x: str, shape: Shape) -> None:
    kind = g.pick("pick", "Embedding", "one_hot", "take")
    n = shape[0]
    if kind == "pick":
        if shape[-1] >= 4 and len(shape) == 2:
            g.add(kind, [x, "label"], (n,), axis=1)
    elif kind == "Embedding":
        width = g.pick(8, 16)
        inputs = ["label", g.param("weight", 4, width)]
        g.add(kind, inputs, (n, width), input_dim=4, output_dim=width)
    elif kind == "one_hot":
        g.add(kind, ["label"], (n, 4), depth=4)
    elif not g.numpy and shape[1] >= 4:
        g.add(kind, [x, "label"], (n, n, *shape[2:]), axis=1)


@family(3, weight=3)
def batched_product(g: Builder, x: str, shape: Shape) -> None:
    others = g.older(lambda one: len(one) == 3 and (one[0], one[2]) == (shape[0], shape[2]))
    y, other = g.pick(*others)
    g.add("batch_dot", [x, y], (shape[0], shape[1], other[1]), transpose_b=True)


@family(2, numpy=False)
def dot(g: Builder, x: str, shape: Shape) -> None:
    width = g.pick(4, 16)
    g.add("dot", [x, g.param("weight", width, shape[1])], (shape[0], width), transpose_b=True)


@family(3, numpy=False, weight=3)
def recurrent(g: Builder, x: str, shape: Shape) -> None:
    kind, width = g.pick("LSTM", "GRU", "RNN"), g.pick(8, 16)
    both = g.flag()
    out = (*shape[:2], width * (2 if both else 1))
    attrs: Dict[str, Any] = {"hidden_size": width, "input_size": shape[2], "bidirectional": both}
    attrs.update({"num_layers": 2} if g.rarely(3) else {})
    g.add(f"@rnn.{kind}", [x], out, **attrs)


@family(3, numpy=False)
def loop(g: Builder, x: str, shape: Shape) -> None:
    width = shape[2]
    weight = g.param("weight", width, width)
    start = "F.zeros_like(F.squeeze(F.slice_axis({0}, axis=0, begin=0, end=1), axis=0))"
    body = g.pick(
        f"F.tanh(F.FullyConnected(a, {{1}}, num_hidden={width}, no_bias=True) + s)",
        f"F.relu(F.FullyConnected(a + s, {{1}}, num_hidden={width}, no_bias=True)) / 2",
    )
    text = f"=F.contrib.foreach(lambda a, s: ({body}, a), {{0}}, {start})[0]"
    g.add(text, [x, weight], shape)


@family(2, numpy=False)
def custom_operator(g: Builder, x: str, shape: Shape) -> None:
    g.add("Custom", [x], shape, op_type=g.pick("twice", "loss"))


@family(2, numpy=False, weight=3)
def loss_output(g: Builder, x: str, shape: Shape) -> None:
    op = g.pick("SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput",
                "MAERegressionOutput", "MakeLoss", "SVMOutput")  # fmt: skip
    if op == "MakeLoss":
        g.add(op, [x], shape)
    elif op in ("SoftmaxOutput", "SVMOutput"):
        if shape[1] >= 4:
            g.add(op, [x, "label"], shape)
    else:
        g.add(op, [x, "=F.broadcast_like(F.expand_dims(label, 1), {0})"], shape)
