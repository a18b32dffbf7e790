"""`operator_stats`: count operators by dtype, and casts with the bytes they move."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any, ContextManager, NamedTuple, Sequence

from mxnet.symbol import Symbol

from ...errors import unknown
from ...framework import arrays
from ...framework.keywords import checked_call
from ...framework.operators import by_handle, handle_of
from ...framework.patching import Original, Patch
from ...framework.wording import counted
from ...graph.inspect import FLOATS, Census, is_cast, take_census
from ...graph.ir import CASTS, Graph
from ..tables import text_table
from .observing import Arrays, Observer, patch_over

#: `NDArray.astype` runs as `_copyto`.
_CASTS = frozenset(map(handle_of, CASTS | {"_copyto"}))


class OperatorCount(NamedTuple):
    """The number of calls of one operator in one dtype.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.debugging.operator_stats() as stats:
    ...     _ = mx.nd.exp(mx.nd.array([1.0]))
    >>> stats.operators
    (OperatorCount(operator='exp', dtype='float32', calls=1),)

    Parameters
    ----------
    operator : str
        The name of the operator.
    dtype : str
        The dtype that it computed in.
    calls : int
        The number of calls.
    """

    operator: str
    dtype: str
    calls: int


class CastCount(NamedTuple):
    """The number of casts from one dtype to another, and the bytes that they move.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.debugging.operator_stats() as stats:
    ...     _ = mx.nd.array([1.0, 2.0]).astype("float16")
    >>> stats.casts
    (CastCount(source='float32', target='float16', casts=1, bytes=12),)

    Parameters
    ----------
    source : str
        The dtype cast from.
    target : str
        The dtype cast to.
    casts : int
        The number of casts.
    bytes : int
        The bytes that they read and write.
    """

    source: str
    target: str
    casts: int
    bytes: int


class OperatorStats(Observer):
    """The result of `operator_stats`: operators and casts that ran; prints as a table.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.debugging.operator_stats() as stats:
    ...     _ = mx.nd.exp(mx.nd.array([1.0]))
    >>> stats["exp"], len(stats.casts)
    ({'float32': 1}, 0)

    `operators` is a tuple of `OperatorCount`, `casts` a tuple of `CastCount`. The statistics may be
    read while the context is open, and are final after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._census = Census.empty()
        #: The censuses of graphs by the symbol's id, and the inputs' dtypes and shapes.
        self._graphs: dict[Any, tuple[Symbol, Census]] = {}
        self._census_lock = threading.Lock()

    @property
    def operators(self) -> tuple[OperatorCount, ...]:
        """The numbers of operator calls by operator and dtype, the largest first."""
        counts = self._census.operators.most_common()
        return tuple(OperatorCount(*key, calls) for key, calls in counts)

    @property
    def casts(self) -> tuple[CastCount, ...]:
        """The numbers and bytes of casts by pair of dtypes, the most bytes first."""
        counts = self._census.bytes.most_common()
        return tuple(CastCount(*key, self._census.casts[key], size) for key, size in counts)

    def __getitem__(self, operator: str) -> dict[str, int]:
        """Return the number of calls of an operator by dtype."""
        found = {row.dtype: row.calls for row in self.operators if row.operator == operator}
        if not found:
            raise unknown("operator", operator, sorted({row.operator for row in self.operators}))
        return found

    def summary(self) -> str:
        """Return a line with the numbers of operator calls and of casts."""
        calls = sum(row.calls for row in self.operators)
        casts = sum(row.casts for row in self.casts)
        return f"{counted(calls, 'call')}, {counted(casts, 'cast')}"

    def __str__(self) -> str:
        operators = text_table(("operator", "dtype", "calls"), self.operators)
        rows = [(f"{row.source} to {row.target}", row.casts, row.bytes) for row in self.casts]
        return f"{operators}\n\n{text_table(('cast', 'calls', 'bytes'), rows)}\n\n{self.summary()}"

    __repr__ = __str__  # for notebooks

    # ------------------------------------------------------------------ while it counts

    def patches(self) -> Sequence[Patch]:
        """Return the patches of `Observer`, and one that counts the casts of mxamp itself."""
        return [*super().patches(), patch_over(arrays, "invoke", self.on_call)]

    def on_call(self, original: Original, handle: int, inputs: Arrays, *rest: object) -> object:
        """Run an eager call, and count it by the dtype in which it computed."""
        # Before the call, which may write to its input.
        source = arrays.dtype_of(inputs[0]) if inputs else ""
        outputs = original(handle, inputs, *rest)
        first = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
        target = arrays.dtype_of(first)
        with self._census_lock:
            if handle in _CASTS and is_cast(source, target):
                self._census.add_cast(source, target, first.size)
            else:
                # In low precision the output tells: the inputs are cast inside the call.
                dtype = source if source in FLOATS and target not in FLOATS else target
                self._census.operators[by_handle()[handle].name, dtype] += 1
        return outputs

    def on_block(self, symbol: Symbol, inputs: Arrays, run: object) -> object:
        """Count the operators and casts of a hybridized block's graph."""
        self.on_graph(symbol, inputs)
        return run

    def on_graph(self, symbol: Symbol, inputs: Arrays, *_: object) -> ContextManager[None]:
        """Count the operators and casts of an executor's graph; return a no-op context."""
        dtypes, shapes = arrays.dtypes_of(inputs), tuple([array.shape for array in inputs])
        key = id(symbol), dtypes, shapes
        with self._census_lock:
            if key not in self._graphs:
                names, graph = symbol.list_inputs(), Graph.from_symbol(symbol)
                census = take_census(graph, dict(zip(names, dtypes)), dict(zip(names, shapes)))
                self._graphs[key] = symbol, census  # the symbol is kept alive: its id is the key
            self._census.add(self._graphs[key][1])
        return nullcontext()


@checked_call
def operator_stats() -> ContextManager[OperatorStats]:
    """Count the operators that run in a `with` block by dtype, and the bytes that casts move.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.autocast("bfloat16"), amp.debugging.operator_stats() as stats:
    ...     _ = mx.nd.FullyConnected(
    ...         mx.nd.ones((64, 512)), mx.nd.ones((1024, 512)), num_hidden=1024, no_bias=True
    ...     )
    >>> stats["FullyConnected"]
    {'bfloat16': 1}
    >>> stats.casts[0].source, stats.casts[0].target
    ('float32', 'bfloat16')

    The counts cover the forward passes in all threads: eager calls, hybridized blocks, bound
    symbols (modules), and the operators of MXNet's optimizers. Not counted are backward passes,
    whose casts mirror the casts of the forward pass, and SGD steps that mxamp computes in NumPy. A
    fused operator of oneDNN counts as one.
    The body of a `foreach` counts once for each step. In graphs, the bodies of `while_loop` and
    `cond` do not count. If an array's shape depends on values, as after `boolean_mask`, a cast of
    the array in a graph counts without bytes.

    The dtype of an operator is the precision that `explain` shows. On a CPU, an operator counts as
    float16 if MXNet rounds the operator's outputs to float16, even if a float32 kernel computes
    the outputs.

    Cost, on a 2.5 GHz Xeon: about 5 us for each eager call, and 40 us for each run of a graph.
    """
    return OperatorStats()
