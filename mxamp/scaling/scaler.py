"""Loss scalers: pure state transitions, no MXNet.

float16 gradients below 6e-8 become zero. Loss scaling multiplies the loss by a large scale and the
gradients by its inverse before the update. The largest scale that does not overflow is found by
trying (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2).

After each step `update` takes whether all gradients were finite, and returns the scale of the next
backward pass.
"""

import logging
import math
import numbers
from typing import Any, Dict, Mapping, Tuple, Type, TypeVar

from ..errors import ArgumentError
from ..framework.keywords import checked_call
from ..framework.wording import shown

__all__ = [
    "Float32Scaler",
    "LossScaler",
    "NoScaler",
    "Scaler",
    "StaticLossScaler",
    "from_state_dict",
    "positive_number",
    "whole_number",
]

logger = logging.getLogger("mxamp")

STATE_VERSION = 1
NO_RECOMMENDATION = (
    "calibrated takes the result of amp.debugging.gradient_histogram, not {given}, and finds "
    "init_scale itself"
)
NO_STATE = (
    "the state must be what state_dict of a {kind} gives, not {given}: version {version} has the "
    "fields {fields}"
)
OTHER_KIND = "the states were saved with %r, and this trainer has %r: it keeps its own"

_LossScaler = TypeVar("_LossScaler", bound="LossScaler")


DYNAMIC = ": without arguments, LossScaler() and GradScaler() scale dynamically"
NO_DEVICE = ": leave the device out, as in GradScaler()"


def positive_number(name: str, value: Any) -> float:
    """Return `value` as a float; raise unless it is a positive finite number."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        hint = DYNAMIC if isinstance(value, str) and value == "dynamic" else ""
        hint = NO_DEVICE if isinstance(value, str) and value in ("cuda", "cpu", "gpu") else hint
        raise ArgumentError(f"{name} must be a positive finite number, not {shown(value)}{hint}")
    return float(value)


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """Return `value` as an int; raise unless it is a whole number of at least `least`."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < least:
        raise ArgumentError(
            f"{name} must be a whole number of at least {least}, not {shown(value)}"
        )
    return int(value)


