"""Equivalent operators with faster kernels on CPUs, for graphs that are about to run.

MXNet's own kernels are slow where oneDNN or BLAS has a fast one for the same function: `relu`
against `Activation`, `clip(0, 6)`, LayerNorm in training, the mean over an axis. A substitution
puts the fast form in the place of the slow one. Graphs that users hold, convert and save keep the
operators that they have. Which substitutions a policy makes, and what each was measured to gain,
stands in its operator list.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Callable, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

__all__ = ["ALL", "BY_SHAPE", "NAMES", "OPTIMIZERS", "Part", "Substitution", "find"]

Attributes = Mapping[str, str]
Detail = Tuple[int, ...]


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
    training: bool  #: gradients will be computed


@dataclass(frozen=True)
class Substitution:
    """What stands in for calls of `operators`, where `applies` says so.

    `build` gets the attributes, and of the shape only what `detail` returns: shapes that agree
    in it share a graph. A part without a suffix is the one output; else every part is an output.
    """

    name: str
    operators: FrozenSet[str]
    build: Callable[[Attributes, Detail], Sequence[Part]]
    applies: Callable[[Call], bool] = lambda _call: True
    detail: Callable[[Call], Detail] = lambda _call: ()
    #: Its parts compute in float32, whatever class their operators have: when training, always.
    float32: Tuple[bool, bool] = (False, False)
    by_shape: FrozenSet[str] = frozenset()  #: those of `operators` where `applies` wants the shape


# ---------------------------------------------------------------------- one operator for another


def _activation(kind: str, operator: str, numpy: str) -> Substitution:
    parts = [Part("Activation", "", (0,), {"act_type": kind})]
    names = frozenset({operator, numpy})
    by_shape = frozenset({numpy})
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
    variance = add("dot", "variance", add("elemwise_mul", "square", centred, centred), weights)
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


def _is_split_of_rows(call: Call) -> bool:
    """Tell whether it splits the last axis, where MXNet's kernel copies element by element."""
    shape, attrs = call.shape, call.attrs
    last = shape is not None and int(attrs.get("axis", "1")) in (-1, len(shape) - 1)
    return last and not _is_true(attrs.get("squeeze_axis", "False"))


def _split_bounds(call: Call) -> Detail:
    length, attrs = (call.shape or (0,))[-1], call.attrs
    sections = int(attrs.get("num_outputs", attrs.get("sections", "0")))
    if sections:
        return tuple(length * i // sections for i in range(sections + 1))
    starts = [int(text) for text in attrs["indices"].strip("[]() ").split(",") if text.strip()]
    return (*starts, length)


def _split(attrs: Attributes, bounds: Detail) -> Sequence[Part]:
    pairs = zip(bounds, bounds[1:])
    return [
        Part("slice_axis", f"slice{i}", (0,), {"axis": "-1", "begin": str(a), "end": str(b)})
        for i, (a, b) in enumerate(pairs)
    ]


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
                float32=(True, True), by_shape=frozenset({"mean"}),
            ),
            Substitution(
                "split", SPLITS, _split, _is_split_of_rows, _split_bounds,
                float32=(True, False), by_shape=SPLITS,
            ),
        )
    }
)  # fmt: skip

#: Optimizers whose steps `updates` makes faster.
OPTIMIZERS = ("sgd", "adam")

#: What a policy may name as its substitutions.
NAMES = (*ALL, *OPTIMIZERS)

#: Operators whose substitution depends on the shape of their first input.
BY_SHAPE = frozenset(name for found in ALL.values() for name in found.by_shape)

_BY_OPERATOR = {name: found for found in ALL.values() for name in found.operators}


def find(
    operator: str, attrs: Attributes, shape: Optional[Tuple[int, ...]], training: bool
) -> Optional[Tuple[str, Detail]]:
    """Return the substitution for a call of `operator`, with its detail; None if there is none."""
    found = _BY_OPERATOR.get(operator)
    if found is None or (shape is None and operator in found.by_shape):
        return None
    call = Call(attrs, shape, training)
    return (found.name, found.detail(call)) if found.applies(call) else None
