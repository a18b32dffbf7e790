"""The model under tuning, its error under a policy, and whether that is within the tolerance."""

import contextlib
import itertools
import math
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.context import current_context
from mxnet.gluon import Block, HybridBlock
from mxnet.ndarray.ndarray import NDArray

from ...convert.outputs import Distance, error_reason
from ...errors import ArgumentError, StateError
from ...framework.arrays import cast, dtypes_of, plain_array
from ...framework.machine import dtype_name
from ...framework.wording import counted, shortened
from ...graph.ir import Graph, Usage
from ...patches.autocast import autocast
from ...policy.active import suspended
from ...policy.policy import Policy
from ...scaling.finite import all_finite
from ...scaling.scaler import LossScaler
from ..debugging.batches import Batch, batches_of, block_of, check_loss
from ..debugging.isolated import (
    IsolatedRun,
    Recorded,
    Seeds,
    arrays_in,
    copied,
    dense_values,
    explained_errors,
    loss_of,
    trained_arrays,
)
from .deadline import Deadline

__all__ = [
    "MOST_BATCHES",
    "OUTPUTS",
    "Accuracy",
    "Subject",
    "Tolerance",
    "Verdict",
    "check_float32",
]

#: The number of batches of `data` that are used.
MOST_BATCHES = 16
#: The relative errors that are allowed by default: of outputs, and of gradients.
OUTPUTS, GRADIENTS = 0.05, 0.5
#: In training, an output may have so many times the error that rounding the weights causes.
_TIMES_ROUNDED = 2.0
#: The largest share of the tolerance that noise may have.
_NOISE = 0.25

NO_GRAPH = (
    "tune searches in the model's graph, and block {name!r} can't be traced on this data: give a "
    "HybridBlock, and as a batch the arguments of one call. Hybridized, a call shows why"
)
NO_LABEL = (
    "a saved model is tuned without a loss and without a metric, for its data has no labels: "
    "import it as a SymbolBlock to give one"
)
NOT_FLOAT32 = (
    "the model must be in float32, and parameter {name!r} is {dtype}: "
    "convert the model to float32 first, with convert_hybrid_block(net, 'float32') or "
    "mxamp convert --dtype float32"
)
NOT_MEASURED = "the model does not run on this data: {why}"
NOT_FINITE = (
    "the model can't be tuned: in float32 already, {elements} of {name} are Inf or NaN. "
    "mxamp.debugging.check_numerics finds the operator that they come from"
)
UNSTABLE = (
    "the model can't be tuned: its outputs change by {noise:.1e} when each weight moves to the "
    "next number of float32, which hides errors of {limit:.1e}. Give other data{more}"
)
NO_NUMBER = "the metric of the float32 model is {found}: give one that has a finite value for it"
BELOW = "no policy satisfies min_metric={wanted:g}: the float32 model itself has {found:g}"
UNKNOWN = (
    "{gradients} could not be compared: they are zero, or rounding the weights alone changes most "
    "of them: {names}."
)

#: The results of a run as float32 arrays: outputs by this prefix and their number, gradients by
#: the names of their parameters.
Results = Dict[str, Any]
_OUTPUT = "output "


def check_float32(block: Block) -> None:
    """Raise `ArgumentError` if a parameter of a block is in another float dtype than float32."""
    for param in block.collect_params().values():
        dtype = dtype_name(param.dtype)
        if "float" in dtype and dtype != "float32":
            raise ArgumentError(NOT_FLOAT32.format(name=param.name, dtype=dtype))


