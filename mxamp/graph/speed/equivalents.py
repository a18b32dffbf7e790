"""Equivalents of operators, made of operators with faster kernels on CPUs.

Each equivalent is two functions. `match_...` returns the detail of a call that it fits, else None.
The detail is the numbers that the other function needs to return the equivalent's parts.
"""

from typing import List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ...policy.values import is_true, parse_integers

__all__ = [
    "BLOCK",
    "COLORS",
    "PLANAR_AXES",
    "Attributes",
    "Call",
    "Detail",
    "Part",
    "Parts",
    "Shapes",
    "has_elements",
    "layer_norm",
    "masked_softmax",
    "match_layer_norm",
    "match_masked_softmax",
    "match_relu6",
    "match_split",
    "relu6",
    "split",
]

Attributes = Mapping[str, str]
Detail = Tuple[int, ...]
#: Shapes of an operator's inputs; None where unknown or unneeded.
Shapes = Sequence[Optional[Tuple[int, ...]]]

#: The channels of an image; with one more, oneDNN has a blocked kernel for the convolution.
COLORS = 3
#: The channels in a block of oneDNN's bfloat16 convolutions.
BLOCK = 16
#: The axes of a batch of images (NCHW), and of the weight of a 2-D convolution (OIHW).
PLANAR_AXES = 4


class Part(NamedTuple):
    """One operator of an equivalent.

    `inputs` number the inputs of the replaced operator first, then the parts before this one.
    """

    op: str
    suffix: str  #: appended to the replaced operator's name; empty for the last part
    inputs: Tuple[int, ...]
    attrs: Attributes
    float32: bool = False  #: computes in float32, whatever the class of its operator
    outputs: int = 1  #: the outputs that later parts read; each has a number


class Call(NamedTuple):
    """A call that may be replaced."""

    operator: str  #: canonical name
    attrs: Attributes
    shapes: Shapes  #: of its inputs
    training: bool  #: gradients will be computed

    @property
    def shape(self) -> Optional[Tuple[int, ...]]:
        """The shape of its first input, None where unknown."""
        return self.shapes[0] if self.shapes else None

    @property
    def weight(self) -> Optional[Tuple[int, ...]]:
        """The shape of its second input, None where unknown."""
        return self.shapes[1] if self.shapes[1:] else None


def has_elements(call: Call) -> bool:
    """Return whether the first input has elements and axes, or an unknown shape.

    oneDNN fails on empty arrays and on arrays without axes, both of which `mx.np` allows.
    """
    return call.shape is None or (bool(call.shape) and all(call.shape))


