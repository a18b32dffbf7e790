"""Equivalent operators with faster kernels on CPUs, for graphs that are about to run.

MXNet's own kernels are slow where oneDNN or BLAS has a fast one for the same function: `relu`
against `Activation`, `clip(0, 6)`, LayerNorm in training, the mean over an axis. A substitution
puts the fast form in the place of the slow one. Graphs that users hold, convert and save keep the
operators that they have. Which substitutions a policy makes, and what each was measured to gain,
stands in its operator list.
"""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Callable, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

__all__ = [
    "ALL", "BLOCK", "BY_SHAPE", "COLOURS", "Part", "Substitution", "find", "fourth_channel",
]  # fmt: skip

Attributes = Mapping[str, str]
Detail = Tuple[int, ...]

#: The channels of a first layer; with one more oneDNN has a blocked kernel for it.
COLOURS = 3
#: oneDNN's bfloat16 convolutions work on blocks of so many channels.
BLOCK = 16
# Beyond it the fourth channel's products cost more than the layout saves.
_LARGEST_KERNEL = 7


class Part(NamedTuple):
    """One operator of what stands in for another.

    `inputs` count the inputs of the operator that is replaced first, and after them the parts.
    """

    op: str
    suffix: str  #: of its name; the last part has the replaced operator's name
    inputs: Tuple[int, ...]
    attrs: Attributes


class Call(NamedTuple):
    """What is known of a call that may be replaced."""

    attrs: Attributes
    shape: Optional[Tuple[int, ...]]  #: of its first input, where that is known
    weight: Optional[Tuple[int, ...]]  #: the shape of its second, where that is known
    training: bool  #: gradients will be computed


@dataclass(frozen=True)
class Substitution:
    """What stands in for calls of `operators`, where `applies` says so.

    `build` gets the attributes, and of the shapes only what `detail` returns: shapes that agree
    in it share a graph. The outputs are those of a last part without a suffix; else each part is
    an output.
    """

    name: str
    operators: FrozenSet[str]
    build: Callable[[Attributes, Detail], Sequence[Part]]
    applies: Callable[[Call], bool] = lambda _call: True
    detail: Callable[[Call], Detail] = lambda _call: ()
    #: Its parts compute in float32, whatever class their operators have: when training, always.
    float32: Tuple[bool, bool] = (False, False)
    #: Those of `operators` where `applies` wants a shape, and which input's.
    by_shape: Mapping[str, int] = field(default_factory=dict)
    lowered: bool = False  #: only where the operator computes in the target dtype
    #: Rules by shape (`rules.BY_SHAPE`) whose reason to keep it in float32 is gone with it.
    answers: FrozenSet[str] = frozenset()


# ---------------------------------------------------------------------- one operator for another


def _activation(kind: str, operator: str, numpy: str) -> Substitution:
    parts = [Part("Activation", "", (0,), {"act_type": kind})]
    names = frozenset({operator, numpy})
    by_shape = {numpy: 0}
    return Substitution(kind, names, lambda *_: parts, _has_elements, by_shape=by_shape)


def _has_elements(call: Call) -> bool:
    """Tell whether oneDNN takes the array: NumPy's may be empty or have no axes."""
    return call.shape is None or (bool(call.shape) and all(call.shape))


# ---------------------------------------------------------------------- several for one


