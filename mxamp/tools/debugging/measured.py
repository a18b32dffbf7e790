"""Helpers to measure a net: batches, copies, seeds of random numbers, losses, gradients."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from functools import partial
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence, Union

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, SymbolBlock
from mxnet.ndarray.ndarray import NDArray

from ...convert.outputs import Model, checked_model, error_reason, zeros_for_missing
from ...errors import AmpError, ArgumentError, StateError
from ...framework.arrays import cast, map_arrays
from ...framework.machine import dtype_name
from ...framework.wording import counted, shown
from ...policy.active import suspended
from ...scaling.loss_outputs import set_scales
from ...scaling.running import BackwardPass, run

NOT_ON_BATCH = (
    "block {name!r} does not run on this batch of {arrays}: {why}. A batch is a tuple of the net's "
    "arguments, and the label too only where a loss or a metric is given. A list holds batches"
)
NO_LOSS = "loss must be a function from the net's output and the label to an NDArray, not {given}"
NO_BATCH = "a batch must be an array or a tuple (for a loss or metric, label last), not {given}"
NO_NUMPY = "a batch must hold NDArrays, not {given}: write mx.nd.array(values)"
NOT_FLOAT32 = "{name!r} is in {dtype}: give the float32 model, or convert this one to float32 first"


#: A block or a saved model; and a batch, the arguments of one call, or an iterable of batches.
Net = Union[Block, Model]
Data = Union[NDArray, Mapping[str, Any], Iterable[Any]]


class Batch(NamedTuple):
    """A batch: the arguments of one call of a net, and the label for its loss."""

    inputs: tuple[Any, ...]
    label: Any = None


def batches_of(data: Data, labeled: bool) -> Iterator[Batch]:
    """Yield the batches in `data`: a single one, or those of an iterable.

    If `labeled`, the last element of a batch is its label. Raises `ArgumentError` without batches.
    """
    if isinstance(data, (NDArray, np.ndarray, tuple, Mapping)):
        data = [data]
    if not isinstance(data, Iterable):
        raise ArgumentError(NO_BATCH.format(given=shown(data)))
    batch = None
    for batch in data:
        parts: tuple[Any, ...] = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        arrays: list[NDArray] = []
        map_arrays(parts, arrays.append, _refuse_numpy)
        if not arrays or len(parts) <= labeled:
            raise ArgumentError(NO_BATCH.format(given=shown(batch)))
        if not all(array.size for array in arrays):
            raise ArgumentError("a batch holds no elements")
        yield Batch(parts[:-1], parts[-1]) if labeled else Batch(parts)
    if batch is None:
        raise ArgumentError("data holds no batch")


def _refuse_numpy(value: object) -> None:
    """Raise `ArgumentError` if a batch holds a NumPy array, which MXNet would misread."""
    if isinstance(value, np.ndarray):
        raise ArgumentError(NO_NUMPY.format(given=shown(value)))


def block_of(model: Model, batches: Iterable[Batch]) -> tuple[SymbolBlock, Iterator[Batch]]:
    """Return a saved model as a block, and its batches with arguments in the block's order."""
    symbol, args, auxs = checked_model(model)
    values = {**args, **auxs}
    names = [name for name in symbol.list_inputs() if name not in values]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about type inference, which is not needed
        block = SymbolBlock(symbol, [mx.sym.var(name) for name in names])
    for name, param in block.collect_params().items():
        param.cast(values[name].dtype)
        param._load_init(values[name], [mx.current_context()])

    def ordered(batch: Batch) -> Batch:
        by_name = batch.inputs[0]
        if not isinstance(by_name, Mapping):
            raise ArgumentError("the inputs of a saved model are given by name, as a dict")
        known = {name: array for name, array in by_name.items() if name in names}
        known.update(zeros_for_missing(symbol, values, known))
        return Batch(tuple(known[name] for name in names), batch.label)

    return block, map(ordered, batches)


def require_dtype(name: str, dtype: str, refused: frozenset[str]) -> None:
    """Raise `ArgumentError` if a layer's or parameter's dtype is one of `refused`."""
    if dtype in refused:
        raise ArgumentError(NOT_FLOAT32.format(name=name, dtype=dtype))


def blocks_in(net: Block) -> list[Block]:
    """Return a net and all its descendant blocks, without repeats."""
    found: dict[int, Block] = {}
    net.apply(lambda block: found.setdefault(id(block), block))
    return list(found.values())


