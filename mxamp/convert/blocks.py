"""Gluon blocks seen from outside: their traced graph, and a block rebuilt around another one."""

import logging
import warnings
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import mxnet as mx
from mxnet import autograd
from mxnet.context import Context, current_context
from mxnet.gluon import HybridBlock, Parameter, SymbolBlock
from mxnet.gluon.block import _flatten, _regroup
from mxnet.gluon.parameter import DeferredInitializationError
from mxnet.gluon.rnn.rnn_layer import _RNNLayer
from mxnet.ndarray.ndarray import NDArray, waitall
from mxnet.symbol import Symbol

from ..errors import ArgumentError, StateError
from ..framework.arrays import cast, dtypes_of
from ..framework.files import NOT_THE_SAME
from ..framework.machine import BFLOAT16, DTYPE_CODES, device_kind
from ..framework.wording import shown
from ..patches.cached_op import Source, follow
from ..policy.decision import CASTABLE
from .saved import files_to_write, load_model, replaced_files, saved_alike, set_apart

__all__ = ["Examples", "Traced", "contexts_of", "rebuilt", "trace"]

NOT_RUN = (
    "block {name!r} has no graph yet: call block.hybridize() and run it once on an example input, "
    "or give that input as example_inputs"
)
NO_GRADIENTS = "block %r was fused for inference: autograd gets no gradients through it"
NO_VALUE = "parameter {name!r} has no value yet: initialize the block and run it once"

logger = logging.getLogger("mxamp")

Examples = Union[None, NDArray, Sequence[Any]]

_TRACE = ("_cached_graph", "_in_format", "_out_format")


class Traced:
    """A block's graph: inputs, symbol, the formats of its arguments, the parameters it reads.

    `arguments` are those of the call that it was traced on, where there was one.
    """

    def __init__(self, block: HybridBlock, arguments: Tuple[Any, ...] = ()) -> None:
        self.inputs, self.symbol = block._cached_graph
        arrays = [array for array in _flatten(arguments, "input")[0] if array is not None]
        self._example = dict(zip([i.name for i in self.inputs], dtypes_of(arrays)))
        self.formats = block._in_format, block._out_format
        used = set(self.symbol.list_inputs())
        self.params: Dict[str, Parameter] = {
            name: param for name, param in block.collect_params().items() if name in used
        }

    def dtypes_with(self, given: Any) -> Any:
        """Return the dtypes of inputs: `given`, or the example's; of those that the graph reads.

        Other inputs of the block are of no account. What is no mapping is returned as it is.
        """
        if given is not None and not isinstance(given, Mapping):
            return given
        read = set(self.symbol.list_inputs())
        unread = {one.name for one in self.inputs} - read
        example = {name: dtype for name, dtype in self._example.items() if dtype in DTYPE_CODES}
        dtypes = {name: example[name] for name in example if name in read}
        dtypes.update({k: v for k, v in (given or {}).items() if k not in unread})
        return dtypes

    def values(self) -> Dict[str, NDArray]:
        """Return the parameters' values, on the CPU: many are the arrays themselves."""
        for name, param in self.params.items():
            if param._data is None:
                raise StateError(NO_VALUE.format(name=name))
        return {name: _value(param) for name, param in self.params.items()}


def _value(param: Parameter) -> NDArray:
    first, *others = param._data
    alone = not others and first.stype == "default" and device_kind(first.context) == "cpu"
    return first if alone else param._reduce()  # a mean, or a copy


