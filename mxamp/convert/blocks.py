"""Gluon blocks: trace a block's graph, and make a new block that runs a converted graph."""

import inspect
import logging
import warnings
from contextlib import nullcontext
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import mxnet as mx
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.context import Context
from mxnet.gluon import Block, HybridBlock, Parameter, SymbolBlock
from mxnet.gluon.block import _flatten, _regroup
from mxnet.gluon.rnn.rnn_layer import _RNNLayer
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import AmpError, ArgumentError, StateError
from ..framework.arrays import cast, dtypes_of, map_arrays
from ..framework.machine import BFLOAT16, DTYPE_CODES, device_kind
from ..framework.wording import shortened, shown
from ..patches.cached_op import Source, install_policy_op
from ..policy.active import suspended
from ..policy.decision import CASTABLE
from .options import Options
from .outputs import error_reason
from .saved import check_prefix, model_files, write_model
from .symbols import Converted

NOT_RUN = "block {name!r} has no graph yet: hybridize it and run it once, or give example_inputs"
NO_EXAMPLE = "example_inputs must be an NDArray, or the arguments of one call, not {given}"
NOT_ON_EXAMPLE = "block {name!r} ({takes}) does not run on a call with arrays of shape {shapes}"
OVERRIDES = (
    "{name!r} has its own __call__ or forward, which can't be traced ({why}): convert its children"
)
OWN_CALL = "%r has its own __call__ or forward: give example_inputs, to convert what that does too"
FROZEN = "block %r was converted with cast_optional_params or fuse: it does not train %s"

logger = logging.getLogger("mxamp")

Examples = Union[None, NDArray, Sequence[Any]]


class TracedBlock:
    """A traced block: its symbol and parameters, and how its arguments and outputs are nested.

    `arguments` are those of the call that the block was traced on, if any.
    """

    def __init__(self, block: HybridBlock, arguments: Tuple[Any, ...] = ()) -> None:
        self.block, (self.inputs, self.symbol) = block, block._cached_graph
        arrays = [array for array in _flatten(arguments, "input")[0] if array is not None]
        names = [one.name for one in self.inputs]
        self._example_dtypes = dict(zip(names, dtypes_of(arrays)))
        #: The shapes of the call's arguments by input name.
        self.example_shapes = {name: array.shape for name, array in zip(names, arrays)}
        self.formats = block._in_format, block._out_format
        used = set(self.symbol.list_inputs())
        self.params: Dict[str, Parameter] = {
            name: param for name, param in block.collect_params().items() if name in used
        }

    def input_dtypes(self, overrides: Optional[Mapping[str, Any]]) -> Dict[str, Any]:
        """Return the dtypes of the graph's inputs in the traced call, with `overrides` applied.

        Inputs that the graph does not read are left out.
        """
        unread = {one.name for one in self.inputs} - set(self.symbol.list_inputs())
        known = {n: dtype for n, dtype in self._example_dtypes.items() if dtype in DTYPE_CODES}
        dtypes = {**known, **(overrides or {})}
        return {name: dtype for name, dtype in dtypes.items() if name not in unread}

    def param_values(self) -> Dict[str, NDArray]:
        """Return the parameters' values on the CPU by name; those on the CPU are not copied."""
        for name, param in self.params.items():
            if param._data is None:
                raise StateError(f"parameter {name!r} has no value: initialize the block, run it")
        return {name: _cpu_value(param) for name, param in self.params.items()}


def _cpu_value(param: Parameter) -> NDArray:
    """Return the value of a parameter on the CPU, averaged if it is on several devices."""
    arrays = param._data
    if arrays[0].stype != "default":
        return param._reduce()
    if len(arrays) == 1 and device_kind(arrays[0].context) == "cpu":
        return arrays[0]
    # Not param._reduce(), which can't copy bfloat16 under NumPy semantics.
    with suspended():
        copies = [array.as_nd_ndarray().copyto(mx.cpu()) for array in arrays]
        mean = mx.nd.add_n(*copies) / len(copies)
    return mean.as_np_ndarray() if isinstance(arrays[0], mx.np.ndarray) else mean


def trace(block: Block, example_inputs: Examples = None) -> TracedBlock:
    """Return a block's graph and parameters, from its cached graph or a call on `example_inputs`.

    The block keeps its cached graph, and so does a SymbolBlock its only one. A first call with
    the example initializes parameters of deferred shape.
    """
    if not isinstance(block, HybridBlock):
        raise ArgumentError(f"block must be a HybridBlock, not {shown(block)}")
    arguments = None if example_inputs is None else _checked_arguments(example_inputs)
    if arguments is None or (block._cached_graph and isinstance(block, SymbolBlock)):
        if not block._cached_graph:
            raise StateError(NOT_RUN.format(name=block.name))
        return TracedBlock(block, arguments or ())
    try:
        if any(param._data is None for param in block.collect_params().values()):
            block(*arguments)
        return _traced_on(block, arguments)
    except (AttributeError, MXNetError, RuntimeError, TypeError, ValueError) as error:
        raise _example_error(block, arguments, error) from error