def copied(net: Block, inputs: Sequence[Any], refused: frozenset[str]) -> Block:
    """Return a deep copy of a net, without trainers and hooks, hybridized if possible.

    `inputs` are the arguments of a first call, of the copy. Raises `ArgumentError` if a parameter
    has one of the `refused` dtypes, or if the net does not run on the inputs.
    """
    for param in net.collect_params().values():
        require_dtype(param.name, dtype_name(param.dtype), refused)
    with explained_errors(net, inputs):
        try:
            return _run_copy(net, inputs, hybridized=True)
        except Exception:  # the user's own code runs in the trace
            return _run_copy(net, inputs, hybridized=False)


def _run_copy(net: Block, inputs: Sequence[Any], hybridized: bool) -> Block:
    """Return a deep copy of a net that has run once, in inference without mixed precision."""
    left_out = [getattr(block, "_cached_op", None) for block in blocks_in(net)]
    left_out += [param._trainer for param in net.collect_params().values()]
    made: Block = copy.deepcopy(net, {id(one): None for one in left_out if one is not None})
    for block in blocks_in(made):
        block._forward_hooks.clear()
        block._forward_pre_hooks.clear()
    for param in made.collect_params().values():
        if param.grad_req != "null":
            # A copied array has lost its gradient.
            param.grad_req = "null"
            param.grad_req = "write"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of blocks that could be hybrid as a whole
        made.hybridize(hybridized)
    with suspended(), mx.autograd.pause(train_mode=False):
        made(*inputs)
    return made


@contextlib.contextmanager
def alike_numbers() -> Iterator[Callable[[], None]]:
    """Return a context that yields a function to reseed all generators, for repeatable runs.

    MXNet's generator continues from a number drawn before, since its state can't be read.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with suspended(), mx.autograd.pause():
        drawn = int(mx.nd.random.randint(0, 2**31 - 1).asscalar())

    def restart(seed: int = 20180201) -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        mx.random.seed(seed)

    try:
        yield restart
    finally:
        restart(drawn)


@contextlib.contextmanager
def explained_errors(net: Block, inputs: Sequence[Any]) -> Iterator[None]:
    """Return a context that explains errors of a net that can't run on these inputs.

    It raises `StateError` for a net that was not initialized.
    """
    try:
        yield
    except AmpError:
        raise
    except (TypeError, ValueError, mx.MXNetError) as error:  # ValueError: infers a deferred shape
        arrays, why = counted(len(arrays_in(inputs)), "array"), error_reason(error)
        # With the error that it came from, which may be of the user's own code.
        raise ArgumentError(NOT_ON_BATCH.format(name=net.name, arrays=arrays, why=why)) from error
    except RuntimeError as error:
        raise StateError(f"block {net.name!r} does not run: {error}") from error


def arrays_in(value: object) -> list[NDArray]:
    """Return all NDArrays in nested lists, tuples and dicts as a flat list."""
    arrays: list[NDArray] = []
    map_arrays(value, arrays.append, lambda other: other)
    return arrays


def in_float32(array: NDArray) -> Any:
    """Return an NDArray, dense or sparse, as a float32 NumPy array."""
    # Arrays of mx.np have no `tostype`.
    dense = array if array.stype == "default" else array.tostype("default")
    return cast(dense, "float32").asnumpy()


def loss_of(loss: object, output: object, label: object) -> object:
    """Return the loss of a net's output; raise `ArgumentError` if it contains no NDArray."""
    found = loss(output, label) if callable(loss) else loss
    if found is loss or not arrays_in(found):
        raise ArgumentError(NO_LOSS.format(given=shown(found)))
    return found


def gradients_of(loss: object, net: Block, scale: float) -> list[Any]:
    """Return the gradients of a net's parameters for a recorded loss, as NumPy arrays.

    The loss is multiplied by `scale` for the backward pass, and the gradients are divided by it.
    """
    params = net.collect_params()
    with suspended():
        params.zero_grad()  # backward skips parameters that the loss does not depend on
        with mx.autograd.record():
            heads = [cast(one, "float32") * scale for one in arrays_in(loss)]
        one = BackwardPass(heads, scale=scale)
        with mx.autograd.pause():
            set_scales(one)
            run(one, partial(mx.autograd.backward, heads))
        found = [param.list_grad()[0] for param in params.values() if param.grad_req != "null"]
        return [in_float32(array) / np.float32(scale) for array in found]
