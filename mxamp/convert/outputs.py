"""Run two models on the same inputs, and measure the errors of the second one's outputs."""

import math
import re
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from mxnet import nd
from mxnet._ctypes.ndarray import CachedOp
from mxnet.base import MXNetError
from mxnet.context import Context, current_context
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError, CheckError, StateError
from ..framework.arrays import as_list, cast
from ..framework.keywords import checked_call
from ..framework.machine import Values, dtype_name
from ..framework.operators import with_trait
from ..framework.wording import counted, shown
from ..graph.inspect import tensors_of
from ..graph.ir import Graph, Shape
from ..policy.active import suspended
from ..policy.values import is_true
from .options import check_mapping, check_names, checked_dtype, checked_shapes, resolved_dtypes

Arrays = Mapping[str, NDArray]
Model = Tuple[Symbol, Arrays, Arrays]

NO_MODEL = "a saved model must be (symbol, arg_params, aux_params) with NDArrays, not {given}"
NO_SHAPES = "the shapes of {inputs} can't be inferred: give each, as --input {first}:1,3,224,224"
NO_FIT = "inputs of the shapes {shapes} do not fit the model and its parameters: {why}"
NOT_RUN = "the model does not run on {inputs}: {why}"
NOT_HERE = "the other model does not run here (one for GPUs needs a GPU): {why}"
NO_VALUES = "input {name!r} must be an array of numbers, not {given}: mx.nd.zeros(sizes) makes one"
NOT_FINITE = "input {name!r} is NaN, infinity or beyond float32 in {elements}: give finite values"
#: The time and source location in front of the reason in a line of an MXNet error.
_WHERE = re.compile(r"MXNetError: |\[\d\d:\d\d:\d\d\] \S+: |Check failed: assign\(.*?\)\): ")


class Distance:
    """The error of one or more arrays against their reference arrays.

    `relative` is the L2 norm of the difference over that of the reference, for the worst pair:
    pooled norms would hide a small array that is all wrong. Against a reference of zeros it is 0
    or 1. `maximum` is the largest absolute difference. Both leave out elements that are not finite
    in one of the two. `lost` counts elements that are finite in the reference alone.
    """

    def __init__(self) -> None:
        self.relative = self.maximum = 0.0
        self.lost = 0

    def add(self, name: str, reference: Values, measured: Values) -> None:
        """Add the error of an output against its reference; raise if their shapes differ."""
        if reference.shape != measured.shape:
            shapes = f"{reference.shape} and {measured.shape}"
            raise ArgumentError(f"output {name!r} has shape {shapes}")
        finite = np.isfinite(reference)
        both = finite & np.isfinite(measured)
        self.lost += int(finite.sum() - both.sum())
        base = reference[both].astype("float64")
        difference = measured[both].astype("float64") - base
        norm, error = (math.sqrt(float((one**2).sum())) for one in (base, difference))
        self.relative = max(self.relative, error / norm if norm else float(error > 0))
        if difference.size:
            self.maximum = max(self.maximum, float(abs(difference).max()))


class OutputError(NamedTuple):
    """The error of one output in the result of `compare_models`."""

    name: str
    shape: Tuple[int, ...]
    relative: float
    maximum: float
    same_argmax: Optional[float]
    lost: int


@checked_call
def compare_models(
    model: Model, other: Model, inputs: Mapping[str, Any], ctx: Optional[Context] = None
) -> Tuple[OutputError, ...]:
    """Run two models on the same inputs; return the errors of the second one's outputs.

    ::

        model = mx.model.load_checkpoint("resnet", 0)
        converted = amp.convert_model(*model, target_dtype="bfloat16")
        for error in amp.compare_models(model, converted, {"data": data}):
            print(error.name, error.relative, error.lost)

    Parameters
    ----------
    model : (Symbol, arg_params, aux_params)
        The reference. It runs in inference mode, without mxamp.
    other : (Symbol, arg_params, aux_params)
        The model to measure, which runs in the same way.
    inputs : dict of str to array
        A value for each input that is not a parameter. You may leave out labels.
    ctx : Context, optional
        The device on which both models run; by default the current context.

    Returns
    -------
    tuple of OutputError
        An error for each output, with the output's `name` and `shape`. `relative` is the L2 norm of
        the difference, divided by the L2 norm of the first model's output. `maximum` is the largest
        absolute difference. `lost` is the number of elements that are finite only in the first
        model. `same_argmax`, for outputs of two dimensions, is the share of rows whose largest
        element is in the same place. Elements that are not finite in the first model do not count.

    Raises
    ------
    ArgumentError
        An input is missing or is not finite; the first model does not run on the inputs, or gives
        an output without a finite element.
    StateError
        `other` does not run on this device, such as a model converted for GPUs on a CPU.
    """
    if not isinstance(inputs, Mapping):
        raise ArgumentError(f"inputs must map names to arrays, not {shown(inputs)}")
    if not isinstance(ctx, (Context, type(None))):
        raise ArgumentError(f"ctx must be a Context, such as mx.cpu(), not {shown(ctx)}")
    ctx = ctx or current_context()
    with suspended():
        given = {name: finite_input(name, value) for name, value in inputs.items()}
    expected = run_model(model, given, ctx)
    try:
        measured = run_model(other, given, ctx)
    except ArgumentError as error:
        raise StateError(NOT_HERE.format(why=error)) from None
    return tuple(map(output_error, model[0].list_outputs(), expected, measured))


