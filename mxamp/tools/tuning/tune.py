"""`tune`: a policy for one model on one machine, found by measuring both."""

import copy
import functools
import numbers
from typing import Any, Callable, Optional, Sequence

import mxnet as mx

from ...errors import ArgumentError
from ...framework.arrays import on_device
from ...framework.machine import default_dtype
from ...framework.wording import one_of, shown
from ...policy.active import suspended
from ...policy.evidence import MODES
from ...policy.policy import Policy
from ...policy.targets import DEFAULT_TARGET, check_target
from ...scaling.numbers import count, positive_number
from .accuracy import Accuracy, Tolerance
from .deadline import Deadline, seconds_of, watched
from .subject import Subject
from .tuner import Tuner

__all__ = ["tune"]

_LOSSES = (
    mx.metric.MAE, mx.metric.MSE, mx.metric.RMSE, mx.metric.CrossEntropy, mx.metric.Loss,
    mx.metric.NegativeLogLikelihood, mx.metric.Perplexity,
)  # fmt: skip

NEEDS_LOSS = "mode='training' compares gradients too: give the loss, loss(output, label)"
NO_GRADIENTS = "mode='inference' has no use for a loss: leave one of the two out"
METRIC_MODE = (
    "a metric is measured in inference, and a loss asks for training: give one of the two, or rtol "
    "beside the loss"
)
NOT_A_METRIC = (
    "metric must be a metric of MXNet's, its name, or a function of label and prediction (NumPy "
    "arrays) that returns a number, not {given}"
)
OTHER_DEVICE = (
    "the policy to start from is for the {own}, and the data is on {data}: put net and data there, "
    "or give a policy for where they are"
)
NOT_LOWERED = (
    "the policy to start from computes all in float32: give one that lowers operators, such as "
    "Policy.default('bfloat16')"
)
LESS_IS_BETTER = (
    "of the metric {given} less is better, and tune wants one of which more is: give a function "
    "that returns its negative"
)
NO_METRIC = "min_metric is the least value of a metric: give the metric too"


