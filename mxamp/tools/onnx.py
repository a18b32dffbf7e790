"""Export to ONNX: MXNet's exporter on a graph that it can write, and a check of the result."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ..convert.options import check_names
from ..convert.outputs import Model, OutputError, finite_input, output_error, run_model
from ..errors import ArgumentError, InstallError, StateError
from ..framework.arrays import dtypes_of
from ..framework.files import check_file_path, write_file
from ..framework.patching import Patch, PatchSet
from ..framework.wording import shown
from ..graph.inspect import FLOATS, Tensor, tensors_of
from ..graph.ir import Graph, Node, Output
from ..policy.active import suspended
from ..policy.values import is_true

__all__ = ["export_onnx"]

#: The version of ONNX's operators that MXNet 1.9.1 writes.
OPSET, IR_VERSION = 13, 7
_LARGE = 1000  #: tensors from this size are made of bytes: one by one takes minutes
#: The largest relative error that the check accepts; rounding causes some hundredths.
TOLERANCE = 0.05
#: Operators that the exporter writes correctly in float16. All other operators run in float32
#: between casts: they get float32 constants, mix dtypes (BatchNorm), or lack a kernel in ONNX
#: Runtime.
_IN_FLOAT16 = frozenset(
    {
        "Activation", "Concat", "Convolution", "Deconvolution", "Dropout", "Flatten",
        "FullyConnected", "Pooling", "Reshape", "SliceChannel", "SwapAxis", "_copy", "batch_dot",
        "broadcast_add", "broadcast_mul", "broadcast_sub", "dot", "elemwise_add", "elemwise_mul",
        "elemwise_sub", "expand_dims", "slice", "slice_axis", "squeeze", "transpose",
    }
)  # fmt: skip

NO_ONNX = 'export_onnx needs onnx: pip install "onnx>=1.13,<1.18", or mxamp[onnx]'
NO_RUNTIME = (
    "check=True runs the model in ONNX Runtime: pip install onnxruntime, or mxamp[onnx]; "
    "check=False exports without it"
)
NO_INPUTS = "inputs must map the names of the model's inputs to arrays, not be {given}"
MISSING = "inputs without a value: {names}"
BFLOAT16 = (
    "{name!r} is bfloat16, which neither MXNet's exporter nor ONNX Runtime's kernels for CPUs "
    "know: convert the model to float16, or export the original"
)
NOT_EXPORTED = "MXNet's exporter can't write this model: {why}"
NOT_RUN = "ONNX Runtime can't run the model, and nothing was written: {why}"
NOT_THE_SAME = (
    "output {name!r} of the exported model has a relative error of {error:.3g} from MXNet's, and "
    "nothing was written: MXNet's exporter writes some operator wrongly. "
    "check=False writes it anyway"
)


def export_onnx(
    model: Model, path: Union[str, Path], inputs: Mapping[str, Any], *, check: bool = True
) -> Tuple[OutputError, ...]:
    """Write a model as ONNX, in float32 or converted to float16.

    ::

        model = mx.model.load_checkpoint("resnet", 0)
        low = amp.convert_model(*model, target_dtype="float16", cast_optional_params=True)
        amp.export_onnx(low, "resnet.onnx", {"data": batch})

    MXNet's own `mx.onnx.export_model` does not support `amp_cast`, writes float16 constants wrongly
    with current versions of onnx, and takes minutes for large models. `export_onnx` runs it, as
    opset 13, on a graph that it can write.

    Parameters
    ----------
    model : (Symbol, arg_params, aux_params)
        Stays unchanged.
    path : str or Path
        The file to write or replace.
    inputs : dict of str to array
        A value for each input that is no parameter. The exported model takes inputs of these
        shapes.
    check : bool, default True
        Run the exported model in ONNX Runtime on `inputs`, before it is written.

    Returns
    -------
    tuple of OutputError
        The errors of ONNX Runtime's outputs against MXNet's; empty with `check=False`.

    Raises
    ------
    ArgumentError
        An input is missing, an array is bfloat16, or MXNet's exporter lacks an operator.
    StateError
        ONNX Runtime can't run the exported model, or an output has a relative error above 0.05.
        Nothing is written.
    InstallError
        onnx or ONNX Runtime is missing.
    """
    check_file_path(path)
    onnx = _imported("onnx", NO_ONNX)
    runtime = _imported("onnxruntime", NO_RUNTIME) if check else None
    given = _checked_inputs(model, inputs)
    content = _exported(onnx, model, given)
    errors = _compared(runtime, content, model, given) if check else ()
    write_file(path, content)
    return errors


def _imported(name: str, missing: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise InstallError(missing) from None


def _checked_inputs(model: Model, inputs: Any) -> Dict[str, NDArray]:
    """Return the inputs as arrays in the order of the symbol's inputs."""
    if not isinstance(inputs, Mapping):
        raise ArgumentError(NO_INPUTS.format(given=shown(inputs)))
    symbol, args, auxs = model
    names = [name for name in symbol.list_inputs() if name not in args and name not in auxs]
    check_names(list(inputs), names, "input")
    missing = [name for name in names if name not in inputs]
    if missing:
        raise ArgumentError(MISSING.format(names=", ".join(missing)))
    given = {name: finite_input(name, inputs[name]) for name in names}
    for name, dtype in _dtypes({**args, **auxs, **given}).items():
        if dtype == "bfloat16":
            raise ArgumentError(BFLOAT16.format(name=name))
    return given