def _traced_on(block: HybridBlock, arguments: Tuple[Any, ...]) -> TracedBlock:
    """Trace a block on a call with `arguments`, without changing its own cached graph."""
    kept = dict(vars(block))

    def call(_operators: object, *inputs: Any, **_params: object) -> object:
        del vars(block)["hybrid_forward"], vars(block)["name_scope"]
        return block(*inputs)

    try:
        block._cached_graph = ()
        if isinstance(block, _RNNLayer):
            # As its own `__call__`, which reads later whether the call left out the states.
            block.skip_states = len(arguments) == 1
            arguments = _with_states_as_list(block, *arguments)
        if _has_own_call(block):  # `_get_graph` calls `hybrid_forward` alone
            vars(block).update(hybrid_forward=call, name_scope=nullcontext)
        block._get_graph(*arguments)
        return TracedBlock(block, arguments)
    finally:
        block.__dict__ = kept


def _has_own_call(block: Block) -> bool:
    """Return whether a block's class overrides MXNet's `__call__` or `forward`."""
    methods = type(block).__call__, type(block).forward
    return not all(one.__module__.startswith(("mxnet.", "mxamp.")) for one in methods)


def _example_error(block: HybridBlock, arguments: Tuple[Any, ...], error: Exception) -> AmpError:
    """Return the error to raise if a block can't run, or be traced, on the example inputs."""
    if type(error) is RuntimeError:  # of parameters that were not initialized
        return StateError(f"block {block.name!r} does not run: {error}")
    if _has_own_call(block):
        return ArgumentError(OVERRIDES.format(name=block.name, why=error_reason(error)))
    arrays = [one for one in _flatten(arguments, "input")[0] if one is not None]
    shapes = " and ".join(str(array.shape) for array in arrays)
    named = [*inspect.signature(block.hybrid_forward).parameters][1:]  # after F
    takes = ", ".join(name for name in named if name not in block._reg_params)
    message = NOT_ON_EXAMPLE.format(name=block.name, takes=takes, shapes=shapes)
    return ArgumentError(f"{message}: {error_reason(error)}")


def _checked_arguments(example_inputs: Any) -> Tuple[Any, ...]:
    """Return `example_inputs` as a tuple of a call's arguments; raise unless they hold arrays."""
    arguments = (example_inputs,) if isinstance(example_inputs, NDArray) else example_inputs
    arrays: List[NDArray] = []
    others: List[Any] = []
    map_arrays(arguments, arrays.append, others.append)
    if not arrays or any(one is not None for one in others) or isinstance(arguments, dict):
        raise ArgumentError(NO_EXAMPLE.format(given=shown(example_inputs)))
    return tuple(arguments)


def _with_states_as_list(
    layer: _RNNLayer, inputs: NDArray, states: object = None, *lengths: object
) -> Tuple[Any, ...]:
    """Return a recurrent layer's call arguments with the states as a list, created if missing."""
    if states is None:
        batch_size = inputs.shape[layer._layout.find("N")]
        states = layer.begin_state(batch_size, ctx=inputs.context, dtype=inputs.dtype)
    return (inputs, [states] if isinstance(states, NDArray) else states, *lengths)