class Subject:
    """The model to tune, as a copy `block` with its own parameters, and its batches of data.

    It runs in training mode with a `loss`, and in inference without one.
    """

    def __init__(
        self, model: Any, data: Any, loss: Optional[Callable[[Any, Any], Any]], labelled: bool
    ) -> None:
        check_loss(loss)
        self.loss, self.training = loss, loss is not None
        #: What Gluon puts before the names of the model's layers.
        self.prefix: str = model.prefix if isinstance(model, Block) else ""
        batches = batches_of(data, labelled)
        if not isinstance(model, Block):
            if labelled:
                raise ArgumentError(NO_LABEL)
            model, batches = block_of(model, batches)
        self.batches: List[Batch] = list(itertools.islice(batches, MOST_BATCHES))
        self.more = next(iter(batches), None) is not None
        inputs = self.batches[0].inputs
        explained = explained_errors(model, inputs, labelled, label_by="loss= or metric=")
        with suspended(), explained:
            self.block = copied(model, inputs)
            traced = self.block is not model and isinstance(self.block, HybridBlock)
            if not traced:
                _check_that_it_runs(model, inputs)
        if not traced:
            raise ArgumentError(NO_GRAPH.format(name=model.name))
        check_float32(self.block)
        variables, symbol = self.block._cached_graph
        self.graph, self.symbol_class = Graph.from_symbol(symbol), type(symbol)
        #: The arrays of the first batch's inputs, by name.
        self.inputs: Dict[str, NDArray] = {
            variable.name: array
            for variable, array in zip(variables, arrays_in(self.batches[0].inputs))
        }
        self.context = next((a.context for a in self.inputs.values()), current_context())
        self.seeds = Seeds()
        self._scale = LossScaler().loss_scale  #: the last loss scale of a float16 run

    def values(self) -> Dict[str, NDArray]:
        """Return the values of the graph's variables, by name, for the first batch.

        They are detached; auxiliary states are copies.
        """
        params = self.block.collect_params().values()
        values = {**{param.name: param.list_data()[0] for param in params}, **self.inputs}
        values = {name: array.detach() for name, array in values.items()}
        for name in self.block._cached_graph[1].list_auxiliary_states():
            values[name] = values[name].copy()
        return values

    def described(self) -> Tuple[Tuple[str, str, Tuple[int, ...]], ...]:
        """Return name, dtype and shape of each input array of the first batch."""
        arrays = list(self.inputs.values())
        shapes = [tuple(array.shape) for array in arrays]
        return tuple(zip(self.inputs, dtypes_of(arrays), shapes))

    def usage(self) -> Usage:
        """Return the dtypes and shapes of the graph's variables, and whether it trains."""
        values = self.values()
        dtypes = dict(zip(values, dtypes_of(list(values.values()))))
        shapes = {name: array.shape for name, array in values.items()}
        return Usage(dtypes, shapes, accumulated=frozenset(values), training=self.training)

    def run(
        self, batch: Batch, policy: Optional[Policy], block: Optional[HybridBlock] = None
    ) -> Results:
        """Return the outputs and gradients of a batch under a policy, or in float32 with None.

        The model runs, or instead of it a converted `block`.

        Random numbers are the same in each run. In float16 the loss is scaled by the largest
        power of two up to 2**16 at which all gradients are finite.
        """
        run, block = IsolatedRun(self.seeds), block or self.block
        outputs: List[Any] = []
        gradients: Results = {}
        loss = self.loss

        def record_outputs() -> Any:
            with autograd.record():
                outputs[:] = [block(*batch.inputs)]
                return None if loss is None else loss_of(loss, outputs[0], batch.label)

        with autocast(enabled=policy is not None, policy=policy), run.opened():
            if loss is None:
                with autograd.pause(train_mode=False):
                    outputs = [block(*batch.inputs)]
            else:
                gradients = self._gradients(Recorded(block, record_outputs), policy)
        found = {f"{_OUTPUT}{i}": dense_values(a) for i, a in enumerate(arrays_in(outputs))}
        return {**found, **gradients}

    def _gradients(self, loss: Recorded, policy: Optional[Policy]) -> Results:
        """Return the trained parameters' gradients by name, unscaled.

        In float16 the loss is scaled by the largest scale at which all are finite. The search for
        it starts from the last one, since backward passes are expensive.
        """
        params = trained_arrays(self.block)
        arrays, scale = list(params.values()), 1.0
        if policy is not None and policy.target_dtype == "float16":
            most, scale = LossScaler().loss_scale, self._scale
            while scale > 1 and not all_finite(loss.gradients(arrays, scale)):
                scale /= 2
            if scale == self._scale:
                while scale < most and all_finite(loss.gradients(arrays, scale * 2)):
                    scale *= 2
            self._scale = scale
        found = loss.gradients(arrays, scale)
        return {name: dense_values(g) / np.float32(scale) for name, g in zip(params, found)}

    @contextlib.contextmanager
    def with_weights(self, change: Callable[[NDArray], NDArray]) -> Iterator[None]:
        """Context in which each trained parameter holds `change` of its value."""
        arrays = [plain_array(array) for array in trained_arrays(self.block).values()]
        with suspended(), autograd.pause():
            kept = [array.copy() for array in arrays]
            for array in arrays:
                change(array).copyto(array)
        try:
            yield
        finally:
            with suspended(), autograd.pause():
                for array, value in zip(arrays, kept):
                    value.copyto(array)


