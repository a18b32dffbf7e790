"""`operator_stats`: counts the operators that run by dtype, and the bytes that casts move."""

import contextlib
import json
import threading
import weakref
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from mxnet.executor import Executor
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ...errors import ArgumentError, InstallError, unknown
from ...framework.arrays import as_list, dtypes_of
from ...framework.wording import counted, one_of, shown
from ...graph.inspect import FLOATS, Census, Tensor, count, is_cast, precision_of
from ...graph.ir import CASTS, Graph
from ..tables import html_table, text_table
from .observing import Call, Observer, Run

__all__ = ["CastCount", "OperatorCount", "OperatorStats", "operator_stats"]

NO_PANDAS = "to_dataframe() needs pandas: pip install pandas, or use to_json()"
#: `NDArray.astype` runs as `_copyto`.
_CASTS = CASTS | {"_copyto"}
_ORDERS = ("calls", "operator", "dtype")


@dataclass(frozen=True)
class OperatorCount:
    """The calls of an operator in a dtype."""

    operator: str
    dtype: str
    calls: int


@dataclass(frozen=True)
class CastCount:
    """The casts from one dtype to another, and the bytes that they read and write."""

    source: str
    target: str
    casts: int
    bytes: int


class OperatorStats:
    """The operators and casts that ran; printing gives a table.

    `stats["dot"]` are the calls of an operator by dtype. The statistics may be read while the
    context is open, and are final after it.
    """

    def __init__(self, census: Optional[Census] = None) -> None:
        self._census = census or Census.empty()
        self._graphs: Dict[Any, _Runs] = {}
        self._lock = threading.Lock()

    @property
    def operators(self) -> Tuple[OperatorCount, ...]:
        """The operators, most calls first."""
        counts = self._counted().operators.items()
        rows = [OperatorCount(*key, calls) for key, calls in counts if calls]
        return tuple(sorted(rows, key=lambda row: (-row.calls, row.operator, row.dtype)))

    @property
    def casts(self) -> Tuple[CastCount, ...]:
        """The casts, most bytes first."""
        census = self._counted()
        rows = [CastCount(*key, n, census.bytes[key]) for key, n in census.casts.items() if n]
        return tuple(sorted(rows, key=lambda row: (-row.bytes, row.source, row.target)))

    def __getitem__(self, operator: str) -> Dict[str, int]:
        """Return the calls of an operator by dtype."""
        rows = self.operators
        found = {row.dtype: row.calls for row in rows if row.operator == operator}
        if not found:
            raise unknown("operator", operator, sorted({row.operator for row in rows}))
        return found

    def __len__(self) -> int:
        return len(self.operators)

    def filter(
        self, operator: Optional[str] = None, dtype: Optional[str] = None
    ) -> "OperatorStats":
        """Return the statistics of an operator, a dtype, or both."""
        census = self._counted()
        kept = Counter(
            {
                key: calls
                for key, calls in census.operators.items()
                if operator in (None, key[0]) and dtype in (None, key[1])
            }
        )
        return OperatorStats(census._replace(operators=kept))

    def sorted(self, by: str = "calls") -> Tuple[OperatorCount, ...]:
        """Return the operators ordered by "calls" (most first), "operator" or "dtype"."""
        if by not in _ORDERS:
            raise ArgumentError(f"the order must be {one_of(_ORDERS)}, not {shown(by)}")
        if by == "calls":
            return self.operators
        return tuple(sorted(self.operators, key=lambda row: str(getattr(row, by))))

    def to_json(self) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> Dict[str, List[Dict[str, Any]]]:
        """Return the counts as lists of dicts, under "operators" and "casts"."""
        return {
            "operators": [asdict(row) for row in self.operators],
            "casts": [asdict(row) for row in self.casts],
        }

    def to_dataframe(self) -> Any:
        """Return the operators as a DataFrame; needs pandas, which mxamp does not install."""
        try:
            import pandas
        except ImportError:
            raise InstallError(NO_PANDAS) from None
        columns = ["operator", "dtype", "calls"]
        return pandas.DataFrame([asdict(row) for row in self.operators], columns=columns)

    def __str__(self) -> str:
        return "\n".join([text_table(*self._operator_rows()), "", text_table(*self._cast_rows())])

    def _repr_html_(self) -> str:
        return html_table(*self._operator_rows()) + html_table(*self._cast_rows())

    def __repr__(self) -> str:
        calls = sum(row.calls for row in self.operators)
        casts = sum(row.casts for row in self.casts)
        return f"<OperatorStats: {counted(calls, 'call')}, {counted(casts, 'cast')}>"

    def _operator_rows(self) -> Tuple[Sequence[str], Sequence[Sequence[Any]]]:
        rows = [(row.operator, row.dtype, row.calls) for row in self.operators]
        return ("operator", "dtype", "calls"), rows

    def _cast_rows(self) -> Tuple[Sequence[str], Sequence[Sequence[Any]]]:
        rows = [(f"{c.source} to {c.target}", c.casts, c.bytes) for c in self.casts]
        return ("cast", "calls", "bytes"), rows

    # ------------------------------------------------------------------ while it counts

    def note_call(self, call: Call, outputs: Any) -> None:
        """Count an eager call."""
        inputs, results = _tensors(call.inputs), _tensors(as_list(outputs))
        with self._lock:
            if call.operator.name in _CASTS and is_cast(inputs[0].dtype, results[0].dtype):
                self._census.add_cast(inputs[0].dtype, results[0].dtype, inputs[0].size)
                return
            decision = call.decision()
            decided = decision.precision if decision is not None else None
            dtype = decided if decided in FLOATS else precision_of(inputs, results)
            self._census.operators[call.operator.name, dtype] += 1

    def note_graph(self, symbol: Symbol, inputs: Mapping[str, NDArray]) -> None:
        """Count a run of a graph; its operators are counted when the statistics are read."""
        dtypes = dtypes_of(list(inputs.values()))
        key = (id(symbol), dtypes, tuple([array.shape for array in inputs.values()]))
        with self._lock:
            runs = self._graphs.get(key)
            if runs is None:
                shapes = {name: array.shape for name, array in inputs.items()}
                runs = self._graphs[key] = _Runs(symbol, dict(zip(inputs, dtypes)), shapes)
            runs.waiting += 1

    def _counted(self) -> Census:
        """Return the counts, with the graphs that ran since the last read."""
        with self._lock:
            for runs in self._graphs.values():
                if runs.waiting:
                    self._census.add(runs.each(), runs.waiting)
                    runs.waiting = 0
            return self._census