def check_errors(errors: Sequence[OutputError], tolerance: float, hint: str) -> None:
    """Raise `CheckError` if an output has new Inf or NaN, or an error above `tolerance`."""
    for one in errors:
        bad = f"a relative error of {one.relative:.2g}, more than {tolerance:g}"
        if one.lost:
            bad = f"Inf or NaN in {counted(one.lost, 'element')} where the original has none"
        if one.lost or not one.relative <= tolerance:
            raise CheckError(f"output {one.name!r} has {bad}; nothing was written. {hint}", errors)


def output_error(name: str, reference: Values, measured: Values) -> OutputError:
    """Return the error of a model's output against the reference, both as float32 NumPy arrays."""
    distance = Distance()
    distance.add(name, reference, measured)
    if reference.size and not np.isfinite(reference).any():
        raise ArgumentError(f"the original gives only NaN or infinity in output {name!r}")
    same_argmax = None
    if reference.ndim == 2 and reference.shape[1] > 1:  # noqa: PLR2004
        same_argmax = float((reference.argmax(1) == measured.argmax(1)).mean())
    measures = distance.relative, distance.maximum, same_argmax, distance.lost
    return OutputError(name, reference.shape, *measures)


def run_model(model: Model, inputs: Arrays, ctx: Context) -> Sequence[Any]:
    """Run a saved model in plain MXNet; return its outputs as float32 NumPy arrays.

    Raises `ArgumentError` if it does not run on `inputs`.
    """
    symbol, args, auxs = checked_model(model)
    declared, names = Graph.from_symbol(symbol).recorded_dtypes, symbol.list_inputs()
    values, read = {**args, **auxs}, {}
    dtypes = resolved_dtypes(symbol, values)
    with suspended():
        for name in inputs.keys() & set(names):
            array = inputs[name]
            # Indices of an Embedding may be integers, where MXNet infers float32.
            is_cast = name in declared or "float" in dtype_name(array.dtype)
            read[name] = cast(array, dtypes[name]) if is_cast else array
        values.update({**read, **zeros_for_missing(symbol, values, read)})
        try:
            # Not bound: an executor would fuse operators, differently in each model.
            outputs = CachedOp(symbol)(*(values[name].as_in_context(ctx) for name in names))
            return [cast(output, "float32").asnumpy() for output in as_list(outputs)]
        except MXNetError as error:
            given = ", ".join(f"{name!r}: {shown(array)}" for name, array in inputs.items())
            raise ArgumentError(NOT_RUN.format(inputs=given, why=error_reason(error))) from None


def zeros_for_missing(symbol: Symbol, params: Arrays, inputs: Arrays) -> Dict[str, NDArray]:
    """Return zeros for inputs without a value, such as labels; raise if a shape is unknown."""
    shapes = inferred_shapes(symbol, params, {name: array.shape for name, array in inputs.items()})
    missing = [one for one in symbol.list_inputs() if one not in params and one not in inputs]
    unknown = [name for name in missing if name not in shapes]
    if unknown:
        raise ArgumentError(f"inputs without a value: {', '.join(unknown)}")
    return {name: nd.zeros(shapes[name]) for name in missing}


def inferred_shapes(symbol: Symbol, params: Arrays, inputs: Mapping[str, Any]) -> Dict[str, Shape]:
    """Return the shapes of a symbol's arguments, inferred from its parameters and inputs.

    Raises if the shapes of `inputs` do not fit the model.
    """
    arguments = symbol.list_arguments()
    known = {**{name: array.shape for name, array in params.items()}, **inputs}
    try:
        given = {name: known[name] for name in arguments if name in known}
        shapes = symbol.infer_shape_partial(**given)[0]
    except MXNetError as error:
        raise ArgumentError(NO_FIT.format(shapes=inputs, why=error_reason(error))) from None
    return {n: shape for n, shape in zip(arguments, shapes or ()) if shape and min(shape) > 0}


