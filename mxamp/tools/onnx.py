"""Export of models to ONNX in float32, checked in ONNX Runtime, and to OpenVINO."""

from importlib import import_module
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock

from ..convert import outputs
from ..convert.blocks import trace
from ..convert.models import converted_model
from ..convert.options import Options, check_names
from ..convert.outputs import Model, OutputError
from ..errors import ArgumentError, InstallError, StateError
from ..framework.arrays import cast
from ..framework.files import check_file_path, write_file
from ..framework.keywords import checked_call
from ..framework.machine import dtype_name, threads
from ..framework.wording import shown
from ..graph.edit import Params, UniqueNames, without_fused_operators
from ..graph.inspect import FLOATS, TensorType, tensors_of
from ..graph.ir import Graph, Output
from ..policy.active import suspended
from .debugging.measured import Data, arrays_in
from .onnx_operators import IR_VERSION, OPSET, OnnxCall, translate

#: The versions that setup.cfg has.
_VERSIONS = {"onnx": ">=1.13,<1.18", "onnxruntime": ">=1.16,<1.20", "openvino": ">=2024.4,<2027"}
NO_INPUTS = "inputs must be arrays by name, or of a call, as mx.nd.zeros(sizes), not {given}"
NOT_EXPORTED = "these operators can't be exported, and nothing was written: {operators}"
NOT_RUN = "ONNX Runtime can't run the model, and nothing was written: {why}"

#: The dtypes of OpenVINO's hints.
_PRECISIONS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@checked_call
def export_onnx(
    model: Union[Model, HybridBlock], path: Union[str, Path], inputs: Data, *, check: bool = True
) -> Tuple[OutputError, ...]:
    """Write a model as a float32 ONNX file, which ONNX Runtime and OpenVINO can run.

    ::

        model = mx.model.load_checkpoint("resnet", 0)
        amp.export_onnx(model, "resnet.onnx", [{"data": data}, {"data": larger_data}])
        amp.export_onnx(net, "net.onnx", data)  # a HybridBlock

    A 16-bit model, fused or not, is converted to float32 first.

    Parameters
    ----------
    model : HybridBlock, or (Symbol, arg_params, aux_params)
        The model, which stays unchanged.
    path : str or Path
        The file to write or replace.
    inputs : dict of str to array, for a block also NDArray or tuple, or a list of them
        Values, by name, for the inputs that are not parameters; you may leave out labels. For a
        block, the arguments of a call. If you pass a list, each size that differs between the
        elements of the list is variable in the exported model. All other sizes are fixed.
    check : bool, default True
        Run the exported model in ONNX Runtime on all `inputs` before it is written.

    Returns
    -------
    tuple of OutputError
        The errors of ONNX Runtime's outputs against MXNet's float32 outputs, as `compare_models`
        returns them, for each element of `inputs` in turn. Empty with `check=False`.

    Raises
    ------
    ArgumentError
        An input is missing, or operators can't be exported. The message names these operators.
    CheckError
        An output has a relative error above 0.01. `CheckError.errors` has the errors of all
        outputs.
    StateError
        ONNX Runtime can't run the exported model.
    InstallError
        onnx or ONNX Runtime is missing.
    """
    check_file_path(path)
    onnx, runtime = packages("onnx", "onnxruntime")
    calls = inputs if isinstance(inputs, list) else [inputs]
    with suspended():
        wide, examples, _ = float32_model(model, calls)
        content = exported(onnx, wide, examples)
        errors = [_errors(runtime, content, wide, given) for given in examples if check]
    write_file(path, content)
    return tuple(error for listed in errors for error in listed)


def packages(*names: str) -> List[Any]:
    """Import packages by name; if one is missing, raise an error that says how to install it."""
    try:
        return [import_module(name) for name in names]
    except ImportError as error:
        needed = " ".join(f'"{name}{_VERSIONS[name]}"' for name in names)
        raise InstallError(f"{error.name} is not installed: pip install {needed}") from None


def float32_model(model: Any, calls: Sequence[Any]) -> Tuple[Model, List[Params], List[str]]:
    """Convert a model and its example inputs to float32; return both, and argument names.

    The inputs are arrays by name, in float32 for other floats, with zeros for labels. The arguments
    are names; the inputs lack those that the block does not use.
    """
    is_block = isinstance(model, Block)
    if not calls or not all(isinstance(x, Mapping) or (is_block and arrays_in(x)) for x in calls):
        raise ArgumentError(NO_INPUTS.format(given=shown(calls[0] if calls else calls)))
    names: List[str] = []
    if is_block:
        traced, *_ = [trace(model, None if isinstance(x, Mapping) else x) for x in calls]
        params = traced.param_values()
        auxs = {name: params.pop(name) for name in traced.symbol.list_auxiliary_states()}
        names = [one.name for one in traced.inputs]
        calls = [x if isinstance(x, Mapping) else dict(zip(names, arrays_in(x))) for x in calls]
        unread = set(names).difference(traced.symbol.list_inputs())
        calls = [{n: x[n] for n in x if n not in unread} for x in calls]
        model = traced.symbol, params, auxs
    wide = converted_model(outputs.checked_model(model), Options.of("float32", notes=False))
    return wide, [_float32_inputs(wide, one) for one in calls], names


def _float32_inputs(model: Model, call: Mapping[str, Any]) -> Params:
    """Return a call's inputs by name: floats as float32, zeros for labels that are missing."""
    params = {**model[1], **model[2]}
    check_names([*call], [n for n in model[0].list_inputs() if n not in params], "input")
    given = {name: outputs.finite_input(name, value) for name, value in call.items()}
    given.update({n: cast(a, "float32") for n, a in given.items() if dtype_name(a.dtype) in FLOATS})
    return {**given, **outputs.zeros_for_missing(model[0], params, given)}