class _Runs:
    """The runs of one graph on inputs of the same dtypes and shapes."""

    def __init__(
        self, symbol: Symbol, dtypes: Mapping[str, str], shapes: Mapping[str, Any]
    ) -> None:
        self.symbol = symbol  # kept alive, since its id is the key
        self._dtypes, self._shapes = dtypes, shapes
        self._each: Optional[Census] = None
        self.waiting = 0

    def each(self) -> Census:
        """Return the counts of one run."""
        if self._each is None:
            self._each = count(Graph.from_symbol(self.symbol), self._dtypes, self._shapes)
        return self._each


class _Counting(Observer):
    """Counts what it observes."""

    def __init__(self, stats: OperatorStats) -> None:
        super().__init__()
        self._stats = stats
        self._symbols: "weakref.WeakKeyDictionary[Executor, Symbol]" = weakref.WeakKeyDictionary()

    def on_call(self, call: Call, run: Run) -> Any:
        outputs = run(call.inputs)
        self._stats.note_call(call, outputs)
        return outputs

    on_cast = on_call

    def on_graph(self, symbol: Symbol, inputs: Sequence[NDArray], run: Callable[[], Any]) -> Any:
        self.note_graph(symbol, inputs)
        return run()

    def note_graph(self, symbol: Symbol, inputs: Sequence[NDArray]) -> None:
        self._stats.note_graph(symbol, dict(zip(symbol.list_inputs(), inputs)))

    def on_forward(self, executor: Executor, training: bool, run: Callable[[], Any]) -> Any:
        symbol = self._symbols.get(executor)
        if symbol is None:
            # The graph as it runs: with casts, and with operators that oneDNN has fused.
            symbol = self._symbols[executor] = executor.get_optimized_symbol()
        held = {**executor.arg_dict, **executor.aux_dict}
        self._stats.note_graph(symbol, {n: held[n] for n in symbol.list_inputs()})
        return run()


@contextlib.contextmanager
def operator_stats() -> Iterator[OperatorStats]:
    """Count the operators that run inside, by dtype, and the casts, with the bytes they move.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.autocast("bfloat16"), amp.debugging.operator_stats() as stats:
    ...     _ = mx.nd.FullyConnected(
    ...         mx.nd.ones((4, 8)), mx.nd.ones((2, 8)), num_hidden=2, no_bias=True
    ...     )
    >>> stats["FullyConnected"]
    {'bfloat16': 1}
    >>> stats.casts[0].source, stats.casts[0].target, stats.casts[0].casts
    ('float32', 'bfloat16', 2)

    The counts are of forward passes in all threads: eager calls, hybridized blocks and bound
    symbols (modules), with the calls of MXNet's optimizers and of mxamp. MXNet derives backward
    passes itself; their casts mirror the forward ones. An operator that oneDNN has fused counts as
    one. The body of a `foreach` counts once for each step; bodies of `while_loop` and `cond` in
    graphs do not count. Casts in graphs of arrays whose shape depends on values, as after
    `boolean_mask`, count without their bytes.

    The dtype is the precision that `explain` names. On a CPU, an operator counts as float16 if its
    values are rounded to float16, though a float32 kernel computes it.

    Costs about 30 us for an eager call and 40 us for a graph, on a 2.5 GHz Xeon.
    """
    stats = OperatorStats()
    with _Counting(stats).opened():
        yield stats


def _tensors(arrays: Sequence[NDArray]) -> Sequence[Tensor]:
    return [Tensor(*pair) for pair in zip(dtypes_of(arrays), (array.shape for array in arrays))]