@checked_call
def random_inputs(
    model: Model,
    shapes: Optional[Mapping[str, Sequence[int]]] = None,
    dtypes: Optional[Mapping[str, Any]] = None,
    seed: int = 0,
) -> Dict[str, NDArray]:
    """Return random values for a model's inputs: normally distributed floats, integers 0 and 1.

    ::

        model = mx.model.load_checkpoint("resnet", 0)
        inputs = amp.random_inputs(model, {"data": data.shape})
        amp.convert_files("resnet", "resnet-bf16", target_dtype="bfloat16", check_inputs=inputs)

    If an Embedding reads an input, the input's values are indices into the Embedding's table. The
    values of sequence lengths are whole numbers up to the length of the data.

    Parameters
    ----------
    model : (Symbol, arg_params, aux_params)
        The model that will read the inputs.
    shapes : dict of str to tuple, optional
        The shapes of inputs. You may leave out shapes that follow from other shapes, such as the
        shapes of labels.
    dtypes : dict of str to dtype, optional
        Dtypes of inputs that are not float32.
    seed : int, default 0
        The seed of the random numbers. The same seed gives the same values.

    Raises
    ------
    UnknownNameError
        `shapes` or `dtypes` name an input that the model does not have.
    ArgumentError
        A shape is missing, or the shapes don't fit the model.
    """
    symbol, args, auxs = checked_model(model)
    check_mapping("dtypes", dtypes, "dtypes")
    shapes, dtypes = checked_shapes("shapes", shapes), dict(dtypes or {})
    names = [name for name in symbol.list_inputs() if name not in args and name not in auxs]
    check_names([*shapes, *dtypes], names, "input")
    found = {**inferred_shapes(symbol, args, shapes), **shapes}
    missing = [name for name in names if name not in found]
    if missing:
        raise ArgumentError(NO_SHAPES.format(inputs=", ".join(missing), first=missing[0]))
    random, bounds = np.random.RandomState(seed), _bounds(symbol, found)
    result = {}
    for name in names:
        dtype = checked_dtype(name, dtypes.get(name, "float32"))
        limits = bounds.get(name) or (None if "float" in dtype else (0, 2))  # 0 and 1 fit any label
        drawn: Any = random.randint(*limits, found[name]) if limits else random.randn(*found[name])
        array = nd.array(drawn, dtype="float32" if "float" in dtype else dtype)
        result[name] = cast(array, dtype) if "float" in dtype else array
    return result


def _bounds(symbol: Symbol, shapes: Mapping[str, Shape]) -> Dict[str, Tuple[int, int]]:
    """Return the valid range of each input that operators read as indices or lengths.

    A range is (lowest, highest + 1). MXNet's sequence operators write outside of their arrays for
    lengths beyond the data's.
    """
    graph = Graph.from_symbol(symbol)
    tensors = tensors_of(graph, dict.fromkeys(shapes, "float32"), shapes)
    bounds: Dict[str, Tuple[int, int]] = {}
    for node in graph.nodes:
        uses_lengths = is_true(node.attrs.get("use_sequence_length", "0"))
        if node.operator == "Embedding":
            source, bound = node.inputs[0], (0, int(node.attrs["input_dim"]))
        elif uses_lengths and node.operator in with_trait("reads_lengths"):
            shape, axis = tensors[node.inputs[0]].shape, int(node.attrs.get("axis", "0"))
            source, bound = node.inputs[1], (1, shape[axis] + 1 if shape else 2)
        else:
            continue
        while graph.nodes[source[0]].operator in with_trait("keeps_indices"):
            source = graph.nodes[source[0]].inputs[0]
        name = graph.nodes[source[0]].name
        bounds[name] = min(bound, bounds.get(name, bound), key=max)
    return bounds


def checked_model(model: Model) -> Model:
    """Return a saved model; raise `ArgumentError` unless it is (symbol, arg_params, aux_params)."""
    kinds = (Symbol, Mapping, Mapping)
    listed = isinstance(model, (tuple, list)) and len(model) == len(kinds)
    if not (listed and all(map(isinstance, model, kinds))):
        raise ArgumentError(NO_MODEL.format(given=shown(model)))
    for name, value in {**model[1], **model[2]}.items():
        if not isinstance(value, NDArray):
            raise ArgumentError(NO_MODEL.format(given=f"{name!r}: {shown(value)}"))
    return model


def finite_input(name: str, value: object) -> NDArray:
    """Return an input's value as an NDArray; raise if it holds Inf or NaN or is no array."""
    if not isinstance(value, NDArray):
        # A tuple is of sizes, by mistake.
        if isinstance(value, tuple) or np.asarray(value).dtype.kind not in "biuf":
            raise ArgumentError(NO_VALUES.format(name=name, given=shown(value)))
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite: see below
            value = nd.array(value)
    dtype = dtype_name(value.dtype)
    if "float" in dtype:
        values = cast(value, "float32") if dtype == "bfloat16" else value
        bad = int((~np.isfinite(values.asnumpy())).sum())
        if bad:
            raise ArgumentError(NOT_FINITE.format(name=name, elements=counted(bad, "element")))
    return value


def error_reason(error: Exception) -> str:
    """Return the one line of an MXNet error's message that says what failed."""
    text = getattr(error, "strerror", None) or str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wanted = [line for line in lines if "Error" in line or "Check failed" in line]
    return _WHERE.sub("", (wanted or lines or ["unknown"])[-1]).rstrip(".")