def exported(onnx: Any, model: Model, examples: List[Params]) -> bytes:
    """Return a model as the bytes of an ONNX file; raise if operators can't be exported."""
    make, params = onnx.helper, {**model[1], **model[2]}
    graph = without_fused_operators(Graph.from_symbol(model[0]))
    arrays = [{name: {**params, **one}[name] for name in graph.input_names} for one in examples]
    dtypes = {name: dtype_name(array.dtype) for name, array in arrays[0].items()}
    tensors = [tensors_of(graph, dtypes, {n: a.shape for n, a in one.items()}) for one in arrays]
    nodes, constants, names = _translated(onnx, graph, tensors[0])
    heads = dict(zip(map(UniqueNames(dtypes).make_unique, model[0].list_outputs()), graph.heads))
    nodes += [make.make_node("Identity", [names[head]], [name]) for name, head in heads.items()]
    used = {name for node in nodes for name in node.input}
    inputs = []
    for name in [name for name in dtypes if name in used]:
        if name in params:
            constants.append(onnx.numpy_helper.from_array(params[name].asnumpy(), name))
        else:
            inputs.append(_described(make, name, [one[name] for one in arrays]))
    found = [_described(make, name, [one[head] for one in tensors]) for name, head in heads.items()]
    content = make.make_graph(nodes, "mxnet", inputs, found, constants)
    version = {"opset_imports": [make.make_opsetid("", OPSET)], "ir_version": IR_VERSION}
    return bytes(make.make_model(content, **version).SerializeToString())


def _translated(
    onnx: Any, graph: Graph, tensors: Mapping[Output, TensorType]
) -> Tuple[List[Any], List[Any], Dict[Output, str]]:
    """Return the ONNX nodes and constants for a graph, and the names of their outputs.

    Raises `ArgumentError` for the operators that can't be exported, all in one message.
    """
    names: Dict[Output, str] = {}
    # The last output of each node that is read.
    last = dict(sorted([*graph.heads, *(edge for node in graph.nodes for edge in node.inputs)]))
    nodes: List[Any] = []
    constants: List[Any] = []
    refused = []
    for i, node in enumerate(graph.nodes):
        made = [node.name] * node.num_outputs
        if not node.is_variable:
            read, known = [names[e] for e in node.inputs], [tensors[e] for e in node.inputs]
            call = OnnxCall(onnx, f"{i}/{node.name}", node, read, known)
            try:
                made = translate(call, 1 + last.get(i, 0))
            except ArgumentError as error:
                refused.append(f"{node.op} ({error})")
            nodes += call.nodes
            constants += call.constants
        names.update({(i, k): name for k, name in enumerate(made)})
    if refused:
        raise ArgumentError(NOT_EXPORTED.format(operators="; ".join(dict.fromkeys(refused))))
    return nodes, constants, names


def _described(make: Any, name: str, tensors: Sequence[Any]) -> object:
    """Return the ONNX type of an input or output; sizes that vary in `tensors` are dynamic."""
    shapes = [one.shape for one in tensors]
    sizes = None if None in shapes else [n[0] if len({*n}) == 1 else None for n in zip(*shapes)]
    code = make.np_dtype_to_tensor_dtype(np.dtype(tensors[0].dtype))
    return make.make_tensor_value_info(name, code, sizes)


def _errors(runtime: Any, content: bytes, model: Model, given: Dict[str, Any]) -> List[OutputError]:
    """Return the errors of an ONNX model's outputs in ONNX Runtime; raise if one is too large."""
    expected = outputs.run_model(model, given, mx.cpu())
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only: MXNet's translations write unused constants
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        fed = {one.name: given[one.name].asnumpy() for one in session.get_inputs()}
        measured = [output.astype(np.float32) for output in session.run(None, fed)]
    except Exception as error:  # ONNX Runtime's errors have no common class
        raise StateError(NOT_RUN.format(why=" ".join(str(error).split()))) from error
    errors = list(map(outputs.output_error, model[0].list_outputs(), expected, measured))
    outputs.check_errors(errors, 0.01, "With `check=False` it is written all the same")
    return errors


class OpenVINO:
    """A block exported to OpenVINO, which takes the arguments of the original block.

    `calls` are arguments of calls, of all sizes that it takes. `precision` is the dtype that it
    computes in: bfloat16 only if that is asked for, on a CPU that has it.
    """

    def __init__(self, block: mx.gluon.HybridBlock, calls: Sequence[Any], dtype: str) -> None:
        onnx, openvino = packages("onnx", "openvino")
        model, examples, self._names = float32_model(block, calls)
        core, hint = openvino.Core(), "bf16" if dtype == "bfloat16" else "f32"
        read = core.read_model(exported(onnx, model, examples), b"")
        options = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads()}
        self._compiled = core.compile_model(read, "CPU", options)
        found = self._compiled.get_property("INFERENCE_PRECISION_HINT")
        self.precision = _PRECISIONS[found.to_string()]
        # Its inputs have several names, and lack arguments that the model does not read.
        aliases = (one.names for one in self._compiled.inputs)
        self._used = [next(name for name in names if name in self._names) for names in aliases]

    def __call__(self, *inputs: object) -> List[Any]:
        """Run the OpenVINO model on NDArrays; return its outputs as a list of NDArrays."""
        given = dict(zip(self._names, arrays_in(inputs)))
        found = self._compiled({name: given[name].asnumpy() for name in self._used})
        return [mx.nd.array(found[one]) for one in self._compiled.outputs]