def _random_neighbors(seed: int) -> Callable[[NDArray], NDArray]:
    """Return a function that moves each number of an array to the next float32, up or down."""
    generator = np.random.RandomState(seed)

    def random_neighbors(array: NDArray) -> NDArray:
        values = array.asnumpy()
        towards = np.where(generator.random_sample(values.shape) < 0.5, -np.inf, np.inf)  # noqa: PLR2004
        # Zeros stay: the next number is a denormal, which no rounding gives.
        moved = np.where(values == 0, values, np.nextafter(values, towards.astype(values.dtype)))
        return mx.nd.array(moved, ctx=array.context, dtype=array.dtype)

    return random_neighbors


class Tolerance(NamedTuple):
    """The allowed errors: relative ones up to `rtol`, or a metric of at least `min_metric`."""

    rtol: Optional[float] = None
    metric: Optional[Callable[[Sequence[Any], Sequence[Any]], float]] = None
    min_metric: Optional[float] = None


class Verdict(NamedTuple):
    """The errors of the model under a policy."""

    #: the largest relative error of an output in a batch; Inf where finite elements were lost
    error: float
    gradient_error: Optional[float]  #: the same of the parameters' gradients
    metric: Optional[float]
    within: bool  #: all of it is within the tolerance


def _check_that_it_runs(block: Block, inputs: Sequence[Any]) -> None:
    """Raise if a block that can't be traced does not run either."""
    try:
        for array in arrays_in(block(*inputs)):
            array.wait_to_read()
    except MXNetError as error:
        raise ArgumentError(NOT_MEASURED.format(why=error_reason(error))) from None
    except (TypeError, ValueError):  # the arguments may not be the block's
        raise
    except Exception:  # the user's own code
        return


