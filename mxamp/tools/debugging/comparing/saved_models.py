"""Saved models as blocks, and batches of their inputs by name."""

import warnings
from typing import Any, Iterable, Iterator, Mapping, Tuple

import mxnet as mx
from mxnet.context import current_context
from mxnet.gluon import SymbolBlock
from mxnet.symbol import Symbol

from ....convert.outputs import inferred_labels
from ....errors import ArgumentError
from ....framework.wording import shown
from .batches import Batch

__all__ = ["block_of"]

NOT_A_NET = (
    "the model must be a Block, or a saved one as (symbol, arg_params, aux_params), not {given}"
)
BY_NAME = "the inputs of a saved model are given by name, as a dict, not as {given}"


def block_of(model: Any, batches: Iterable[Batch]) -> Tuple[SymbolBlock, Iterator[Batch]]:
    """Return a saved model as a block, and its inputs, which are given by name, in order."""
    if not (isinstance(model, tuple) and len(model) == 3 and isinstance(model[0], Symbol)):  # noqa: PLR2004
        raise ArgumentError(NOT_A_NET.format(given=shown(model)))
    symbol, args, auxs = model
    values = {**args, **auxs}
    names = [name for name in symbol.list_inputs() if name not in values]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its type inference is of no use here
        block = SymbolBlock(symbol, [mx.sym.var(name) for name in names])
    for name, param in block.collect_params().items():
        param.cast(values[name].dtype)
        param._load_init(values[name], [current_context()])

    def named() -> Iterator[Batch]:
        for batch in batches:
            given = batch.inputs[0]
            if not isinstance(given, Mapping):
                raise ArgumentError(BY_NAME.format(given=type(given).__name__))
            missing = [name for name in names if name not in given]
            known = {name: array for name, array in given.items() if name in names}
            known.update(inferred_labels(symbol, {**values, **known}, missing))
            yield Batch(tuple(known[name] for name in names))

    return block, named()
