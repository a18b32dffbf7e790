"""Export to ONNX in float32, checked in ONNX Runtime before the file is written."""

from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock
from mxnet.ndarray.ndarray import NDArray

from ..convert import outputs
from ..convert.blocks import trace
from ..convert.models import convert_model
from ..convert.options import check_names
from ..convert.outputs import Model, OutputError
from ..errors import ArgumentError, CheckError, InstallError, StateError
from ..framework.arrays import cast
from ..framework.files import check_file_path, write_file
from ..framework.keywords import checked_call
from ..framework.machine import dtype_name
from ..framework.wording import shown
from ..graph.edit import Edit, Names
from ..graph.inspect import FLOATS, tensors_of
from ..graph.ir import Graph, Output
from ..policy.active import suspended
from .debugging.measured import arrays_in
from .onnx_operators import IR_VERSION, OPSET, Call, translate

__all__ = ["export_onnx"]

#: The largest relative error that the check accepts.
TOLERANCE = 0.01

MISSING = '{name} is not installed: pip install "onnx<1.18" onnxruntime, or mxamp[onnx]'
NO_INPUTS = (
    "inputs must be values, not {given}: a dict of arrays by input name, for a block also the "
    "arguments of a call, or a list of them. For sizes, give mx.nd.zeros(sizes)"
)
NOT_EXPORTED = "these operators can't be exported, and nothing was written: {operators}"
NOT_RUN = "ONNX Runtime can't run the model, and nothing was written: {why}"
WRONG = "output {name!r} has a relative error of {error:.3g}: not written; check=False writes it"


@checked_call
def export_onnx(
    model: Union[Model, HybridBlock],
    path: Union[str, Path],
    inputs: Any,
    *,
    check: bool = True,
) -> Tuple[OutputError, ...]:
    """Write a model as ONNX, in float32, for ONNX Runtime, OpenVINO and others.

    ::

        model = mx.model.load_checkpoint("resnet", 0)
        amp.export_onnx(model, "resnet.onnx", [{"data": data}, {"data": larger_data}])
        amp.export_onnx(net, "net.onnx", data)  # a HybridBlock

    A model in half precision, fused or not, is converted to float32 first.

    Parameters
    ----------
    model : HybridBlock, or (Symbol, arg_params, aux_params)
        Stays unchanged.
    path : str or Path
        The file to write or replace.
    inputs : dict of str to array, for a block also NDArray or tuple, or a list of them
        Values for the inputs that are no parameters, by name; labels may be left out. For a block,
        the arguments of a call. In a list, sizes that differ between the shapes of an input are
        variable in the exported model. All other sizes are fixed.
    check : bool, default True
        Run the exported model in ONNX Runtime on all `inputs` before it is written.

    Returns
    -------
    tuple of OutputError
        The errors against MXNet's outputs in float32, dict by dict, as of `compare_models`; empty
        with `check=False`.

    Raises
    ------
    ArgumentError
        An input is missing, or operators can't be exported: all of them are named.
    CheckError
        An output has a relative error above 0.01. A `StateError` that holds the `errors` of all.
    StateError
        ONNX Runtime can't run the result.
    InstallError
        onnx or ONNX Runtime is missing.
    """
    check_file_path(path)
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise InstallError(MISSING.format(name=error.name)) from None
    # A tuple of arrays is one call.
    several = isinstance(inputs, (list, tuple)) and all(isinstance(x, Mapping) for x in inputs)
    listed = list(inputs) if several or isinstance(inputs, list) else [inputs]
    with suspended():
        if isinstance(model, HybridBlock):
            model, listed = model_of(model, listed)
        wide = convert_model(*outputs.checked_model(model), target_dtype="float32")
        examples = checked_examples(wide, listed)
        content = exported(onnx, wide, examples)
        errors = [_errors(onnxruntime, content, wide, given) for given in examples if check]
    write_file(path, content)
    return tuple(error for listed in errors for error in listed)


def model_of(block: HybridBlock, calls: Sequence[Any]) -> Tuple[Model, List[Mapping[str, Any]]]:
    """Return a block as a saved model, and the arguments of calls as inputs by name."""
    is_named = calls and isinstance(calls[0], Mapping)
    if not is_named and not all(map(arrays_in, calls or [None])):
        raise ArgumentError(NO_INPUTS.format(given=shown(calls[0] if calls else calls)))
    traced = trace(block, None if is_named else calls[0])
    values, used = traced.param_values(), traced.symbol.list_inputs()
    auxs = {name: values.pop(name) for name in traced.symbol.list_auxiliary_states()}
    names = [one.name for one in traced.inputs]
    named: Sequence[Any] = (
        calls if is_named else [dict(zip(names, arrays_in(call))) for call in calls]
    )
    listed: List[Any] = [{n: array for n, array in one.items() if n in used} for one in named]
    return (traced.symbol, values, auxs), listed