class ConvertedBlock(SymbolBlock):
    """A Gluon block that runs a converted graph, and exports it with its casts.

    If it keeps the original graph, it runs that one, with casts by the shapes of a call's inputs.
    """

    _layer: Optional[_RNNLayer]

    def __init__(
        self, traced: TracedBlock, converted: Converted, options: Options, contexts: List[Context]
    ) -> None:
        """Initialize a block that runs a converted symbol and is called as the traced block is.

        The values are copied to `contexts`. Parameters keep names, `lr_mult`, `wd_mult`, `grad_req`
        and `grad_stype`, but those cast offline get no gradients. Nor do those of fused operators.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SymbolBlock's type inference is of no use here
            super().__init__(converted.symbol, traced.inputs)
        # MXNet's gradients of fused operators are wrong.
        self._is_fused, self._has_warned = options.fuse, False
        frozen = converted.params if options.fuse else converted.offline
        #: The parameters that train in the original block only.
        self._frozen = [n for n, p in traced.params.items() if p.grad_req != "null" and n in frozen]
        self._source: Optional[Source] = None
        # With 16-bit dtypes at its boundary, the source graph is another model.
        if options.keep_io_types or not options.policy.lowers:
            self._source = Source(converted.graph, converted.policy, frozenset(converted.offline))
        dtypes = {} if options.keep_io_types else converted.data
        #: The dtypes of inputs that the block casts, or None.
        self._input_dtypes = [dtypes.get(one.name) for one in traced.inputs]
        block = traced.block
        #: Whether nothing is known of a call but its arrays: it is taken as MXNet's SymbolBlock is.
        self._is_flat = _has_own_call(block) and not traced.example_shapes
        if self._is_flat:
            logger.warning(OWN_CALL, block.name)
        # A user's model may have its own begin_state alone.
        states = {n: getattr(block, n) for n in ("begin_state", "state_info") if hasattr(block, n)}
        layer = block if isinstance(block, _RNNLayer) else getattr(block, "_layer", None)
        # Past Block.__setattr__, which would make a layer a child, and register a parameter.
        self.__dict__.update(states, _layer=layer)
        # MXNet flattens the inputs and outputs of a SymbolBlock; the formats restore their nesting.
        in_format, self._out_format = traced.formats
        self._in_format = self._in_format if self._is_flat else in_format
        for name, param in self.collect_params().items():
            value = converted.params[name]
            param.cast(value.dtype)
            original = traced.params.get(name, param)
            param.lr_mult, param.wd_mult = original.lr_mult, original.wd_mult
            param._grad_stype = original._grad_stype
            param.grad_req = "null" if name in frozen else original.grad_req
            # Last, as it makes the gradients: MXNet can't make bfloat16 ones under NumPy semantics,
            # and an Embedding with `sparse_grad` writes to sparse ones only.
            param._load_init(value, contexts)
        # Under other flags, fused operators pack their weights anew at each call.
        fused_flags = {"static_alloc": True, "static_shape": True}
        self.hybridize(**fused_flags if options.fuse else dict(block._flags[:2]))

    def __call__(self, x: Any, *args: Any) -> Any:
        """Call the block; a recurrent layer may be called without states, as before conversion."""
        given = (x, *args) if self._layer is None else _with_states_as_list(self._layer, x, *args)
        if self._is_flat:
            given = tuple(one for one in _flatten(given, "input")[0] if one is not None)
        return super().__call__(*given)

    def export(self, path: str, epoch: int = 0, remove_amp_cast: bool = False) -> None:
        """Write the graph with its casts, and all parameters, to a symbol and a parameter file.

        Both files are replaced together, as by `convert_files`. `remove_amp_cast` is ignored.
        """
        symbol = self._cached_graph[1]
        values = {n: _cpu_value(p).as_nd_ndarray() for n, p in self.collect_params().items()}
        auxs = {name: values.pop(name) for name in symbol.list_auxiliary_states()}
        check_prefix(path)
        write_model((symbol, values, auxs), model_files(path, epoch))

    def _collect_params_with_prefix(self, prefix: str = "") -> Dict[str, Parameter]:
        """Return the parameters by the names that `save_parameters` writes.

        A SymbolBlock saves them without their common prefix, and does not find them again.
        """
        before = f"{prefix}." if prefix else ""
        return {before + name: param for name, param in self.params.items()}

    def forward(self, x: Any, *args: Any) -> Any:
        """Run the block; it takes inputs in float16, bfloat16 or float32, and casts them."""
        if any(self._input_dtypes):
            flat, form = _flatten((x, *args), "input")
            dtypes = iter(self._input_dtypes)
            x, *args = _regroup([_cast_input(x, next(dtypes, None)) for x in flat], form)
        return super().forward(x, *args)

    def _call_cached_op(self, *args: object) -> object:
        if autograd.is_recording():
            frozen = [name for name in self._frozen if self.params[name].grad_req == "null"]
            if frozen and autograd.is_training() and not self._has_warned:
                self._has_warned = True
                logger.warning(FROZEN, self.name, shortened(frozen))
            if self._is_fused:
                with autograd.pause():
                    return self._call_cached_op(*args)
        if self._source is not None:
            install_policy_op(self, args, self._source)
        return super()._call_cached_op(*args)


def _cast_input(value: Any, dtype: Optional[str]) -> object:
    """Return an array or symbol cast to `dtype`, or unchanged if either dtype can't be cast."""
    if value is None or dtype not in CASTABLE:
        return value
    if isinstance(value, Symbol):
        return mx.sym.amp_cast(value, dtype=BFLOAT16 if dtype == "bfloat16" else dtype)
    if dtypes_of([value])[0] not in CASTABLE:
        return value
    return cast(value, dtype, isinstance(value, mx.np.ndarray))