def tune(
    net: Any,
    data: Any,
    loss: Optional[Callable[[Any, Any], Any]] = None,
    *,
    target_dtype: Any = None,
    mode: Optional[str] = None,
    rtol: Optional[float] = None,
    metric: Any = None,
    min_metric: Optional[float] = None,
    budget: Any = "60s",
    seed: int = 0,
    progress: bool = True,
    policy: Optional[Policy] = None,
    timed: bool = True,
) -> Policy:
    """Return a policy that is as accurate as you ask, and never slower than float32, as measured.

    ::

        policy = amp.tune(net, [batch1, batch2], budget="60s")
        print(policy.evidence)  # what was measured, and the layers by what they cost
        fast = amp.convert_hybrid_block(net, policy=policy, example_inputs=batch1)
        policy.save("net.toml")  # and Policy.load("net.toml") later

    The model is run in float32 and under mxamp's policy, on your data. Where the errors are larger
    than you allow, a smallest set of layers is searched for that has to stay in float32; the report
    says whether a smaller one is ruled out. Then
    the ways to run the model are timed in turns on the first batch: in low precision and in
    float32, each with and without the faster equivalents of operators, and, for inference,
    under `init`, converted, and converted with `fuse=True`. Where nothing is faster than float32,
    the policy that comes back changes nothing.

    Parameters
    ----------
    net : HybridBlock, or (symbol, arg_params, aux_params)
        The model, in float32. It is left as it is, but that parameters whose shape waits for a
        first input get one. (Where it draws random numbers other than for `Dropout`, MXNet's
        generator, which can't be read, is left at another point.)
    data : NDArray, tuple or dict, or an iterable of them
        One batch, or a few; of an iterable the first 16 are used. With a loss or a metric, a batch
        is a tuple of the net's inputs and the label; for a saved model, a dict of inputs by name.
    loss : callable, optional
        Called with the net's output and the label. Its gradients are compared too then, and
        training steps are timed.
    target_dtype : str or dtype, optional
        "float16" or "bfloat16"; by default float16 for GPUs and bfloat16 for CPUs. float16 on a CPU
        is never fast: it is tuned for accuracy alone, and nothing is timed.
    mode : str, optional
        "training" where a loss is given, else "inference".
    rtol : float, optional
        The largest relative error (in the L2 norm) of an output in any batch, and of a
        parameter's gradient. By default 0.05 for outputs, and 0.5 for gradients. In training the
        default allows for nets that are sensitive: an output may have twice the error that
        rounding the weights makes, and gradients are not compared that this changes by half of
        what is allowed.
    metric : EvalMetric, str or callable, optional
        In place of `rtol`, or beside it: as `mx.metric.create` takes it. More is better.
    min_metric : float, optional
        The least value of the metric. By default 99 % of what the float32 model has.
    budget : float or str, default "60s"
        Seconds, or a text such as "90s", "5m", "1h". The search stops there, or at Ctrl-C, with
        the best that it has found. The float32 runs that all is compared with are always made.
    seed : int, default 0
        Of the random numbers. The same seed gives the same layers; what is as fast as another
        thing may change.
    progress : bool, default True
        Show a bar with the time left, if standard error is a terminal.
    policy : Policy, optional
        Where the search starts, in place of mxamp's own policy.
    timed : bool, default True
        False looks at accuracy alone: the policy is in low precision even if that is slow here.
        For models that will run on another machine.

    Returns
    -------
    Policy
        With `evidence`. Used with another model, or on another machine, it warns.

    Raises
    ------
    ArgumentError
        Something else than a float32 model that can be traced, data that does not fit, or
        arguments that contradict each other.
    StateError
        The float32 model gives Inf or NaN, changes too much by one rounding of its weights, or has
        a metric below `min_metric`.

    Holds a copy of the parameters for each form that is timed, and all activations of one batch.
    """
    if mode not in (None, *MODES):
        raise ArgumentError(f"mode must be {one_of(MODES)}, not {shown(mode)}")
    if mode == "training" and loss is None:
        raise ArgumentError(NEEDS_LOSS)
    if mode == "inference" and loss is not None:
        raise ArgumentError(NO_GRADIENTS)
    base = _base_of(target_dtype, policy)
    seed = count("seed", seed)
    tolerance = _tolerance(rtol, metric, min_metric, loss is not None)
    deadline = Deadline(seconds_of(budget))
    subject = Subject(net, data, loss, labelled=loss is not None or metric is not None)
    if not on_device(subject.arrays(), base.device):
        raise ArgumentError(OTHER_DEVICE.format(own=base.device, data=subject.context))
    with watched(deadline, progress), subject.seeds.kept(), suspended():
        accuracy = Accuracy(subject, base.target_dtype, tolerance, deadline, seed)
        return Tuner(accuracy, base, deadline, seed, timed).run()


def _base_of(target_dtype: Any, policy: Optional[Policy]) -> Policy:
    if policy is None:
        return Policy.default(target_dtype or default_dtype())
    given = DEFAULT_TARGET if target_dtype is None else check_target(target_dtype)
    # What was measured of it before is of no account.
    start = policy.with_evidence(None) if isinstance(policy, Policy) else policy
    wanted = Policy.from_lists(given, policy=start)
    if not wanted.lowers:
        raise ArgumentError(NOT_LOWERED)
    return wanted


def _tolerance(rtol: Any, metric: Any, min_metric: Any, training: bool) -> Tolerance:
    if rtol is not None:
        rtol = positive_number("`rtol`", rtol)
    if metric is None:
        if min_metric is not None:
            raise ArgumentError(NO_METRIC)
        return Tolerance(rtol)
    if training:
        raise ArgumentError(METRIC_MODE)
    if min_metric is not None and not isinstance(min_metric, numbers.Real):
        raise ArgumentError(f"min_metric must be a number, not {shown(min_metric)}")
    try:
        created = mx.metric.create(metric)
    except Exception:  # MXNet raises what its registry does
        raise ArgumentError(NOT_A_METRIC.format(given=shown(metric))) from None
    if isinstance(created, _LOSSES):
        raise ArgumentError(LESS_IS_BETTER.format(given=shown(metric)))
    least = None if min_metric is None else float(min_metric)
    return Tolerance(rtol, functools.partial(_measured, created), least)


def _measured(metric: Any, labels: Sequence[Any], predictions: Sequence[Any]) -> float:
    """Return a metric over all batches; the one that was given stays as it is."""
    fresh = copy.deepcopy(metric)
    fresh.reset()
    for label, prediction in zip(labels, predictions):
        fresh.update(label, prediction)
    value = fresh.get()[1]
    if not isinstance(value, numbers.Real):
        raise ArgumentError(NOT_A_METRIC.format(given=f"one of {shown(value)}"))
    return float(value)
