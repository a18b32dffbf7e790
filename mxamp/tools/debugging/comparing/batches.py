"""Batches as users give them, to a net and a loss."""

from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Tuple

from mxnet.ndarray.ndarray import NDArray

from ....errors import ArgumentError
from .isolated import arrays_in

__all__ = ["Batch", "batches_of"]

NO_LABEL = (
    "with a loss, a batch is a tuple of the net's inputs and the label, as a DataLoader yields it: "
    "(data, label), not {given}"
)
NO_BATCH = "a batch is an NDArray or a tuple of the net's inputs, not {given}"
EMPTY = "a batch holds no elements: one of its arrays is of shape {shape}"
NO_BATCHES = "data holds no batch"


class Batch(NamedTuple):
    """The inputs of one call of a net, and the label of its loss."""

    inputs: Tuple[Any, ...]
    label: Any = None


def batches_of(data: Any, labelled: bool) -> Iterator[Batch]:
    """Yield the batches in `data`: one, where it is an array, a tuple or a dict; else several.

    With `labelled`, the last part of each is the label.
    """
    one = isinstance(data, (NDArray, tuple, Mapping))
    if not one and not isinstance(data, Iterable):
        raise ArgumentError(NO_BATCH.format(given=type(data).__name__))
    count = 0
    for batch in [data] if one else data:
        yield _batch(batch, labelled)
        count += 1
    if not count:
        raise ArgumentError(NO_BATCHES)


def _batch(batch: Any, labelled: bool) -> Batch:
    if isinstance(batch, (tuple, list)):
        parts = tuple(batch)
    elif isinstance(batch, (NDArray, Mapping)):
        parts = (batch,)
    else:
        raise ArgumentError(NO_BATCH.format(given=type(batch).__name__))
    for array in arrays_in(parts):
        if not array.size:
            raise ArgumentError(EMPTY.format(shape=array.shape))
    if not labelled:
        return Batch(parts)
    if len(parts) < 2:  # noqa: PLR2004
        raise ArgumentError(NO_LABEL.format(given=f"{len(parts)} {type(batch).__name__}"))
    return Batch(parts[:-1], parts[-1])