class Scaler:
    """A loss scale, its reaction to each step, and its saved state: the base of all scalers."""

    _fields: Tuple[str, ...] = ("loss_scale",)

    def __init__(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass.

        >>> LossScaler(init_scale=1024).loss_scale
        1024.0
        """
        return self._loss_scale

    @property
    def checks(self) -> bool:
        """Whether gradients are checked, and steps with non-finite ones skipped."""
        return True

    @property
    def origin(self) -> "Scaler":
        """The scaler that holds the scale: not `self` where several trainers share a scale."""
        return self

    @property
    def is_lowest(self) -> bool:
        """Whether an overflow can't lower the scale."""
        return True

    def set_scale(self, scale: float) -> None:
        """Set the scale; raise `ArgumentError` outside the scaler's limits."""
        self._loss_scale = positive_number("scale", scale)

    def assign_scale(self, scale: float) -> None:
        """Set the scale, and widen the limits where it is outside of them."""
        self._loss_scale = positive_number("loss_scale", scale)

    def back_off_from(self, scale: float) -> None:
        """Lower the scale to `scale`, of another scaler, with which this step overflowed."""

    def update(self, finite: bool) -> float:
        """Record a step whose gradients were all `finite`, or not; return the new scale."""
        del finite
        return self._loss_scale

    def resumed(self, state: Mapping[str, Any]) -> "Scaler":
        """Return the scaler that resumes from `state` in place of this one.

        It may be of another kind. But a scaler that scales is not replaced by one that does not,
        nor the other way round: a run in float16 may resume from one in bfloat16.
        """
        saved = from_state_dict(state)
        if isinstance(saved, NoScaler) != isinstance(self, NoScaler):
            logger.warning(OTHER_KIND, saved, self)
            return self
        return saved

    def state_dict(self) -> Dict[str, Any]:
        """Return the whole state as plain numbers and strings.

        >>> StaticLossScaler(128).state_dict()
        {'kind': 'StaticLossScaler', 'version': 1, 'loss_scale': 128.0}
        """
        values = {name: getattr(self, f"_{name}") for name in self._fields}
        return {"kind": type(self).__name__, "version": STATE_VERSION, **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the `state` that `state_dict` has returned.

        >>> scaler = LossScaler()
        >>> scaler.load_state_dict(LossScaler(init_scale=1024).state_dict())
        >>> scaler.loss_scale
        1024.0

        Raises `ArgumentError`, and changes nothing, where `state` is empty, of another kind of
        scaler, of a newer mxamp, or lacks a field.
        """
        self._check_state(state)
        vars(self).update({f"_{name}": state[name] for name in self._fields})

    def _check_state(self, state: Mapping[str, Any]) -> None:
        own = {"kind": type(self).__name__, "version": STATE_VERSION}
        given = state if isinstance(state, Mapping) else {}
        same = all(given.get(name) == value for name, value in own.items())
        if not same or not given.keys() >= {*self._fields}:
            fields = ", ".join(self._fields)
            raise ArgumentError(NO_STATE.format(given=shown(state), fields=fields, **own))
        positive_number("loss_scale", state["loss_scale"])

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._loss_scale:g})"


class StaticLossScaler(Scaler):
    """A constant loss scale; steps that overflow are still skipped.

    >>> StaticLossScaler(128).loss_scale
    128.0

    Parameters
    ----------
    scale : float, default 1
        The loss scale; more than 0.
    """

    @checked_call(
        loss_scale="write StaticLossScaler(128)", init_scale="write StaticLossScaler(128)"
    )
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(positive_number("scale", scale))


class NoScaler(Scaler):
    """A scale of 1: bfloat16 has float32's range. Steps with non-finite gradients are skipped.

    >>> NoScaler().loss_scale
    1.0
    """

    def __init__(self) -> None:
        super().__init__(1.0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Float32Scaler(NoScaler):
    """A scale of 1 without a check: where "auto" has chosen float32, updates are plain MXNet's.

    Its state is that of a `NoScaler`, so state files move between machines.
    """

    @property
    def checks(self) -> bool:
        """False: plain MXNet checks no gradient."""
        return False

    def resumed(self, state: Mapping[str, Any]) -> Scaler:
        """Check `state` and return this scaler: there is nothing to resume."""
        super().resumed(state)
        return self

    def assign_scale(self, scale: float) -> None:
        """Keep the scale of 1: a script may assign a scale saved on another machine."""

    def state_dict(self) -> Dict[str, Any]:
        """Return the state of a `NoScaler`."""
        return NoScaler().state_dict()


class LossScaler(Scaler):
    """A loss scale that is lowered at each overflow and raised after a run of clean steps.

    >>> scaler = LossScaler(init_scale=1024, growth_interval=2)
    >>> [scaler.update(finite) for finite in (False, True, True)]
    [512.0, 512.0, 1024.0]

    Parameters
    ----------
    init_scale : float, default 2**16
        The first loss scale.
    growth_factor : float, default 2
        Multiplies the scale when it grows; more than 1.
    backoff_factor : float, default 0.5
        Multiplies the scale at an overflow; between 0 and 1.
    growth_interval : int, default 2000
        The scale grows after this many finite steps in a row.
    min_scale, max_scale : float, default 1 and 2**24
        The limits of the scale.
    hysteresis : int, default 1
        The scale is lowered from this many overflows on; the count restarts when the scale grows.
    """

    _fields = (
        "loss_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale",
        "max_scale", "hysteresis", "clean_steps", "overflows_left",
    )  # fmt: skip

    @checked_call(
        loss_scale="write LossScaler(init_scale=128), or StaticLossScaler(128) for a constant one",
        scale="write LossScaler(init_scale=128), or StaticLossScaler(128) for a constant one",
    )
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        hysteresis: int = 1,
    ) -> None:
        super().__init__(positive_number("init_scale", init_scale))
        self._growth_factor = positive_number("growth_factor", growth_factor)
        self._backoff_factor = positive_number("backoff_factor", backoff_factor)
        self._growth_interval = whole_number("growth_interval", growth_interval, least=1)
        self._min_scale = positive_number("min_scale", min_scale)
        self._max_scale = positive_number("max_scale", max_scale)
        self._hysteresis = whole_number("hysteresis", hysteresis, least=1)
        if self._growth_factor <= 1:
            raise ArgumentError(f"growth_factor must be more than 1, not {shown(growth_factor)}")
        if self._backoff_factor >= 1:
            raise ArgumentError(f"backoff_factor must be less than 1, not {shown(backoff_factor)}")
        self._check_limits("init_scale", self._loss_scale)
        self._clean_steps = 0
        self._overflows_left = self._hysteresis

    @classmethod
    def calibrated(
        cls: Type[_LossScaler], histogram: Any, keep: float = 0.999, **options: Any
    ) -> _LossScaler:
        """Return a scaler that starts from the scale recommended by a gradient histogram.

        ::

            histogram = amp.debugging.gradient_histogram(net, batches, loss_function)
            amp.init_trainer(trainer, amp.LossScaler.calibrated(histogram))

        Parameters
        ----------
        histogram : GradientHistogram
            Or any object whose `recommended_scale(keep)` returns a scale.
        keep : float, default 0.999
            The share of nonzero gradients that float16 has to keep at that scale.
        **options
            The arguments of `LossScaler`, except `init_scale`. Limits that are not given are
            widened to hold the scale.
        """
        if not hasattr(histogram, "recommended_scale") or "init_scale" in options:
            raise ArgumentError(NO_RECOMMENDATION.format(given=type(histogram).__name__))
        scale = positive_number("recommended_scale", histogram.recommended_scale(keep))
        limits = {"min_scale": min(scale, 1.0), "max_scale": max(scale, 2.0**24)}
        return cls(init_scale=scale, **{**limits, **options})

    def _check_limits(self, name: str, scale: float) -> None:
        if not self._min_scale <= scale <= self._max_scale:
            raise ArgumentError(
                f"{name} must be between min_scale and max_scale, {self._min_scale:g} and "
                f"{self._max_scale:g}, not {scale:g}"
            )

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        # The constructor checks the settings; the two counts at the end are not among them.
        LossScaler(state["loss_scale"], **{name: state[name] for name in self._fields[1:-2]})
        for name in self._fields[-2:]:
            whole_number(name, state[name])

    def change(self, **settings: Any) -> None:
        """Change settings, given by their names in the constructor; an error changes nothing."""
        state = self.state_dict()
        self.load_state_dict({**state, **settings})

    @property
    def is_lowest(self) -> bool:
        """Whether the scale has reached `min_scale`."""
        return self._loss_scale <= self._min_scale

    def set_scale(self, scale: float) -> None:
        """Set the scale; raise `ArgumentError` outside `min_scale` and `max_scale`.

        >>> scaler = LossScaler()
        >>> scaler.set_scale(1024)
        >>> scaler.loss_scale
        1024.0

        Parameters
        ----------
        scale : float
            The scale of the next loss.
        """
        scale = positive_number("scale", scale)
        self._check_limits("scale", scale)
        self._loss_scale = scale

    def assign_scale(self, scale: float) -> None:
        """Set the scale, and widen the limits where it is outside of them."""
        super().assign_scale(scale)
        self._min_scale = min(self._min_scale, self._loss_scale)
        self._max_scale = max(self._max_scale, self._loss_scale)

    def back_off_from(self, scale: float) -> None:
        """Lower the scale to `scale`, with which this step overflowed; a larger one would too."""
        self._loss_scale = max(min(self._loss_scale, scale), self._min_scale)

    def update(self, finite: bool) -> float:
        """Record a step whose gradients were all `finite`, or not; return the new scale."""
        if finite:
            self._clean_steps += 1
            if self._clean_steps >= self._growth_interval:
                grown = self._loss_scale * self._growth_factor
                self._loss_scale = min(grown, self._max_scale)
                self._clean_steps = 0
                self._overflows_left = self._hysteresis
        else:
            self._clean_steps = 0
            self._overflows_left = max(self._overflows_left - 1, 0)
            if not self._overflows_left:
                self._loss_scale = max(self._loss_scale * self._backoff_factor, self._min_scale)
        return self._loss_scale


def from_state_dict(state: Mapping[str, Any]) -> Scaler:
    """Return a new scaler with the state that `state_dict` returned."""
    kinds = {kind.__name__: kind for kind in (LossScaler, StaticLossScaler, NoScaler)}
    kind = state.get("kind") if isinstance(state, Mapping) else None
    scaler: Scaler = kinds.get(str(kind), LossScaler)()
    scaler.load_state_dict(state)
    return scaler