def _dtypes(arrays: Mapping[str, NDArray]) -> Dict[str, str]:
    return dict(zip(arrays, dtypes_of(list(arrays.values()))))


# ---------------------------------------------------------------------- the graph


def exportable(graph: Graph, tensors: Mapping[Output, Tensor], outputs: Sequence[str]) -> Graph:
    """Return a graph that MXNet's exporter can write, with outputs of these names.

    `amp_cast` becomes `Cast`. Operators that can't be written in float16 run in float32 between
    casts, with results rounded to float16 as MXNet's are.
    """
    nodes: List[Node] = []
    places: Dict[Output, Output] = {}

    def cast(name: str, source: Output, dtype: str) -> Output:
        nodes.append(Node("Cast", name, {"dtype": dtype}, [source]))
        return len(nodes) - 1, 0

    for i, node in enumerate(graph.nodes):
        inputs = [places[entry] for entry in node.inputs]
        if node.op == "amp_cast":
            places[i, 0] = cast(node.name, inputs[0], node.attrs["dtype"])
            continue
        widened = not node.is_variable and _in_float32(node, tensors)
        if widened:
            inputs = [
                cast(f"{node.name}_in{k}", entry, "float32")
                if tensors[old].dtype == "float16"
                else entry
                for k, (old, entry) in enumerate(zip(node.inputs, inputs))
            ]
        nodes.append(replace(node, inputs=inputs))
        here = len(nodes) - 1
        for k in range(node.num_outputs):
            places[i, k] = here, k
            if widened and tensors[i, k].dtype == "float16":
                places[i, k] = cast(f"{node.name}_out{k}", (here, k), "float16")
    heads = []
    for name, head in zip(outputs, graph.heads):
        # The exporter writes outputs in the order of these nodes, under their names.
        nodes.append(Node("_copy", name, {}, [places[head]]))
        heads.append((len(nodes) - 1, 0))
    return Graph(nodes, heads, graph.attrs)


def _in_float32(node: Node, tensors: Mapping[Output, Tensor]) -> bool:
    """Return whether a node with float16 inputs has to run in float32."""
    dtypes = {tensors[entry].dtype for entry in node.inputs} & FLOATS
    return "float16" in dtypes and (len(dtypes) > 1 or node.operator not in _IN_FLOAT16)


def _with_gamma(graph: Graph, params: Mapping[str, NDArray]) -> Dict[str, NDArray]:
    """Return the parameters with ones for gammas that a BatchNorm ignores but ONNX would read."""
    found = dict(params)
    for node in graph.nodes:
        if node.op == "BatchNorm" and is_true(node.attrs.get("fix_gamma", "True")):
            name = graph.nodes[node.inputs[1][0]].name
            if name in found:
                found[name] = mx.nd.ones_like(found[name])
    return found


