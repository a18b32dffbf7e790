"""Two models side by side: run on the same inputs, and the errors of one against the other."""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np
from mxnet import nd
from mxnet._ctypes.ndarray import CachedOp
from mxnet.base import MXNetError
from mxnet.context import Context, current_context
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError, StateError
from ..framework.arrays import cast
from ..framework.machine import DTYPE_NAMES, dtype_name
from ..framework.nested import as_list
from ..framework.wording import counted, shown
from ..graph.ir import Graph
from ..policy.active import suspended
from .arguments import known_dtype, known_names, known_shapes
from .distance import Distance

__all__ = [
    "Model",
    "OutputError",
    "compare_models",
    "declared_dtypes",
    "error_of",
    "finite_input",
    "inferred_labels",
    "outputs_of",
    "random_inputs",
    "reason",
]

Model = Tuple[Symbol, Mapping[str, NDArray], Mapping[str, NDArray]]

NO_MODEL = "a model must be (symbol, arg_params, aux_params), a Symbol and two dicts, not {given}"
NO_SHAPES = (
    "the shapes of the inputs {inputs} can't be inferred from the parameters: give them with "
    "`shapes`, as name:1,3,224,224"
)
NOT_ON_THESE = "the original does not run on these inputs: {why}"
NOT_HERE = "the converted model does not run here: {why}"
NO_NUMBERS = "input {name!r} must be an array of booleans, integers or floats, not {given}"
NOT_FINITE = "input {name!r} is NaN, infinity or beyond float32 in {elements}: give finite values"
NOTHING_FINITE = "the original gives only NaN or infinity in output {name!r}: nothing to compare"
#: What stands before the reason in a line of MXNet's: the time, and the place in its source.
_WHERE = re.compile(r"MXNetError: |\[\d\d:\d\d:\d\d\] \S+: |Check failed: assign\(.*?\)\): ")
#: Random integers are below this: small enough for any table, label or length.
_INTEGERS = 2


@dataclass(frozen=True)
class OutputError:
    """How far one output of a model is from another model's.

    `relative` is the L2 norm of the difference over that of the first model's output, `maximum`
    the largest absolute difference; both leave out elements that are not finite in the first.
    `same_argmax` is the share of rows whose largest element stays the same, for outputs of two
    dimensions. `lost` counts elements that are finite in the first model and not in the second.
    """

    name: str
    shape: Tuple[int, ...]
    relative: float
    maximum: float
    same_argmax: Optional[float]
    lost: int


def compare_models(
    model: Model,
    other: Model,
    inputs: Mapping[str, Any],
    ctx: Optional[Context] = None,
) -> Tuple[OutputError, ...]:
    """Run two models on the same inputs; return the errors of the second's outputs.

    ::

        model = mx.model.load_checkpoint("resnet", 0)
        converted = amp.convert_model(*model, target_dtype="bfloat16")
        for error in amp.compare_models(model, converted, {"data": batch}):
            print(error.name, error.relative)

    Parameters
    ----------
    model, other : (Symbol, arg_params, aux_params)
        The one to measure against, and the one to measure. Run in inference, without mxamp.
    inputs : dict of str to array
        A value for each input that is no parameter; labels may be left out.
    ctx : Context, optional
        Where to run them; by default the current context.

    Raises
    ------
    ArgumentError
        An input is missing or holds other values than finite numbers; the first model does not
        run on the inputs, or gives an output without a finite element.
    StateError
        The other model does not run here, say one that was converted for GPUs on a CPU.
    """
    ctx = ctx or current_context()
    with suspended():
        given = {name: finite_input(name, value) for name, value in inputs.items()}
    try:
        ours = outputs_of(model, given, ctx)
    except MXNetError as error:
        raise ArgumentError(NOT_ON_THESE.format(why=reason(error))) from None
    try:
        theirs = outputs_of(other, given, ctx)
    except MXNetError as error:
        raise StateError(NOT_HERE.format(why=reason(error))) from None
    names = model[0].list_outputs()
    return tuple(error_of(name, a, b) for name, a, b in zip(names, ours, theirs))


def random_inputs(
    model: Model,
    shapes: Optional[Mapping[str, Sequence[int]]] = None,
    dtypes: Optional[Mapping[str, Any]] = None,
    seed: int = 0,
) -> Dict[str, NDArray]:
    """Return random values for the inputs of a model: normal floats, integers below 2.

    `shapes` and `dtypes` are by name; float32 is the default. What follows from other shapes,
    labels say, may be left out.
    """
    symbol, args, auxs = _checked_model(model)
    shapes, dtypes = known_shapes("shapes", shapes), dict(dtypes or {})
    known_names([*shapes, *dtypes], symbol.list_inputs(), "input")
    names = [n for n in symbol.list_inputs() if n not in args and n not in auxs]
    known = {name: array.shape for name, array in args.items() if name in symbol.list_arguments()}
    try:
        inferred = symbol.infer_shape_partial(**{**known, **shapes})[0]
    except MXNetError as error:
        raise ArgumentError(f"inputs of these shapes don't fit: {reason(error)}") from None
    every = dict(zip(symbol.list_arguments(), inferred or ()))
    wanted = {name: tuple(shapes.get(name) or every.get(name) or ()) for name in names}
    open_ones = [name for name, shape in wanted.items() if not shape or min(shape) <= 0]
    if open_ones:
        raise ArgumentError(NO_SHAPES.format(inputs=", ".join(open_ones)))
    random = np.random.RandomState(seed)
    return {
        name: _random(random, shape, known_dtype(name, dtypes.get(name, "float32")))
        for name, shape in wanted.items()
    }


