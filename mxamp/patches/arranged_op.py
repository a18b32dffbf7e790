"""Cached ops that read a block's arguments in another order, and the loss scale among them."""

from typing import Any, Sequence

from mxnet.ndarray import CachedOp
from mxnet.ndarray.ndarray import NDArray

from ..scaling.loss_outputs import scale_array

__all__ = ["SCALE", "ArrangedOp"]

#: The place of the loss scale among a block's arguments.
SCALE = -1


class ArrangedOp:
    """A cached op whose graph reads the block's arguments in another order.

    `SCALE` in that order is the loss scale of output operators, one more input.
    """

    def __init__(self, op: CachedOp, order: Sequence[int]) -> None:
        self._op, self._order = op, order
        self._scaled = SCALE in order
        self._register_op_hook = op._register_op_hook

    def inputs(self, args: Sequence[NDArray]) -> Sequence[NDArray]:
        """Return what the graph reads in a call with these arguments."""
        # Behind the arguments, where `SCALE`, -1, finds it.
        given = (*args, scale_array(args[0].context)) if self._scaled else args
        return [given[i] for i in self._order]

    def __call__(self, *args: NDArray, **kwargs: Any) -> Any:
        """Run the graph for the block's arguments."""
        return self._op(*self.inputs(args), **kwargs)