class Accuracy:
    """Compares runs of a model with float32 baseline runs, which are made once.

    Raises `StateError` if float32 can't be the baseline: its outputs are not finite, or one
    rounding of the weights changes them about as much as the tolerance.
    """

    def __init__(
        self, subject: Subject, dtype: str, tolerance: Tolerance, deadline: Deadline, seed: int
    ) -> None:
        self.subject, self.tolerance, self.deadline = subject, tolerance, deadline
        self.evaluations = 0
        self.seconds = 0.0  #: of the longest evaluation
        self._known: Dict[Policy, Verdict] = {}
        with deadline.phase("float32"):
            try:
                self._plain = self._run_batches(None)
            except MXNetError as error:
                raise ArgumentError(NOT_MEASURED.format(why=error_reason(error))) from None
        for name, values in (item for run in self._plain for item in run.items()):
            bad = int((~np.isfinite(values)).sum())
            if bad:
                raise StateError(NOT_FINITE.format(elements=counted(bad, "element"), name=name))
        metric = self._metric_value(self._plain)
        self.min_metric = None if metric is None else self._min_metric(metric)
        #: The verdict on float32 itself.
        self.plain = Verdict(0.0, 0.0 if subject.training else None, metric, within=True)
        with deadline.phase("float32, disturbed"):
            with subject.with_weights(_random_neighbors(seed)):
                noise = self._distances(self._run_batches(None))
            moved: Mapping[str, Distance] = {}
            if subject.training and tolerance.rtol is None:
                with subject.with_weights(lambda array: cast(cast(array, dtype), "float32")):
                    moved = self._distances(self._run_batches(None))
        #: The allowed relative error of each output, and of each gradient that can be compared.
        self.limits = self._error_limits(noise, moved)
        #: Gradients that are left out: rounding changes them in float32 too.
        self.unknown = sorted(set(noise) - set(self.limits))

    def measure(self, policy: Policy, block: Optional[HybridBlock] = None) -> Verdict:
        """Return the errors of the model under a policy, or of a converted `block` of it.

        Those of a policy are measured once. Raises `OutOfTimeError` if there is no time left.
        """
        if block is None and policy in self._known:
            return self._known[policy]
        self.deadline.check(self.seconds, whole=True)
        began = self.deadline.spent
        verdict = self._verdict_on(self._run_batches(policy if block is None else None, block))
        self.evaluations += 1
        self.seconds = max(self.seconds, self.deadline.spent - began)
        if block is None:
            self._known[policy] = verdict
        return verdict

    def _run_batches(
        self, policy: Optional[Policy], block: Optional[HybridBlock] = None
    ) -> List[Results]:
        """Return the results of each batch under a policy, or in float32 with None."""
        return [self.subject.run(batch, policy, block) for batch in self.subject.batches]

    def _distances(self, runs: Sequence[Results]) -> Dict[str, Distance]:
        """Return the distance of each output and gradient from float32's, by name, over batches."""
        found: Dict[str, Distance] = {}
        for plain, run in zip(self._plain, runs):
            for name, values in plain.items():
                distance = found.setdefault(name, Distance())
                # A gradient that is zero for this batch has no relative error.
                if name.startswith(_OUTPUT) or values.any() or not np.isfinite(run[name]).all():
                    distance.add(name, values, run[name])
        return found

    def _verdict_on(self, runs: Sequence[Results]) -> Verdict:
        """Return the errors of the batches' results, and whether they are within the tolerance."""
        errors = {name: _relative_error(d) for name, d in self._distances(runs).items()}
        known = {name: errors[name] for name in self.limits}
        outputs = [error for name, error in errors.items() if name.startswith(_OUTPUT)]
        gradients = [error for name, error in known.items() if not name.startswith(_OUTPUT)]
        within = all(error <= self.limits[name] for name, error in known.items())
        metric = self._metric_value(runs)
        if metric is not None and self.min_metric is not None:
            within = metric >= self.min_metric and (self.tolerance.rtol is None or within)
        gradient_error = max(gradients, default=0.0) if self.subject.training else None
        return Verdict(max(outputs, default=0.0), gradient_error, metric, within)

    def _error_limits(
        self, noise: Mapping[str, Distance], moved: Mapping[str, Distance]
    ) -> Dict[str, float]:
        """Return the largest allowed error of each output and gradient, by name.

        `noise` are the distances after moving each weight to the next float32, and `moved` after
        rounding the weights. Raises `StateError` if noise alone moves an output too far; gradients
        that noise or rounding moves too far are left out.
        """
        rtol = self.tolerance.rtol
        limits: Dict[str, float] = {}
        for name, distance in noise.items():
            size = _relative_error(distance)
            rounding = moved[name].relative if name in moved else 0.0
            if name.startswith(_OUTPUT):
                limit = max(rtol or OUTPUTS, _TIMES_ROUNDED * rounding)
                if size > limit * _NOISE:
                    more = "" if rtol is None else f", or an `rtol` of {size / _NOISE:.1e} or more"
                    raise StateError(UNSTABLE.format(noise=size, limit=limit, more=more))
                limits[name] = limit
                continue
            limit = rtol or GRADIENTS
            known = max(size, rounding * _NOISE) <= limit * _NOISE
            # A gradient that is zero in float32 has no relative error.
            if known and any(np.any(run[name]) for run in self._plain):
                limits[name] = limit
        return limits

    def _metric_value(self, runs: Sequence[Results]) -> Optional[float]:
        """Return the metric of the batches' results, or None without a metric."""
        if self.tolerance.metric is None:
            return None
        labels = [arrays_in([batch.label]) for batch in self.subject.batches]
        # Without a loss, all results are outputs.
        predictions = [[mx.nd.array(values) for values in run.values()] for run in runs]
        return float(self.tolerance.metric(labels, predictions))

    def _min_metric(self, metric: float) -> float:
        """Return the least allowed metric, by default 99 % of `metric`, which is float32's."""
        wanted = self.tolerance.min_metric
        if not math.isfinite(metric):
            raise StateError(NO_NUMBER.format(found=metric))
        if wanted is None:
            return metric - 0.01 * abs(metric)
        if not metric >= wanted:
            raise StateError(BELOW.format(wanted=wanted, found=metric))
        return wanted

    def notes(self) -> List[str]:
        """Return a note on the gradients that could not be compared, if there are any."""
        gradients = counted(len(self.unknown), "gradient")
        names = shortened(self.unknown)
        return [UNKNOWN.format(gradients=gradients, names=names)] if self.unknown else []


def _relative_error(distance: Distance) -> float:
    """Return the relative error of a distance; Inf if finite elements were lost."""
    return math.inf if distance.lost else distance.relative
