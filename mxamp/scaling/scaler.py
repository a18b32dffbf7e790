"""Loss scaling as arithmetic: pure state transitions, no MXNet.

float16 gradients below 6e-8 become zero. Multiplying the loss by a large scale, and the gradients
by its inverse before the update, keeps them; the largest scale that does not overflow is found by
trying (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2).

A scaler is told after each step whether all gradients were finite, and answers with the scale for
the next backward pass. `LossScaler` adapts, `StaticLossScaler` does not, `NoScaler` is 1 always.
"""

import logging
from typing import Any, Callable, Dict, Mapping, Tuple, Type, TypeVar

from ..errors import ArgumentError
from ..framework.wording import shown
from .numbers import positive_count, positive_number

__all__ = ["LossScaler", "NoScaler", "Scaler", "StaticLossScaler"]

logger = logging.getLogger("mxamp")

STATE_VERSION = 1
NO_RECOMMENDATION = (
    "calibrated takes what amp.debugging.gradient_histogram returns, not {given}: for a trainer or "
    "a net, call gradient_histogram with it first"
)
OTHER_KIND = "the states were saved with %r, and this trainer has %r: it keeps its own"

_LossScaler = TypeVar("_LossScaler", bound="LossScaler")


class Scaler:
    """What every loss scaler is: a scale, how it reacts to a step, and its state.

    Use one of its kinds: `LossScaler`, `StaticLossScaler` or `NoScaler`.
    """

    _fields: Tuple[str, ...] = ("loss_scale",)

    def __init__(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale

    @property
    def loss_scale(self) -> float:
        """The scale that the next backward pass uses."""
        return self._loss_scale

    @property
    def checks(self) -> bool:
        """Whether gradients are checked, and steps skipped where one is not finite."""
        return True

    def set_scale(self, scale: float) -> None:
        """Use another scale from now on."""
        self._loss_scale = positive_number("scale", scale)

    @property
    def origin(self) -> "Scaler":
        """The scaler that holds the scale: another one where this one stands for several."""
        return self

    def assign_scale(self, scale: float) -> None:
        """Use another scale from now on, and move limits that it is outside of."""
        self._loss_scale = positive_number("loss_scale", scale)

    def back_off_from(self, scale: float) -> None:
        """Take note that a step overflowed with `scale`, which may be another scaler's."""

    def update(self, finite: bool) -> float:
        """Take note of a step whose gradients were all `finite`, or not; return the new scale."""
        del finite
        return self._loss_scale

    def resumed(self, state: Mapping[str, Any]) -> "Scaler":
        """Return the scaler that goes on from `state` in this one's place.

        It may be of another kind; but one that scales does not give way to one that doesn't, nor
        the other way round: a run in float16 may go on from one in bfloat16.
        """
        saved = from_state_dict(state)
        if isinstance(saved, NoScaler) != isinstance(self, NoScaler):
            logger.warning(OTHER_KIND, saved, self)
            return self
        return saved

    def state_dict(self) -> Dict[str, Any]:
        """Return everything it takes to go on from here, as plain numbers and strings."""
        values = {name: getattr(self, f"_{name}") for name in self._fields}
        return {"kind": type(self).__name__, "version": STATE_VERSION, **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises `ArgumentError`, and changes nothing, where `state` is empty, of another kind of
        scaler, of a newer mxamp, or lacks a field.
        """
        for name, value in self._checked(state).items():
            setattr(self, f"_{name}", value)

    def _checked(self, state: Mapping[str, Any]) -> Dict[str, Any]:
        own = type(self).__name__
        if not isinstance(state, Mapping) or state.get("kind") != own:
            given = shown(state.get("kind", state) if isinstance(state, Mapping) else state)
            raise ArgumentError(f"the state must be what state_dict of a {own} gives, not {given}")
        if state.get("version") != STATE_VERSION:
            raise ArgumentError(
                f"the state must have version {STATE_VERSION}, which this mxamp reads, not "
                f"{shown(state.get('version'))}"
            )
        missing = [name for name in self._fields if name not in state]
        if missing:
            raise ArgumentError(f"the state of a {own} must have {', '.join(missing)} too")
        values = {name: state[name] for name in self._fields}
        positive_number("loss_scale", values["loss_scale"])
        return values

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._loss_scale:g})"


class StaticLossScaler(Scaler):
    """A loss scale that stays what it is; steps that overflow are still skipped.

    >>> StaticLossScaler(128).loss_scale
    128.0
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(positive_number("scale", scale))


class NoScaler(Scaler):
    """A scale of 1: bfloat16 has float32's range. Steps with non-finite gradients are skipped."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def __repr__(self) -> str:
        return "NoScaler()"


class LossScaler(Scaler):
    """A loss scale that backs off at each overflow and grows again after a run of clean steps.

    >>> scaler = LossScaler(init_scale=1024, growth_interval=2)
    >>> [scaler.update(finite) for finite in (False, True, True)]
    [512.0, 512.0, 1024.0]

    Parameters
    ----------
    init_scale : float, default 2**16
    growth_factor : float, default 2
        What the scale is multiplied by when it grows; more than 1.
    backoff_factor : float, default 0.5
        What it is multiplied by when it backs off; between 0 and 1.
    growth_interval : int, default 2000
        The scale grows after this many finite steps in a row.
    min_scale, max_scale : float, default 1 and 2**24
        The limits of the scale.
    hysteresis : int, default 1
        The scale backs off from this many overflows on; the count starts anew when it grows.
    """

    _fields = (
        "loss_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale",
        "max_scale", "hysteresis", "clean_steps", "overflows_left",
    )  # fmt: skip

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
        self._growth_interval = positive_count("growth_interval", growth_interval)
        self._min_scale = positive_number("min_scale", min_scale)
        self._max_scale = positive_number("max_scale", max_scale)
        self._hysteresis = positive_count("hysteresis", hysteresis)
        if self._growth_factor <= 1:
            raise ArgumentError(f"growth_factor must be more than 1, not {shown(growth_factor)}")
        if self._backoff_factor >= 1:
            raise ArgumentError(f"backoff_factor must be less than 1, not {shown(backoff_factor)}")
        if not self._min_scale <= self._loss_scale <= self._max_scale:
            raise ArgumentError(
                f"init_scale must be between min_scale and max_scale, {self._min_scale:g} and "
                f"{self._max_scale:g}, not {self._loss_scale:g}"
            )
        self._clean_steps = 0
        self._overflows_left = self._hysteresis

    @classmethod
    def calibrated(
        cls: Type[_LossScaler], histogram: Any, keep: float = 0.999, **options: Any
    ) -> _LossScaler:
        """Return one that starts from the scale that fits gradients as they are.

        ::

            histogram = amp.debugging.gradient_histogram(net, batches, loss)
            amp.init_trainer(trainer, amp.LossScaler.calibrated(histogram))

        Parameters
        ----------
        histogram : GradientHistogram
            Or any object whose `recommended_scale(keep)` returns a scale.
        keep : float, default 0.999
            The share of gradients other than zero that float16 has to keep at that scale.
        **options
            As of `LossScaler`, but for `init_scale`. Limits that are not given make room for the
            scale, where it is outside the default ones.
        """
        recommend = getattr(histogram, "recommended_scale", None)
        if not callable(recommend):
            raise ArgumentError(NO_RECOMMENDATION.format(given=type(histogram).__name__))
        if "init_scale" in options:
            raise ArgumentError("calibrated finds init_scale itself: leave it out")
        scale = positive_number("recommended_scale", recommend(keep))
        limits = {"min_scale": min(scale, 1.0), "max_scale": max(scale, 2.0**24)}
        return cls(init_scale=scale, **{**limits, **options})

    def _checked(self, state: Mapping[str, Any]) -> Dict[str, Any]:
        values = super()._checked(state)
        # The settings go through the checks of a new scaler.
        LossScaler(values["loss_scale"], **{name: values[name] for name in self._fields[1:-2]})
        limits = {"overflows_left": values["hysteresis"], "clean_steps": values["growth_interval"]}
        for name, most in limits.items():
            value = values[name]
            if not (isinstance(value, int) and 0 <= value <= most):
                raise ArgumentError(
                    f"{name} must be a whole number from 0 to {most}, not {shown(value)}"
                )
        return values

    def set_scale(self, scale: float) -> None:
        """Use another scale from now on; raises `ArgumentError` outside the scaler's limits."""
        scale = positive_number("scale", scale)
        if not self._min_scale <= scale <= self._max_scale:
            raise ArgumentError(
                f"scale must be between min_scale and max_scale, {self._min_scale:g} and "
                f"{self._max_scale:g}, not {scale:g}"
            )
        self._loss_scale = scale

    def assign_scale(self, scale: float) -> None:
        """Use another scale from now on, and move limits that it is outside of."""
        super().assign_scale(scale)
        self._min_scale = min(self._min_scale, self._loss_scale)
        self._max_scale = max(self._max_scale, self._loss_scale)

    def back_off_from(self, scale: float) -> None:
        """Start from `scale` where it is lower: a larger one would have overflowed too."""
        self._loss_scale = max(min(self._loss_scale, scale), self._min_scale)

    def update(self, finite: bool) -> float:
        """Take note of a step whose gradients were all `finite`, or not; return the new scale.

        The answer is in force for the very next backward pass.
        """
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


_CLASSES: Dict[str, Callable[[], Scaler]] = {
    scaler.__name__: scaler for scaler in (LossScaler, StaticLossScaler, NoScaler)
}


def from_state_dict(state: Mapping[str, Any]) -> Scaler:
    """Return the scaler that a `state_dict` describes."""
    make = _CLASSES.get(str(state.get("kind"))) if isinstance(state, Mapping) else None
    if make is None:
        raise ArgumentError(f"a scaler's state must be what state_dict returns, not {shown(state)}")
    scaler = make()
    scaler.load_state_dict(state)
    return scaler
