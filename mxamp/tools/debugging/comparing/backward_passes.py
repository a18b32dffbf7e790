"""Backward passes of measurements: a recorded loss, and its gradients at several scales."""

from typing import Any, Callable, Dict, List, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.gluon import Block, HybridBlock
from mxnet.ndarray.ndarray import NDArray

from ....errors import ArgumentError
from ....framework.patching import original
from ....framework.wording import shown
from ....graph.ir import LOOPS, Graph
from ....policy.active import suspended
from ....scaling.loss_outputs import scaled_heads
from ....scaling.losses import scaled_loss
from .isolated import arrays_in, descendants

__all__ = ["Recorded", "gradients_of", "loss_of", "trained_arrays"]

#: As it was before front ends patched it: those scale the losses of scripts.
_backward = original(autograd, "backward")

NO_LOSS_VALUE = (
    "the loss must return an NDArray that is computed from the net's output, not {given}"
)
#: What MXNet says of a loss that nothing was recorded of.
_NOT_RECORDED = "not in a computational graph", "no inputs in computation graph"


class Recorded:
    """A loss that `record` computes, for one backward pass after the other.

    MXNet can't run the backward pass of a loop in a graph twice: where there is one, the loss is
    computed anew.
    """

    def __init__(self, block: Block, record: Callable[[], Any]) -> None:
        self._record = record
        self._loss, self._fresh = record(), True
        self._once = any(map(_has_loops, descendants(block)))

    def gradients(self, arrays: Sequence[NDArray], scale: float) -> List[NDArray]:
        """Return the gradients of the loss times a scale; see `gradients_of`."""
        if self._once and not self._fresh:
            self._loss = self._record()
        self._fresh = False
        return gradients_of(self._loss, arrays, scale)


def _has_loops(block: Block) -> bool:
    graph: Any = block._cached_graph if isinstance(block, HybridBlock) else ()
    return bool(graph) and not LOOPS.isdisjoint(Graph.from_symbol(graph[1]).operators)


def trained_arrays(block: Block) -> Dict[str, NDArray]:
    """Return the values, on the first device, of the parameters that get gradients."""
    params = block.collect_params().values()
    return {param.name: param.list_data()[0] for param in params if param.grad_req != "null"}


def loss_of(loss: Callable[[Any, Any], Any], output: Any, label: Any) -> Any:
    """Return the loss of an output; raise `ArgumentError` where the function returns none."""
    found = loss(output, label)
    if not arrays_in(found):
        raise ArgumentError(NO_LOSS_VALUE.format(given=shown(found)))
    return found


def gradients_of(loss: Any, arrays: Sequence[NDArray], scale: float) -> List[NDArray]:
    """Return the gradients, times a scale, of a recorded loss; they are held by these arrays.

    It may be called again, and writes to the same gradients then.
    """
    if not arrays:
        return []
    with suspended(), autograd.record():
        heads = [scaled_loss(one, scale) for one in arrays_in(loss)]
    with suspended(), autograd.pause(), scaled_heads(scale):
        for gradient in [array.grad for array in arrays]:
            # Those that the loss does not depend on are not written, others may be added to.
            if gradient.stype == "default":
                gradient[:] = 0
            else:
                mx.nd.sparse.zeros_like(gradient, out=gradient)
        try:
            _backward(heads, retain_graph=True)
        except MXNetError as error:
            if not any(words in str(error) for words in _NOT_RECORDED):
                raise
            raise ArgumentError(NO_LOSS_VALUE.format(given="one of other values")) from None
    # Asked for again: MXNet may have put another array in a gradient's place.
    return [array.grad for array in arrays]