class _Parts:
    """Parts in the making; `add` returns the number that later parts read them by."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.found: List[Part] = []

    def add(self, op: str, suffix: str, *inputs: int, **attrs: str) -> int:
        self.found.append(Part(op, suffix, inputs, attrs))
        return self.inputs + len(self.found) - 1


def _is_relu6(call: Call) -> bool:
    return (float(call.attrs["a_min"]), float(call.attrs["a_max"])) == (0, 6)


def _relu6(_attrs: Attributes, _detail: Detail) -> Sequence[Part]:
    """Return min(max(x, 0), 6), exact in every float dtype."""
    return [
        Part("Activation", "relu", (0,), {"act_type": "relu"}),
        Part("_minimum_scalar", "", (1,), {"scalar": "6"}),
    ]


def _is_trained_layer_norm(call: Call) -> bool:
    attrs = call.attrs
    plain = attrs.get("axis", "-1") == "-1"
    return call.training and plain and not _is_true(attrs.get("output_mean_var", "False"))


def _layer_norm(attrs: Attributes, _detail: Detail) -> Sequence[Part]:
    """Return row sums and broadcasts as products with vectors: their gradients are products too.

    The gradients of MXNet's own kernel, and of its broadcasts, are reductions that it does one
    element at a time.
    """
    x, gamma, beta = 0, 1, 2
    parts = _Parts(inputs=3)
    add = parts.add
    ones = add("ones_like", "ones", gamma)
    row = add("Reshape", "row", ones, shape="(1, -1)")
    share = add("broadcast_div", "share", ones, add("sum", "count", ones))
    weights = add("Reshape", "weights", share, shape="(-1, 1)")
    mean = add("dot", "mean", x, weights)
    centred = add("elemwise_sub", "centred", x, add("dot", "means", mean, row))
    variance = add("dot", "variance", add("square", "square", centred), weights)
    padded = add("_plus_scalar", "padded", variance, scalar=attrs.get("eps", "1e-05"))
    inverse = add("rsqrt", "inverse", padded)
    scale = add("dot", "scale", inverse, add("Reshape", "gammas", gamma, shape="(1, -1)"))
    one = add("ones_like", "one", inverse)
    shift = add("dot", "shift", one, add("Reshape", "betas", beta, shape="(1, -1)"))
    add("elemwise_add", "", add("elemwise_mul", "scaled", centred, scale), shift)
    return parts.found


def _is_mean_of_rows(call: Call) -> bool:
    attrs = call.attrs
    over_one = attrs.get("axis", "").strip("[]() ,") == "1"
    three = call.shape is not None and len(call.shape) == len("NTC")
    return three and over_one and not _is_true(attrs.get("exclude", "False"))


def _mean(attrs: Attributes, _detail: Detail) -> Sequence[Part]:
    """Return the mean over the middle of three axes, as products with a constant row."""
    parts = _Parts(inputs=1)
    add = parts.add
    ones = add("ones_like", "ones", add("slice_axis", "column", 0, axis="2", begin="0", end="1"))
    share = add("broadcast_div", "share", ones, add("sum", "count", ones, axis="1", keepdims="1"))
    if _is_true(attrs.get("keepdims", "False")):
        add("batch_dot", "", share, 0, transpose_a="True")
    else:
        add("Reshape", "", add("batch_dot", "row", share, 0, transpose_a="True"), shape="(0, -1)")
    return parts.found


def _is_image_convolution(call: Call) -> bool:
    """Tell whether it is a first layer that reads colours, with a blocked kernel for four."""
    attrs, weight = call.attrs, call.weight
    return (
        weight is not None
        and len(weight) == len("OIHW")
        and weight[1] == COLOURS
        and weight[0] % BLOCK == 0
        and max(weight[2:]) <= _LARGEST_KERNEL
        and attrs.get("layout", "None") in ("None", "NCHW")
        and attrs.get("num_group", "1") == "1"
    )


def _image_convolution(attrs: Attributes, _detail: Detail) -> Sequence[Part]:
    """Return the convolution with a fourth channel of zeros, in the image and in the weight.

    oneDNN's bfloat16 convolution works on pairs of channels: for three of them it falls back to
    a matrix product per image, whose output has the plain layout.
    """
    bias = () if _is_true(attrs.get("no_bias", "False")) else (2,)
    parts = _Parts(inputs=2 + len(bias))
    padded = [_add_fourth(parts, tensor, name) for tensor, name in enumerate(("data", "weight"))]
    parts.add("Convolution", "", *padded, *bias, **attrs)
    return parts.found


def _add_fourth(parts: _Parts, tensor: int, name: str) -> int:
    channel = parts.add("slice_axis", f"{name}_red", tensor, axis="1", begin="0", end="1")
    zeros = parts.add("zeros_like", f"{name}_zeros", channel)
    return parts.add("Concat", f"{name}_four", tensor, zeros, num_args="2", dim="1")


def fourth_channel() -> Sequence[Part]:
    """Return what gives one image its fourth channel, where the weight has it already."""
    parts = _Parts(inputs=1)
    _add_fourth(parts, 0, "data")
    return parts.found


def _is_split_of_rows(call: Call) -> bool:
    """Tell whether it splits the last axis, where MXNet's kernel copies element by element."""
    shape, attrs = call.shape, call.attrs
    last = shape is not None and int(attrs.get("axis", "1")) in (-1, len(shape) - 1)
    return last and not _is_true(attrs.get("squeeze_axis", "False"))


