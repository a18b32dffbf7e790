"""Small eager dense layers: their casts and the product in one call of MXNet.

On small arrays, a call of MXNet takes longer than its kernel: about 16 microseconds on a core of
a Zen 4. An eager dense layer takes four calls, or seven where autograd records it. As a graph of
one operator, which gets its casts from the same rewriting as a block's graph, it takes one.
"""

import math
import threading
from typing import Any, Dict, Optional, Sequence, Tuple

from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.ndarray import CachedOp
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol
from mxnet.symbol.numpy import _Symbol as NumpySymbol

from ..framework.arrays import KIND_NAMES, has_gradient, kind_code
from ..framework.machine import default_device
from ..graph.casts.insert import rewritten_symbol
from ..graph.ir import Node, Usage, single_node_graph
from ..policy.policy import Policy

__all__ = ["DenseGraphs"]

# The most elements of a recorded weight. Its gradient needs a copy of the weight before the cast,
# and autograd keeps a cast for each use, which longer calls share (see `framework.arrays`).
_SMALL_WEIGHT = 2**16
# The most graphs of a thread, as a program may make layers without end.
_MANY_GRAPHS = 1024


class DenseGraphs(threading.local):
    """The graphs that one policy runs eager dense layers as, in each thread, made on demand."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        # Without a GPU every array is on the policy's device.
        self._applies = policy.device == default_device() == "cpu"
        self._ops: Dict[Tuple[Any, ...], Optional[CachedOp]] = {}

    def run(
        self, arrays: Sequence[NDArray], keys: Sequence[str], vals: Sequence[Any], is_np_op: bool
    ) -> Optional[NDArray]:
        """Return the output of an eager `FullyConnected`; None if it has to be called as it is."""
        if not self._applies or len(arrays) < len(("data", "weight")):
            return None
        shape = arrays[1].shape
        recorded = autograd.is_recording()
        if (recorded and math.prod(shape) > _SMALL_WEIGHT) or not all(arrays[0].shape):
            return None
        leaves = tuple([has_gradient(array) for array in arrays]) if recorded else ()
        if not all(leaves[1:]):
            # Autograd would take a frozen bias for a variable, and `needs_separate_bias` for a
            # computed one. A cast of its own is not recorded.
            return None
        codes = tuple([kind_code(array) for array in arrays])
        # A cached op plans its memory anew when shapes change: give each weight its own.
        key = (codes, tuple(keys), tuple(map(str, vals)), shape, leaves, is_np_op)
        try:
            op = self._ops[key] if key in self._ops else self._make_op(key)
            return op(*arrays) if op is not None else None
        except MXNetError:
            # Arrays of two devices, such as shared memory, are right in single calls. Other errors
            # occur there again, and name the operator of the program.
            return None

    def _make_op(self, key: Tuple[Any, ...]) -> Optional[CachedOp]:
        """Return a new cached op for calls of this key; None if they need no cast. Cache it."""
        codes, names, values, _, leaves, is_np_op = key
        node = Node("FullyConnected", "", dict(zip(names, values)))
        symbol_class = NumpySymbol if is_np_op else Symbol
        graph = single_node_graph(node, [{}] * len(codes))
        inputs = graph.input_names
        usage = Usage(
            dtypes={n: KIND_NAMES.get(code, "other") for n, code in zip(inputs, codes)},
            # Whether a leaf's gradient is accumulated is unknown here: assume that it is.
            accumulated=frozenset(name for name, leaf in zip(inputs, leaves) if leaf),
            training=bool(leaves),
            restore=False,
        )
        symbol = rewritten_symbol(graph, symbol_class, self._policy, usage)
        if len(self._ops) >= _MANY_GRAPHS:
            self._ops.clear()
        self._ops[key] = None if symbol is None else CachedOp(symbol, [("inline_limit", 0)])
        return self._ops[key]