class Parts:
    """The parts of one equivalent: calls of operators, which read the inputs and earlier parts."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.made: List[Part] = []

    def add(self, op: str, suffix: str, *inputs: int, **attrs: str) -> int:
        """Append a part; return its number among the inputs of later parts."""
        self.made.append(Part(op, suffix, inputs, attrs))
        return self.inputs + sum(part.outputs for part in self.made) - 1

    def add_split(self, suffix: str, count: int, array: int) -> Sequence[int]:
        """Append a split of the first axis, which leaves that axis out; return its outputs."""
        attrs = {"num_outputs": str(count), "axis": "0", "squeeze_axis": "True"}
        first = self.add("SliceChannel", suffix, array, **attrs)
        self.made[-1] = self.made[-1]._replace(outputs=count)
        return range(first, first + count)

    def add_float32(self, op: str, suffix: str, *inputs: int, **attrs: str) -> int:
        """Append a part that computes in float32, whatever the class of its operator."""
        position = self.add(op, suffix, *inputs, **attrs)
        self.made[-1] = self.made[-1]._replace(float32=True)
        return position


def match_relu6(call: Call) -> Optional[Detail]:
    """Return () for a `clip` that is min(max(x, 0), 6) of an array with elements; else None."""
    bounds = float(call.attrs["a_min"]), float(call.attrs["a_max"])
    return () if bounds == (0, 6) and has_elements(call) else None


def relu6(_attrs: Attributes, _detail: Detail) -> Sequence[Part]:
    """Return the parts of min(max(x, 0), 6), exact in every float dtype.

    The minimum has a faster kernel in float32. Its gradient reads the output of the relu: with both
    in float32, training keeps one tensor instead of two.
    """
    return [
        Part("Activation", "relu", (0,), {"act_type": "relu"}, float32=True),
        Part("_minimum_scalar", "", (1,), {"scalar": "6"}),
    ]


def match_layer_norm(call: Call) -> Optional[Detail]:
    """Return () for a LayerNorm over the last axis in training; else None."""
    attrs = call.attrs
    plain = attrs.get("axis", "-1") == "-1" and not is_true(attrs.get("output_mean_var", "False"))
    return () if call.training and plain else None


def layer_norm(attrs: Attributes, _detail: Detail) -> Sequence[Part]:
    """Return the parts of a LayerNorm whose sums and broadcasts are products with vectors.

    Their gradients are products too. The gradients of MXNet's LayerNorm and broadcasts are
    reductions that add one element at a time. The sums are a `batch_dot` of a single pair, whose
    gradient reads the vector alone: that of `dot` would keep the other input for the backward pass.
    """
    x, gamma, beta = 0, 1, 2
    parts = Parts(inputs=3)
    add = parts.add
    rows = add("Reshape", "rows", x, shape="(1, -1, 0)", reverse="True")
    ones = add("ones_like", "ones", gamma)
    row = add("Reshape", "row", ones, shape="(1, -1)")
    share = add("broadcast_div", "share", ones, add("sum", "count", ones))
    weights = add("Reshape", "weights", share, shape="(1, -1, 1)")
    mean = add("batch_dot", "mean", rows, weights)
    centered = add("elemwise_sub", "centered", rows, add("dot", "means", mean, row))
    variance = add("batch_dot", "variance", add("square", "square", centered), weights)
    padded = add("_plus_scalar", "padded", variance, scalar=attrs.get("eps", "1e-05"))
    inverse = add("rsqrt", "inverse", padded)
    scale = add("dot", "scale", inverse, add("Reshape", "gammas", gamma, shape="(1, -1)"))
    one = add("ones_like", "one", inverse)
    shift = add("dot", "shift", one, add("Reshape", "betas", beta, shape="(1, -1)"))
    made = add("elemwise_add", "sum", add("elemwise_mul", "scaled", centered, scale), shift)
    add("reshape_like", "", made, x)
    return parts.made


def match_masked_softmax(call: Call) -> Optional[Detail]:
    """Return () for a softmax of rows with lengths, along the last axis in inference; else None."""
    attrs = call.attrs
    plain = attrs.get("axis", "-1") == "-1" and not {"temperature", "dtype"} & set(attrs)
    masked = is_true(attrs.get("use_length", "False"))
    return () if masked and plain and not call.training and has_elements(call) else None


def masked_softmax(_attrs: Attributes, _detail: Detail) -> Sequence[Part]:
    """Return the parts of a softmax with lengths by oneDNN's softmax, which takes no lengths.

    Elements past the length are replaced, not added to: they may be NaN. The second mask makes
    zeros of rows of length 0, for which the softmax gives NaN.
    """
    x, length = 0, 1
    parts = Parts(inputs=2)
    add = parts.add
    places = add("_contrib_arange_like", "places", x, axis="-1")
    zero = add("slice_axis", "zero", places, axis="0", begin="0", end="1")
    lengths = add(
        "Concat",
        "lengths",
        zero,
        add("_plus_scalar", "ends", places, scalar="1"),
        dim="0",
        num_args="2",
    )
    row = add("Reshape", "row", places, shape="(1, -1)")
    column = add("Reshape", "column", lengths, shape="(-1, 1)")
    # One mask for each length; copying rows of it is faster than comparing every element.
    masks = add("broadcast_lesser", "masks", row, column)
    mask = add("take", "mask", masks, length, mode="clip")
    zeros = add("zeros_like", "zeros", x)
    least = add("_plus_scalar", "least", zeros, scalar="-inf")
    shares = add("softmax", "shares", add("where", "apart", mask, x, least))
    add("where", "", mask, shares, zeros)
    return parts.made


def match_split(call: Call) -> Optional[Detail]:
    """Return (number of axes or 0, *bounds) for a split along the last axis; else None.

    Along the last axis, MXNet copies element by element. In training, equal parts are split along a
    new axis before the last one, so that the gradient is copied row by row: the gradient of slices
    is a sum of arrays that are mostly zeros. The number of axes is 0 for slices.
    """
    shape, attrs = call.shape, call.attrs
    if shape is None or not all(shape) or is_true(attrs.get("squeeze_axis", "False")):
        return None
    if int(attrs.get("axis", "1")) not in (-1, len(shape) - 1):
        return None
    axes, *bounds = _split_bounds(shape, attrs, call.training)
    # Parts of NumPy's splits may be empty, and MXNet has no empty slices.
    return (axes, *bounds) if all(a < b for a, b in zip(bounds, bounds[1:])) else None


def _split_bounds(shape: Tuple[int, ...], attrs: Attributes, training: bool) -> Detail:
    """Return the detail of `match_split`, also where parts are empty."""
    sections = int(attrs.get("num_outputs", attrs.get("sections", "0")))
    if sections:
        # As in NumPy's array_split, the first parts are longer by one.
        size, longer = divmod(shape[-1], sections)
        axes = len(shape) if training and not longer else 0
        return (axes, *(size * i + min(i, longer) for i in range(sections + 1)))
    starts = parse_integers(attrs["indices"])
    return (0, *starts, shape[-1])


def split(_attrs: Attributes, detail: Detail) -> Sequence[Part]:
    """Return the parts of a split: slices, or a split along a new axis."""
    axes, *bounds = detail
    if not axes:
        return [
            Part("slice_axis", f"slice{i}", (0,), {"axis": "-1", "begin": str(a), "end": str(b)})
            for i, (a, b) in enumerate(zip(bounds, bounds[1:]))
        ]
    parts = Parts(inputs=1)
    count = str(len(bounds) - 1)
    shape = ", ".join(["0"] * (axes - 1) + ["-4", count, "-1"])
    rows = parts.add("Reshape", "parts", 0, shape=f"({shape})")
    parts.add("SliceChannel", "", rows, axis=str(axes - 1), num_outputs=count, squeeze_axis="True")
    return parts.made