# ---------------------------------------------------------------------- the export


def _exported(onnx: Any, model: Model, given: Mapping[str, NDArray]) -> bytes:
    """Return the content of the ONNX file."""
    symbol, args, auxs = model
    graph = Graph.from_symbol(symbol)
    dtypes = _dtypes({**args, **auxs, **given})
    shapes = {name: array.shape for name, array in {**args, **auxs, **given}.items()}
    with suspended(), tempfile.TemporaryDirectory() as folder:
        params = _with_gamma(graph, {**args, **auxs})
        ready = exportable(
            graph, tensors_of(graph, dtypes, shapes), symbol.list_outputs()
        ).to_symbol()
        file = str(Path(folder) / "model.onnx")
        patches = PatchSet(
            [
                Patch(onnx.defs, "onnx_opset_version", lambda _: lambda: OPSET),
                # It checks against the newest operators; the model is checked below.
                Patch(onnx.checker, "check_graph", lambda _: lambda graph: None),
                Patch(onnx.helper, "make_tensor", lambda stock: _tensor_maker(onnx, stock)),
            ]
        )
        patches.open()
        try:
            mx.onnx.export_model(
                ready,
                params,
                [array.shape for array in given.values()],
                [np.dtype(dtypes[name]) for name in given],
                file,
            )
        except (AssertionError, AttributeError, KeyError, NotImplementedError, ValueError) as error:
            raise ArgumentError(NOT_EXPORTED.format(why=error)) from error
        finally:
            patches.close()
        proto = onnx.load(file)
        proto.ir_version = IR_VERSION
        # ONNX Runtime folds parameters only where they are not inputs too.
        constants = {tensor.name for tensor in proto.graph.initializer}
        inputs = [one for one in proto.graph.input if one.name not in constants]
        del proto.graph.input[:]
        proto.graph.input.extend(inputs)
        onnx.checker.check_model(proto)
        return bytes(proto.SerializeToString())


def _tensor_maker(onnx: Any, stock: Any) -> Any:
    """Return a replacement of `onnx.helper.make_tensor` that is fast and supports float16."""

    def make_tensor(name: str, data_type: int, dims: Any, vals: Any, raw: bool = False) -> Any:
        half = data_type == onnx.TensorProto.FLOAT16
        if raw or not (half or np.size(vals) >= _LARGE):
            return stock(name, data_type, dims, vals, raw)
        values = np.asarray(vals)
        if half:
            # The exporter gives constants as bits, as old versions of onnx did, weights as values.
            bits = values.dtype.kind in "iu"
            values = values.astype(np.uint16).view(np.float16) if bits else values
        dtype = onnx.helper.tensor_dtype_to_np_dtype(data_type)
        return onnx.numpy_helper.from_array(values.astype(dtype).reshape(dims), name)

    return make_tensor


# ---------------------------------------------------------------------- the check


def _compared(
    runtime: Any, content: bytes, model: Model, given: Mapping[str, NDArray]
) -> Tuple[OutputError, ...]:
    """Return the errors of the exported model's outputs; raise if rounding can't explain them."""
    wanted = run_model(model, given, mx.cpu())
    try:
        found = _run(runtime, content, given)
    except Exception as error:  # ONNX Runtime's errors have no common class
        raise StateError(NOT_RUN.format(why=error)) from error
    names = model[0].list_outputs()
    errors = tuple(output_error(name, a, b) for name, a, b in zip(names, wanted, found))
    for one in errors:
        if one.lost or not one.relative <= TOLERANCE:
            raise StateError(NOT_THE_SAME.format(name=one.name, error=one.relative))
    return errors


def _run(runtime: Any, content: bytes, given: Mapping[str, NDArray]) -> Sequence[Any]:
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    fed = {name: array.asnumpy() for name, array in given.items()}
    return [output.astype(np.float32) for output in session.run(None, fed)]
