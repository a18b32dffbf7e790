"""The batches that a measurement runs on, and blocks made of saved models to run on them."""

from __future__ import annotations

import warnings
from typing import Any, Iterable, Iterator, Mapping, NamedTuple

import mxnet as mx
from mxnet.context import current_context
from mxnet.gluon import SymbolBlock
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ...convert.outputs import zeros_for_missing
from ...errors import ArgumentError
from ...framework.machine import dtype_name
from ...framework.wording import shown
from ...policy.targets import TARGETS
from .measured import arrays_in

NOT_A_LOSS = "loss must be a function of the net's output and the label, not {given}"
DTYPE_FIRST = ": give the dtype by its keyword, target_dtype= or dtype="
NO_LABEL = (
    "with a loss, a batch is a tuple of the net's inputs and the label, as a DataLoader yields it: "
    "(data, label), not {given}"
)
NO_BATCH = (
    "a batch is an NDArray (mx.nd.array(...) makes one) or a tuple of the net's inputs, not {given}"
)
EMPTY = "a batch holds no elements: one of its arrays is of shape {shape}"
NO_BATCHES = "data holds no batch"
NOT_A_NET = (
    "the model must be a Block, or a saved one as (symbol, arg_params, aux_params), not {given}"
)
BY_NAME = "the inputs of a saved model are given by name, as a dict, not as {given}"


class Batch(NamedTuple):
    """The inputs of one call of a net, and the label for its loss."""

    inputs: tuple[Any, ...]
    label: Any = None


def check_loss(loss: Any) -> None:
    """Raise `ArgumentError` unless the loss is None or can be called."""
    if loss is not None and not callable(loss):
        hint = DTYPE_FIRST if isinstance(loss, str) and dtype_name(loss) in TARGETS else ""
        raise ArgumentError(NOT_A_LOSS.format(given=shown(loss)) + hint)


def batches_of(data: Any, labeled: bool) -> Iterator[Batch]:
    """Yield one batch for an array, a tuple or a dict, else each batch of an iterable.

    If `labeled`, the last element of a batch is its label. Raises `ArgumentError` without batches.
    """
    is_one = isinstance(data, (NDArray, tuple, Mapping))
    if not is_one and not isinstance(data, Iterable):
        raise ArgumentError(NO_BATCH.format(given=type(data).__name__))
    batch = None
    for batch in [data] if is_one else data:
        yield _checked_batch(batch, labeled)
    if batch is None:
        raise ArgumentError(NO_BATCHES)


def _checked_batch(batch: Any, labeled: bool) -> Batch:
    """Return an array, a dict or a list of arrays as a batch; raise `ArgumentError` if empty."""
    if not isinstance(batch, (tuple, list, NDArray, Mapping)):
        raise ArgumentError(NO_BATCH.format(given=type(batch).__name__))
    parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    arrays = arrays_in(parts)
    if not arrays:
        raise ArgumentError(NO_BATCH.format(given=shown(batch)))
    for array in arrays:
        if not array.size:
            raise ArgumentError(EMPTY.format(shape=array.shape))
    if not labeled:
        return Batch(parts)
    if len(parts) < 2:  # noqa: PLR2004
        raise ArgumentError(NO_LABEL.format(given=f"{len(parts)} {type(batch).__name__}"))
    return Batch(parts[:-1], parts[-1])


def block_of(model: Any, batches: Iterable[Batch]) -> tuple[SymbolBlock, Iterator[Batch]]:
    """Return a saved model as a block, and batches of dicts as tuples in the block's order."""
    if not (isinstance(model, tuple) and len(model) == 3 and isinstance(model[0], Symbol)):  # noqa: PLR2004
        raise ArgumentError(NOT_A_NET.format(given=shown(model)))
    symbol, args, auxs = model
    values = {**args, **auxs}
    names = [name for name in symbol.list_inputs() if name not in values]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about type inference, which is not needed
        block = SymbolBlock(symbol, [mx.sym.var(name) for name in names])
    for name, param in block.collect_params().items():
        param.cast(values[name].dtype)
        param._load_init(values[name], [current_context()])

    def ordered_batches() -> Iterator[Batch]:
        for batch in batches:
            by_name = batch.inputs[0]
            if not isinstance(by_name, Mapping):
                raise ArgumentError(BY_NAME.format(given=type(by_name).__name__))
            known = {name: array for name, array in by_name.items() if name in names}
            known.update(zeros_for_missing(symbol, {**values, **known}))
            yield Batch(tuple(known[name] for name in names))

    return block, ordered_batches()