def _checked_model(model: Model) -> Model:
    """Return a model that was given; raise an `ArgumentError` for what is none."""
    kinds = (Symbol, Mapping, Mapping)
    listed = isinstance(model, (tuple, list)) and len(model) == len(kinds)
    if not (listed and all(map(isinstance, model, kinds))):
        raise ArgumentError(NO_MODEL.format(given=shown(model)))
    return model


def _random(random: np.random.RandomState, shape: Sequence[int], dtype: str) -> NDArray:
    if "float" not in dtype:
        return nd.array(random.randint(0, _INTEGERS, shape), dtype=dtype)
    values = nd.array(random.randn(*shape), dtype="float32")
    return values if dtype == "float32" else cast(values, dtype)


def finite_input(name: str, value: Any) -> NDArray:
    """Return an input as an array; raise where it holds no numbers, or some that are not finite."""
    array = value if isinstance(value, NDArray) else _numbers(name, value)
    kind = dtype_name(array.dtype)
    if "float" in kind:
        values = cast(array, "float32") if kind == "bfloat16" else array
        bad = int((~np.isfinite(values.asnumpy())).sum())
        if bad:
            raise ArgumentError(NOT_FINITE.format(name=name, elements=counted(bad, "element")))
    return array


def _numbers(name: str, value: Any) -> NDArray:
    given = getattr(value, "dtype", None)
    # MXNet would drop imaginary parts, and take dates for numbers.
    if not isinstance(given, np.dtype) or given.kind in "biuf":
        # What float32 does not hold is infinite, and found so.
        with suppress(TypeError, ValueError), np.errstate(over="ignore"):
            return nd.array(value)
    raise ArgumentError(NO_NUMBERS.format(name=name, given=shown(value)))


def outputs_of(model: Model, inputs: Mapping[str, NDArray], ctx: Context) -> Sequence[Any]:
    """Run a model without mxamp; return its outputs in float32, as NumPy arrays."""
    symbol, args, auxs = _checked_model(model)
    declared = declared_dtypes(symbol)
    names = symbol.list_inputs()
    values = {**args, **auxs}
    with suspended():
        for name, array in inputs.items():
            if name in names:
                values[name] = cast(array, declared[name]) if name in declared else array
        missing = [name for name in names if name not in values]
        values.update(inferred_labels(symbol, values, missing))
        # Not bound: an executor would fuse operators, each model's in its own way.
        run = CachedOp(symbol)
        outputs = run(*(values[name].as_in_context(ctx) for name in names))
        listed = as_list(outputs)
        return [cast(output, "float32").asnumpy() for output in listed]


def declared_dtypes(symbol: Symbol) -> Dict[str, str]:
    """Return the dtypes of the inputs that a symbol itself gives one."""
    variables = Graph.from_symbol(symbol).variables
    codes = {variable.name: variable.attrs.get("__dtype__") for variable in variables}
    return {name: DTYPE_NAMES[int(code)] for name, code in codes.items() if code is not None}


def inferred_labels(
    symbol: Symbol, values: Mapping[str, NDArray], missing: Sequence[str]
) -> Dict[str, NDArray]:
    """Return zeros for arguments whose shape follows from the others."""
    if not missing:
        return {}
    shapes = symbol.infer_shape_partial(**{name: array.shape for name, array in values.items()})[0]
    inferred = dict(zip(symbol.list_arguments(), shapes or ()))
    unknown = [name for name in missing if not inferred.get(name) or min(inferred[name]) <= 0]
    if unknown:
        raise ArgumentError(f"inputs without a value: {', '.join(unknown)}")
    return {name: nd.zeros(inferred[name]) for name in missing}


def error_of(name: str, ours: Any, theirs: Any) -> OutputError:
    """Return the errors of an output against ours, of a model to measure against."""
    distance = Distance()
    distance.add(name, ours, theirs)
    if ours.size and not np.isfinite(ours).any():
        raise ArgumentError(NOTHING_FINITE.format(name=name))
    agreement = None
    if ours.ndim == 2 and ours.shape[1] > 1:  # noqa: PLR2004
        agreement = float((ours.argmax(1) == theirs.argmax(1)).mean())
    return OutputError(
        name, ours.shape, distance.relative, distance.maximum, agreement, distance.lost
    )


def reason(error: Exception) -> str:
    """Return the line of an MXNet error that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wanted = [line for line in lines if "Error" in line or "Check failed" in line]
    return _WHERE.sub("", (wanted or lines or ["unknown"])[-1]).rstrip(".")
