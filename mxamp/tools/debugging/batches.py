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
from ...framework.wording import shown
from .measured import arrays_in

NO_LABEL = (
    "with a loss, a batch is a tuple of the net's inputs and the label, as a DataLoader yields it: "
    "(data, label), not {given}"
)
NO_BATCH = (
    "a batch is an NDArray (mx.nd.array(...) makes one) or a tuple of the net's inputs, not {given}"
)
NOT_A_NET = (
    "the model must be a Block, or a saved one as (symbol, arg_params, aux_params), not {given}"
)


class Batch(NamedTuple):
    """The inputs of one call of a net, and the label for its loss."""

    inputs: tuple[Any, ...]
    label: Any = None


def check_loss(loss: Any) -> None:
    """Raise `ArgumentError` unless the loss is None or can be called."""
    if loss is not None and not callable(loss):
        raise ArgumentError(
            f"loss must be a function of the net's output and the label, not {shown(loss)}"
        )


def batches_of(data: Any, labeled: bool) -> Iterator[Batch]:
    """Yield one batch for an array, a tuple or a dict, else each batch of an iterable.

    If `labeled`, the last element of a batch is its label. Raises `ArgumentError` without batches.
    """
    if isinstance(data, (NDArray, tuple, Mapping)):
        data = [data]
    if not isinstance(data, Iterable):
        raise ArgumentError(NO_BATCH.format(given=shown(data)))
    batch = None
    for batch in data:
        yield _checked_batch(batch, labeled)
    if batch is None:
        raise ArgumentError("data holds no batch")


def _checked_batch(batch: Any, labeled: bool) -> Batch:
    """Return an array, a dict or a list of arrays as a batch; raise `ArgumentError` if empty."""
    parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    arrays = arrays_in(parts)
    if not arrays:
        raise ArgumentError(NO_BATCH.format(given=shown(batch)))
    empty = [array.shape for array in arrays if not array.size]
    if empty:
        raise ArgumentError(f"a batch holds no elements: one of its arrays is of shape {empty[0]}")
    if not labeled:
        return Batch(parts)
    if len(parts) == 1:
        raise ArgumentError(NO_LABEL.format(given=f"one {type(batch).__name__}"))
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
                raise ArgumentError("the inputs of a saved model are given by name, as a dict")
            known = {name: array for name, array in by_name.items() if name in names}
            known.update(zeros_for_missing(symbol, {**values, **known}))
            yield Batch(tuple(known[name] for name in names))

    return block, ordered_batches()