def _split_bounds(call: Call) -> Detail:
    """Return the number of axes where one kernel can do it, else 0; then the bounds of the parts.

    In training, equal parts are split along an axis of their own before the last: the gradient
    is then copied together row by row. That of slices is a sum of arrays that are mostly zeros.
    """
    shape, attrs = call.shape or (0,), call.attrs
    sections = int(attrs.get("num_outputs", attrs.get("sections", "0")))
    if sections:
        axes = len(shape) if call.training else 0
        return (axes, *(shape[-1] * i // sections for i in range(sections + 1)))
    starts = [int(text) for text in attrs["indices"].strip("[]() ").split(",") if text.strip()]
    return (0, *starts, shape[-1])


def _split(_attrs: Attributes, detail: Detail) -> Sequence[Part]:
    axes, *bounds = detail
    if not axes:
        return [
            Part("slice_axis", f"slice{i}", (0,), {"axis": "-1", "begin": str(a), "end": str(b)})
            for i, (a, b) in enumerate(zip(bounds, bounds[1:]))
        ]
    parts = _Parts(inputs=1)
    count = str(len(bounds) - 1)
    shape = ", ".join(["0"] * (axes - 1) + ["-4", count, "-1"])
    rows = parts.add("Reshape", "parts", 0, shape=f"({shape})")
    parts.add("SliceChannel", "", rows, axis=str(axes - 1), num_outputs=count, squeeze_axis="True")
    return parts.found


def _is_true(text: str) -> bool:
    return text in ("True", "1", "true")


# ---------------------------------------------------------------------- all of them

SPLITS = frozenset({"SliceChannel", "_split_v2"})

ALL: Mapping[str, Substitution] = MappingProxyType(
    {
        found.name: found
        for found in (
            _activation("relu", "relu", "_npx_relu"),
            _activation("sigmoid", "sigmoid", "_npx_sigmoid"),
            _activation("tanh", "tanh", "_npi_tanh"),
            Substitution("relu6", frozenset({"clip"}), _relu6, _is_relu6),
            Substitution(
                "layer_norm", frozenset({"LayerNorm"}), _layer_norm, _is_trained_layer_norm,
                float32=(True, True),
            ),
            Substitution(
                "mean", frozenset({"mean"}), _mean, _is_mean_of_rows,
                float32=(True, True), by_shape={"mean": 0},
            ),
            Substitution(
                "image_convolution", frozenset({"Convolution"}), _image_convolution,
                _is_image_convolution, by_shape={"Convolution": 1}, lowered=True,
                answers=frozenset({"odd_channels"}),
            ),
            Substitution(
                "split", SPLITS, _split, _is_split_of_rows, _split_bounds,
                float32=(True, False), by_shape=dict.fromkeys(SPLITS, 0),
            ),
        )
    }
)  # fmt: skip

#: Operators whose substitution depends on a shape, and which input's.
BY_SHAPE = {name: k for found in ALL.values() for name, k in found.by_shape.items()}

_BY_OPERATOR = {name: found for found in ALL.values() for name in found.operators}


def find(
    operator: str,
    attrs: Attributes,
    training: bool,
    shape: Optional[Tuple[int, ...]] = None,
    weight: Optional[Tuple[int, ...]] = None,
) -> Optional[Tuple[str, Detail]]:
    """Return the substitution for a call of `operator`, with its detail; None if there is none."""
    found = _BY_OPERATOR.get(operator)
    if found is None or (operator in BY_SHAPE and (shape, weight)[BY_SHAPE[operator]] is None):
        return None
    call = Call(attrs, shape, weight, training)
    return (found.name, found.detail(call)) if found.applies(call) else None
