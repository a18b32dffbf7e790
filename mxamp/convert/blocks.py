"""Gluon blocks: the graph of a block, and a new block around a converted graph."""

import logging
import warnings
from typing import Any, Collection, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import mxnet as mx
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.context import Context, current_context
from mxnet.gluon import HybridBlock, Parameter, SymbolBlock
from mxnet.gluon.block import _flatten, _regroup
from mxnet.gluon.rnn.rnn_layer import _RNNLayer
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError, StateError
from ..framework.arrays import cast, dtypes_of, map_arrays
from ..framework.machine import BFLOAT16, DTYPE_CODES, default_device, device_kind
from ..framework.wording import shortened, shown
from ..patches.cached_op import Source, install_policy_op
from ..policy.active import suspended
from ..policy.decision import CASTABLE
from .outputs import error_reason
from .saved import files_to_write, write_model

NOT_RUN = (
    "block {name!r} has no graph yet: call block.hybridize() and run it once on an example input, "
    "or give that input as example_inputs"
)
NO_EXAMPLE = (
    "example_inputs must be an NDArray, such as mx.nd.ones((1, 3, 224, 224)), or a list or tuple "
    "of the arguments of one call, not {given}"
)
NOT_ON_EXAMPLE = "block {name!r} does not run on example_inputs of shape {shapes}: {why}"
OVERRIDES = (
    "block {name!r} overrides forward, and only hybrid_forward with the arguments of a call can be "
    "traced: convert the blocks inside it, or move what forward does to hybrid_forward"
)
ONE_CALL = "; example_inputs holds the arguments of one call"
NO_GPU = (
    "ctx is {given}, and MXNet sees no GPU here: leave ctx out. To convert for GPUs here, give "
    "policy=Policy.default('float16', 'gpu')"
)
FROZEN = (
    "block %r was converted for inference: these parameters get no gradients: %s. To train it, "
    "convert it without cast_optional_params and fuse"
)
NO_VALUE = "parameter {name!r} has no value yet: initialize the block and run it once"

logger = logging.getLogger("mxamp")

Examples = Union[None, NDArray, Sequence[Any]]

_TRACED_ATTRIBUTES = ("_cached_graph", "_in_format", "_out_format")


class TracedBlock:
    """A traced block's symbol, with its input variables, parameters and nesting formats.

    `arguments` are those of the call that the block was traced on, if any.
    """

    def __init__(self, block: HybridBlock, arguments: Tuple[Any, ...] = ()) -> None:
        self.inputs, self.symbol = block._cached_graph
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

    def input_dtypes(self, overrides: Any) -> Any:
        """Return the dtypes of the call's arguments by input name, updated by `overrides`.

        Inputs that the graph does not read are left out. `overrides` that are no mapping are
        returned as they are: `convert` raises for them.
        """
        if overrides is not None and not isinstance(overrides, Mapping):
            return overrides
        unread = {one.name for one in self.inputs} - set(self.symbol.list_inputs())
        known = {n: dtype for n, dtype in self._example_dtypes.items() if dtype in DTYPE_CODES}
        dtypes = {**known, **(overrides or {})}
        return {name: dtype for name, dtype in dtypes.items() if name not in unread}

    def param_values(self) -> Dict[str, NDArray]:
        """Return the parameters' values on the CPU, by name; those already there aren't copied."""
        for name, param in self.params.items():
            if param._data is None:
                raise StateError(NO_VALUE.format(name=name))
        return {name: _cpu_value(param) for name, param in self.params.items()}


def _cpu_value(param: Parameter) -> NDArray:
    """Return a parameter's value on the CPU: its own array, or the mean over its devices."""
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


def trace(block: HybridBlock, example_inputs: Examples = None) -> TracedBlock:
    """Return the graph of a block: its cached one, or one traced on `example_inputs`.

    The block keeps its cached graph, and so does a SymbolBlock its only one. A first call with
    the example initializes parameters of deferred shape.
    """
    if not isinstance(block, HybridBlock):
        hint = "; convert_symbol takes symbols" if isinstance(block, Symbol) else ""
        raise ArgumentError(f"block must be a HybridBlock, not {shown(block)}{hint}")
    arguments = None if example_inputs is None else _checked_arguments(example_inputs)
    if arguments is None or (block._cached_graph and isinstance(block, SymbolBlock)):
        if not block._cached_graph:
            raise StateError(NOT_RUN.format(name=block.name))
        return TracedBlock(block)
    shapes = [one.shape for one in _flatten(arguments, "input")[0] if one is not None]
    if any(p._data is None for p in block.collect_params().values()):
        try:
            block(*arguments)
        except (MXNetError, ValueError) as error:  # ValueError: while it infers a deferred shape
            raise _example_error(block.name, shapes, error) from None
        except RuntimeError as error:  # of parameters that were not initialized
            raise StateError(f"block {block.name!r} does not run: {error}") from None
        except TypeError as error:
            raise _example_error(block.name, shapes, error, ONE_CALL) from error
    kept = {name: getattr(block, name) for name in _TRACED_ATTRIBUTES}
    try:
        block._cached_graph = ()
        called = _forward_arguments(block, arguments)
        block._get_graph(*called)
        return TracedBlock(block, called)
    except (TypeError, NotImplementedError) as error:
        if not type(block).forward.__module__.startswith("mxnet."):
            raise ArgumentError(OVERRIDES.format(name=block.name)) from error
        raise _example_error(block.name, shapes, error, ONE_CALL) from error
    finally:
        for name, value in kept.items():
            setattr(block, name, value)