def checked_examples(model: Model, listed: Sequence[Any]) -> List[Dict[str, NDArray]]:
    """Return the inputs as arrays, with float32 for other floats and zeros for labels."""
    if not (listed and all(isinstance(one, Mapping) for one in listed)):
        raise ArgumentError(NO_INPUTS.format(given=shown(listed[0] if listed else listed)))
    params, examples = {**model[1], **model[2]}, []
    for one in listed:
        check_names([*one], [n for n in model[0].list_inputs() if n not in params], "input")
        given = {name: outputs.finite_input(name, value) for name, value in one.items()}
        floats = {n: a for n, a in given.items() if dtype_name(a.dtype) in FLOATS}
        given.update({name: cast(array, "float32") for name, array in floats.items()})
        examples.append({**given, **outputs.zeros_for_missing(model[0], {**params, **given})})
    return examples


def _without_fusion(graph: Graph) -> Graph:
    """Return the graph with oneDNN's fused operators taken apart."""
    edit = Edit(graph, {})
    for i, node in enumerate(graph.nodes):
        if node.op.startswith("_sg_mkldnn"):
            made: Dict[Output, Output] = {}
            given = iter(node.inputs)
            for j, part in enumerate(node.subgraphs[0].nodes):
                read = part.with_inputs([made[entry] for entry in part.inputs])
                made[j, 0] = next(given) if part.is_variable else edit.add_node(read)
            edit.redirect((i, 0), made[node.subgraphs[0].heads[0]])
    return edit.applied()


def exported(onnx: Any, model: Model, examples: List[Dict[str, NDArray]]) -> bytes:
    """Return the content of the ONNX file; raise, naming all operators that can't be exported."""
    make, params = onnx.helper, {**model[1], **model[2]}
    graph, given = _without_fusion(Graph.from_symbol(model[0])), {**params, **examples[0]}
    arrays = {name: given[name] for name in graph.input_names}
    dtypes = {name: dtype_name(array.dtype) for name, array in arrays.items()}
    tensors, *others = (
        tensors_of(graph, dtypes, {name: {**params, **one}[name].shape for name in arrays})
        for one in examples
    )
    names: Dict[Output, str] = {}
    nodes, constants, refused = [], [], []
    for i, node in enumerate(graph.nodes):
        made = [node.name] * node.num_outputs
        if not node.is_variable:
            read, known = [names[e] for e in node.inputs], [tensors[e] for e in node.inputs]
            call = Call(onnx, f"{i}/{node.name}", node, read, known)
            try:
                made = translate(call)
            except ArgumentError as error:
                refused.append(f"{node.op} ({error})")
            nodes += call.nodes
            constants += call.constants
        names.update({(i, k): name for k, name in enumerate(made)})
    if refused:
        raise ArgumentError(NOT_EXPORTED.format(operators="; ".join(dict.fromkeys(refused))))

    def described(name: str, dtype: str, shape: Any = None) -> Any:
        code = make.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return make.make_tensor_value_info(name, code, shape)

    heads = dict(zip(map(Names(arrays).make_unique, model[0].list_outputs()), graph.heads))
    nodes += [make.make_node("Identity", [names[head]], [name]) for name, head in heads.items()]
    used, inputs = {name for node in nodes for name in node.input}, []
    for name, array in arrays.items():
        if name in used and name in params:
            constants.append(onnx.numpy_helper.from_array(array.asnumpy(), name))
        elif name in used:
            shape = _common_sizes(example[name].shape for example in examples)
            inputs.append(described(name, dtypes[name], shape))
    found = [
        described(
            name, tensors[head].dtype, _common_sizes(one[head].shape for one in (tensors, *others))
        )
        for name, head in heads.items()
    ]
    content = make.make_graph(nodes, "mxnet", inputs, found, constants)
    opsets = [make.make_opsetid("", OPSET)]
    proto = make.make_model(content, opset_imports=opsets, ir_version=IR_VERSION)
    return bytes(proto.SerializeToString())


def _common_sizes(shapes: Iterable[Any]) -> Optional[List[Optional[int]]]:
    """Return the sizes that all shapes share, with None for others; None if a shape is unknown."""
    known = list(shapes)
    if None in known:
        return None
    return [sizes[0] if len({*sizes}) == 1 else None for sizes in zip(*known)]


def _errors(runtime: Any, content: bytes, model: Model, given: Dict[str, Any]) -> List[OutputError]:
    """Return the errors of the outputs in ONNX Runtime; raise if one is too large."""
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only: MXNet's translations write unused constants
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        fed = {one.name: given[one.name].asnumpy() for one in session.get_inputs()}
        measured = [output.astype(np.float32) for output in session.run(None, fed)]
    except Exception as error:  # ONNX Runtime's errors have no common class
        raise StateError(NOT_RUN.format(why=" ".join(str(error).split()))) from error
    expected = outputs.run_model(model, given, mx.cpu())
    errors = list(map(outputs.output_error, model[0].list_outputs(), expected, measured))
    for one in errors:
        if one.lost or not one.relative <= TOLERANCE:
            raise CheckError(WRONG.format(name=one.name, error=one.relative), errors)
    return errors