def trace(block: HybridBlock, example_inputs: Examples = None) -> Traced:
    """Return the graph of a block: the one it ran with, else one traced on an example.

    The block's own graph stays as it is. Parameters whose shape waits for a first input are
    initialized by the example, as they are by any first call.
    """
    if not isinstance(block, HybridBlock):
        raise ArgumentError(f"block must be a HybridBlock, not {shown(block)}")
    if example_inputs is None or (block._cached_graph and isinstance(block, SymbolBlock)):
        if not block._cached_graph:
            raise StateError(NOT_RUN.format(name=block.name))
        return Traced(block)
    one = isinstance(example_inputs, NDArray)
    arguments: Tuple[Any, ...] = (example_inputs,) if one else tuple(example_inputs)
    if any(p._data is None for p in block.collect_params().values()):
        try:
            block(*arguments)
        except (DeferredInitializationError, RuntimeError) as error:
            raise StateError(f"block {block.name!r} does not run: {error}") from None
    kept = {name: getattr(block, name) for name in _TRACE}
    try:
        block._cached_graph = ()
        called = _as_called(block, arguments)
        block._get_graph(*called)
        return Traced(block, called)
    finally:
        for name, value in kept.items():
            setattr(block, name, value)


def _as_called(block: HybridBlock, arguments: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """Return what `block.forward` is given: recurrent layers make states where there are none."""
    if not isinstance(block, _RNNLayer):
        return arguments
    block.skip_states = len(arguments) == 1
    return _with_states(block, *arguments)


def _with_states(
    block: _RNNLayer, inputs: NDArray, states: Any = None, *lengths: Any
) -> Tuple[Any, ...]:
    if states is None:
        rows = inputs.shape[block._layout.find("N")]
        states = block.begin_state(rows, ctx=inputs.context, dtype=inputs.dtype)
    return (inputs, [states] if isinstance(states, NDArray) else states, *lengths)


def _read_back(folder: Path, files: Tuple[Path, Path], epoch: int) -> None:
    """Raise where files that were written can't be read."""
    try:
        load_model(folder / files[0].name[: -len("-symbol.json")], epoch)
    except ArgumentError as error:
        raise OSError(NOT_THE_SAME) from error


class ConvertedBlock(SymbolBlock):  # type: ignore[misc]
    """A converted block: exports its graph, and runs that of its source, tuned to what it is given.

    The two compute alike; only in the second operators may have others standing in for them.
    """

    _source: Optional[Source] = None
    _input_dtypes: Sequence[Optional[str]] = ()  #: of inputs that are cast on the way in, or None
    _is_fused = False  #: MXNet's gradients of fused operators are wrong: it gets none
    _has_warned = False

    def export(self, path: str, epoch: int = 0, remove_amp_cast: bool = False) -> None:
        """Write the converted graph, casts included, and all parameters; a call is not needed.

        Both files are replaced as one, as by `convert_files`.
        """
        if not getattr(self, "_cached_op_args", None):  # before MXNet 1.9.1 there is none
            # MXNet takes the parameters from what the first call makes, and writes none before.
            self._build_cache()
        files = files_to_write(path, epoch)
        with replaced_files(files, lambda folder: _read_back(folder, files, epoch)) as (
            folder,
            is_locked,
        ):
            with saved_alike(self.collect_params().values()):
                super().export(str(folder / Path(path).name), epoch, remove_amp_cast)
            waitall()
            set_apart(folder, files, is_locked)

    def _collect_params_with_prefix(self, prefix: str = "") -> Dict[str, Parameter]:
        """Return the parameters by the names under which they are saved, and looked for on load.

        A SymbolBlock saves them without their common prefix, and does not find them again.
        """
        before = f"{prefix}." if prefix else ""
        return {before + name: param for name, param in self.params.items()}

    def forward(self, x: Any, *args: Any) -> Any:
        """Run it; inputs that are cast may be of either half precision or float32."""
        if any(self._input_dtypes):
            flat, form = _flatten((x, *args), "input")
            dtypes = iter(self._input_dtypes)
            given = [None if one is None else _input_cast(one, next(dtypes, None)) for one in flat]
            return super().forward(*_regroup(given, form))
        return super().forward(x, *args)

    def _call_cached_op(self, *args: Any) -> Any:
        if self._is_fused and autograd.is_recording():
            if not self._has_warned:
                logger.warning(NO_GRADIENTS, self.name)
                self._has_warned = True
            with autograd.pause():
                return self._call_cached_op(*args)
        source = self._source
        if source is not None:
            follow(self, args, source)
        return super()._call_cached_op(*args)


def _input_cast(value: Any, dtype: Optional[str]) -> Any:
    """Return an input in `dtype`, if both are half precisions or float32."""
    if dtype not in CASTABLE:
        return value
    if isinstance(value, Symbol):
        return mx.sym.amp_cast(value, dtype=BFLOAT16 if dtype == "bfloat16" else dtype)
    if dtypes_of([value])[0] not in CASTABLE:
        return value
    return cast(value, dtype, isinstance(value, mx.np.ndarray))


class ConvertedRecurrentBlock(ConvertedBlock):
    """A converted recurrent layer or cell: makes its states as the original does."""

    def _like(self, original: HybridBlock) -> "ConvertedRecurrentBlock":
        # Past Block.__setattr__, which would make the original a child.
        object.__setattr__(self, "_original", original)
        return self

    def state_info(self, *args: Any, **kwargs: Any) -> Any:
        """Return shapes and layouts of the states, as the original's `state_info`."""
        return self._original.state_info(*args, **kwargs)

    def begin_state(self, *args: Any, **kwargs: Any) -> Any:
        """Return initial states, as the original's `begin_state`."""
        return self._original.begin_state(*args, **kwargs)

    def __call__(self, inputs: Any, *args: Any) -> Any:
        """Call it as the original: a layer's states may be left out."""
        if isinstance(self._original, _RNNLayer):
            return super().__call__(*_with_states(self._original, inputs, *args))
        return super().__call__(inputs, *args)


def contexts_of(ctx: Union[None, Context, Sequence[Context]]) -> List[Context]:
    """Return a list of contexts for a `ctx` argument; the current one by default."""
    if ctx is None:
        return [current_context()]
    contexts = [ctx] if isinstance(ctx, Context) else list(ctx)
    if not contexts or not all(isinstance(one, Context) for one in contexts):
        raise ArgumentError(f"ctx must be a Context or a list of them, not {shown(ctx)}")
    return contexts


def rebuilt(
    block: HybridBlock,
    traced: Traced,
    symbol: Symbol,
    values: Mapping[str, NDArray],
    contexts: List[Context],
    frozen: Mapping[str, Any],
    source: Optional[Source],
    input_dtypes: Mapping[str, str],
    is_fused: bool = False,
) -> SymbolBlock:
    """Return a block that runs `symbol` and is called as `block` is.

    `values` are copied to `contexts`. Parameters keep names, `lr_mult`, `wd_mult`, `grad_req` and
    `grad_stype`; those that are `frozen`, all new ones among them, get no gradients. With `source`,
    the block runs that tuned by its policy. Inputs of `input_dtypes` are cast to them.
    """
    recurrent = hasattr(block, "begin_state")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SymbolBlock's type inference is of no use here
        result = (ConvertedRecurrentBlock if recurrent else ConvertedBlock)(symbol, traced.inputs)
    result._source, result._is_fused = source, is_fused
    result._input_dtypes = [input_dtypes.get(one.name) for one in traced.inputs]
    if recurrent:
        result._like(getattr(block, "_original", block))
    # MXNet flattens the inputs and outputs of a SymbolBlock; these two give them their shape back.
    result._in_format, result._out_format = traced.formats
    for name, param in result.collect_params().items():
        param.cast(values[name].dtype)
        # Before it is loaded, which makes the gradients: MXNet makes none in bfloat16 under NumPy
        # semantics, and an Embedding with `sparse_grad` writes to sparse ones only.
        if name in traced.params:
            param._grad_stype = traced.params[name]._grad_stype
        param.grad_req = "null" if name in frozen else traced.params[name].grad_req
        param._load_init(values[name], contexts)
        if name in traced.params:
            param.lr_mult = traced.params[name].lr_mult
            param.wd_mult = traced.params[name].wd_mult
    result.hybridize(**dict(block._flags[:2]) if block._flags else {})
    return result