def _example_error(
    name: str, shapes: Iterable[Any], error: Exception, hint: str = ""
) -> ArgumentError:
    """Return the error for example inputs that the block `name` does not run on."""
    given = " and ".join(map(str, shapes))
    why = error_reason(error)
    return ArgumentError(NOT_ON_EXAMPLE.format(name=name, shapes=given, why=why) + hint)


def _checked_arguments(example_inputs: Any) -> Tuple[Any, ...]:
    """Return `example_inputs` as the arguments of one call; raise unless they hold arrays."""
    arguments = (example_inputs,) if isinstance(example_inputs, NDArray) else example_inputs
    arrays: List[NDArray] = []
    others: List[Any] = []
    map_arrays(arguments, arrays.append, others.append)
    if not arrays or any(one is not None for one in others) or isinstance(arguments, dict):
        raise ArgumentError(NO_EXAMPLE.format(given=shown(example_inputs)))
    return tuple(arguments)


def _forward_arguments(block: HybridBlock, arguments: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """Return the arguments that `block(*arguments)` passes to `block.forward`.

    As a recurrent layer's own `__call__`, record in the layer whether the call left out the states.
    """
    if not isinstance(block, _RNNLayer):
        return arguments
    block.skip_states = len(arguments) == 1
    return _with_states_as_list(block, *arguments)


def _with_states_as_list(
    layer: _RNNLayer, inputs: NDArray, states: Any = None, *lengths: Any
) -> Tuple[Any, ...]:
    """Return a recurrent layer's arguments with a list of states: `begin_state()` if None."""
    if states is None:
        batch_size = inputs.shape[layer._layout.find("N")]
        states = layer.begin_state(batch_size, ctx=inputs.context, dtype=inputs.dtype)
    return (inputs, [states] if isinstance(states, NDArray) else states, *lengths)


class ConvertedBlock(SymbolBlock):  # type: ignore[misc]
    """A block that exports a converted graph, and runs the graph it was converted from if kept.

    The latter gets its casts in each call, by the shapes of the call's inputs.
    """

    _source: Optional[Source] = None
    _input_dtypes: Sequence[Optional[str]] = ()  #: of inputs that the block casts, or None
    _is_fused = False  #: MXNet's gradients of fused operators are wrong
    _frozen: Sequence[str] = ()  #: parameters that train in the original block only
    _has_warned = False

    def export(self, path: str, epoch: int = 0, remove_amp_cast: bool = False) -> None:
        """Write the converted graph with its casts, and all parameters; needs no call before.

        Both files are replaced together, as by `convert_files`. `remove_amp_cast` is ignored.
        """
        symbol = self._cached_graph[1]
        values = {
            name: _cpu_value(param).as_nd_ndarray() for name, param in self.collect_params().items()
        }
        auxs = {name: values.pop(name) for name in symbol.list_auxiliary_states()}
        write_model((symbol, values, auxs), files_to_write(path, epoch))

    def _collect_params_with_prefix(self, prefix: str = "") -> Dict[str, Parameter]:
        """Return the parameters by the names that `save_parameters` and `load_parameters` use.

        A SymbolBlock saves them without their common prefix, and does not find them again.
        """
        before = f"{prefix}." if prefix else ""
        return {before + name: param for name, param in self.params.items()}

    def forward(self, x: Any, *args: Any) -> Any:
        """Run the block; inputs that it casts may be in either half precision or float32."""
        if any(self._input_dtypes):
            flat, form = _flatten((x, *args), "input")
            dtypes = iter(self._input_dtypes)
            inputs = [None if x is None else _cast_input(x, next(dtypes, None)) for x in flat]
            return super().forward(*_regroup(inputs, form))
        return super().forward(x, *args)

    def _call_cached_op(self, *args: Any) -> Any:
        if autograd.is_recording():
            self._warn_of_training()
            if self._is_fused:
                with autograd.pause():
                    return self._call_cached_op(*args)
        if self._source is not None:
            install_policy_op(self, args, self._source)
        return super()._call_cached_op(*args)

    def _warn_of_training(self) -> None:
        """Warn once if the block runs in training and the conversion has frozen parameters."""
        frozen = [name for name in self._frozen if self.params[name].grad_req == "null"]
        if frozen and autograd.is_training() and not self._has_warned:
            self._has_warned = True
            logger.warning(FROZEN, self.name, shortened(frozen))


def _cast_input(value: Any, dtype: Optional[str]) -> Any:
    """Return an array or symbol cast to `dtype` if both dtypes are half precision or float32."""
    if dtype not in CASTABLE:
        return value
    if isinstance(value, Symbol):
        return mx.sym.amp_cast(value, dtype=BFLOAT16 if dtype == "bfloat16" else dtype)
    if dtypes_of([value])[0] not in CASTABLE:
        return value
    return cast(value, dtype, isinstance(value, mx.np.ndarray))


class ConvertedRecurrentBlock(ConvertedBlock):
    """A converted recurrent layer or cell with the original block's `begin_state`."""

    _original: HybridBlock

    def state_info(self, *args: Any, **kwargs: Any) -> Any:
        """Return the shapes and layouts of the states."""
        return self._original.state_info(*args, **kwargs)

    def begin_state(self, *args: Any, **kwargs: Any) -> Any:
        """Return the initial states."""
        return self._original.begin_state(*args, **kwargs)

    def __call__(self, inputs: Any, *args: Any) -> Any:
        """Call the block; the states of a layer may be left out."""
        if isinstance(self._original, _RNNLayer):
            return super().__call__(*_with_states_as_list(self._original, inputs, *args))
        return super().__call__(inputs, *args)


def contexts_of(ctx: Union[None, Context, Sequence[Context]]) -> List[Context]:
    """Return a `ctx` argument as a list of contexts; None stands for the current context."""
    if ctx is None:
        return [current_context()]
    contexts = [ctx] if isinstance(ctx, Context) else list(ctx)
    if not contexts or not all(isinstance(one, Context) for one in contexts):
        raise ArgumentError(f"ctx must be a Context or a list of them, not {shown(ctx)}")
    if default_device() != "gpu" and any(device_kind(one) == "gpu" for one in contexts):
        raise ArgumentError(NO_GPU.format(given=shown(ctx)))
    return contexts


def build_block(
    block: HybridBlock,
    traced: TracedBlock,
    symbol: Symbol,
    values: Mapping[str, NDArray],
    contexts: List[Context],
    frozen: Collection[str] = (),
    source: Optional[Source] = None,
    input_dtypes: Optional[Mapping[str, str]] = None,
) -> SymbolBlock:
    """Return a block that runs `symbol` with parameters `values`, and is called as `block` is.

    `values` are copied to `contexts`. Parameters keep names, `lr_mult`, `wd_mult`, `grad_req` and
    `grad_stype`; those named in `frozen`, which include all new ones, get no gradients. With
    `source`, the block runs the source's graph, with casts by its policy. Inputs are cast to
    `input_dtypes`, by input name.
    """
    recurrent = hasattr(block, "begin_state")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SymbolBlock's type inference is of no use here
        result = (ConvertedRecurrentBlock if recurrent else ConvertedBlock)(symbol, traced.inputs)
    result._source = source
    trained = (name for name, param in traced.params.items() if param.grad_req != "null")
    result._frozen = [name for name in trained if name in frozen]
    result._input_dtypes = [(input_dtypes or {}).get(one.name) for one in traced.inputs]
    if recurrent:
        # Past Block.__setattr__, which would make the original a child.
        object.__setattr__(result, "_original", getattr(block, "_original", block))
    # MXNet flattens the inputs and outputs of a SymbolBlock; the formats restore their nesting.
    result._in_format, result._out_format = traced.formats
    for name, param in result.collect_params().items():
        param.cast(values[name].dtype)
        original = traced.params.get(name, param)
        param.lr_mult, param.wd_mult = original.lr_mult, original.wd_mult
        param._grad_stype = original._grad_stype
        param.grad_req = "null" if name in frozen else original.grad_req
        # Last, as it makes the gradients: MXNet can't make bfloat16 ones under NumPy semantics, and
        # an Embedding with `sparse_grad` writes to sparse ones only.
        param._load_init(values[name], contexts)
    result.hybridize(**dict(block._flags[:2]) if block._flags else {})
    return result
