"""Loss scalers: state machines, independent of MXNet, that raise and lower the loss scale.

float16 gradients below 6e-8 become zero. Loss scaling multiplies the loss by a large scale and the
gradients by its inverse before the update. The largest scale that does not overflow is found by
trying (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2).

After each step `update` takes whether all gradients were finite, and returns the scale of the next
backward pass.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Mapping

from ..errors import ArgumentError
from ..framework.keywords import checked_call
from ..framework.wording import shown

STATE_VERSION = 1
_HEADER = ("kind", "version")  #: of a saved state
NO_STATE = "the state must be what state_dict of a {kind} gives, with {fields}, not {given}"


def positive_number(name: str, value: Any) -> float:
    """Return an argument as a float; raise unless it is positive and finite."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ArgumentError(f"{name} must be a positive finite number, not {shown(value)}")
    return float(value)


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """Return an argument as an int; raise unless it is a whole number of at least `least`."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < least:
        raise ArgumentError(f"{name} must be a whole number from {least}, not {shown(value)}")
    return int(value)


class LossScaler:
    """A dynamic loss scale: an overflow lowers it, a run of finite steps raises it.

    >>> scaler = LossScaler(init_scale=1024, growth_interval=2)
    >>> [scaler.update(finite) for finite in (False, True, True)]
    [512.0, 512.0, 1024.0]

    Several trainers may share one `LossScaler`.

    Parameters
    ----------
    init_scale : float, default 2**16
        The first loss scale.
    growth_factor : float, default 2
        The factor, above 1, by which the scale grows.
    backoff_factor : float, default 0.5
        The factor, between 0 and 1, by which an overflow lowers the scale.
    growth_interval : int, default 2000
        The scale grows after this many finite steps in a row.
    min_scale : float, default 1
        Overflows never lower the scale below this limit.
    max_scale : float, default 2**24
        The scale never grows above this limit.
    hysteresis : int, default 1
        The number n: the n-th overflow since the scale last grew lowers the scale, and so does each
        later overflow.
    """

    #: What a saved state holds beside the loss scale: arguments of the constructor, and counts.
    _settings: tuple[str, ...] = (
        "growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale",
        "hysteresis",
    )  # fmt: skip
    _counts: tuple[str, ...] = ("clean_steps", "overflows_left")
    #: Whether losses are scaled, gradients checked and steps with non-finite gradients skipped.
    #: Otherwise the scale is 1, and updates are plain MXNet's.
    is_scaling = True
    #: For a `GradScaler`: by the state of each trainer that has stepped or unscaled since the last
    #: `update`, whether its gradients were finite. None for other scalers.
    finite_by_state: dict[Any, bool] | None = None

    @checked_call
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
        self._init_fields(positive_number("init_scale", init_scale))
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
        if not self._min_scale <= self._loss_scale <= self._max_scale:
            raise ArgumentError(f"init_scale is not from min_scale to max_scale: {init_scale:g}")
        self._overflows_left = self._hysteresis

    def _init_fields(self, scale: float) -> None:
        """Initialize all fields as for a constant loss scale; `LossScaler` then overwrites some."""
        # A user-defined subclass saves states of the class that it derives from.
        self.kind = next(one.__name__ for one in type(self).__mro__ if one in _KINDS.values())
        self.steps = self.skips = self.skips_in_a_row = 0  #: updates done and skipped
        self._loss_scale = scale
        self._growth_factor = self._backoff_factor = 1.0
        self._min_scale, self._max_scale = 0.0, math.inf
        self._growth_interval = self._hysteresis = self._overflows_left = 1
        self._clean_steps = 0

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next backward pass.

        >>> LossScaler(init_scale=1024).loss_scale
        1024.0
        """
        return self._loss_scale if self.is_scaling else 1.0

    @property
    def is_lowest(self) -> bool:
        """Whether the loss scale is at its lower limit, or is constant."""
        return self._backoff_factor == 1 or self._loss_scale <= self._min_scale

    def set_scale(self, scale: float) -> None:
        """Set the loss scale, and extend its limits to include it.

        >>> scaler = LossScaler()
        >>> scaler.set_scale(1024)
        >>> scaler.loss_scale
        1024.0

        Parameters
        ----------
        scale : float
            The scale of the next loss.
        """
        if self.is_scaling:
            self._loss_scale = positive_number("scale", scale)
            self._min_scale = min(self._min_scale, self._loss_scale)
            self._max_scale = max(self._max_scale, self._loss_scale)

    def back_off_from(self, scale: float) -> None:
        """Lower the loss scale to `scale`, with which a step has overflowed.

        Call it before `update`, which may lower the scale further.

        Parameters
        ----------
        scale : float
            The scale of the step's loss: of several trainers' scales, the lowest.
        """
        if self._backoff_factor < 1:
            self._loss_scale = max(min(self._loss_scale, scale), self._min_scale)

    def update(self, finite: bool) -> float:
        """Record whether a step was finite; return the new loss scale.

        Parameters
        ----------
        finite : bool
            Whether all gradients of the step were finite.
        """
        self.steps, self.skips = self.steps + finite, self.skips + (not finite)
        self.skips_in_a_row = 0 if finite else self.skips_in_a_row + 1
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
        return self.loss_scale

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state to save, as plain numbers and strings.

        >>> StaticLossScaler(128).state_dict()
        {'kind': 'StaticLossScaler', 'version': 1, 'loss_scale': 128.0}
        """
        kind = _KINDS[self.kind]  # not the class: `resume` may have changed it
        names = ("loss_scale", *kind._settings, *kind._counts)
        values = {name: getattr(self, f"_{name}") for name in names}
        return {"kind": self.kind, "version": STATE_VERSION, **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        >>> scaler = LossScaler()
        >>> scaler.load_state_dict(LossScaler(init_scale=1024).state_dict())
        >>> scaler.loss_scale
        1024.0

        Parameters
        ----------
        state : dict
            A state that `state_dict` has returned.

        Raises
        ------
        ArgumentError
            The state is empty, lacks a field, or is of another kind of scaler or of a newer mxamp.
            The scaler keeps its own state.
        """
        own, kind = self.state_dict(), _KINDS[self.kind]
        fits = isinstance(state, Mapping) and state.keys() >= own.keys()
        if not fits or any(state[name] != own[name] for name in _HEADER):
            names = ", ".join(own)
            raise ArgumentError(NO_STATE.format(kind=self.kind, fields=names, given=shown(state)))
        scale = positive_number("loss_scale", state["loss_scale"])
        if kind._settings:  # the constructor checks them
            kind(scale, **{name: state[name] for name in kind._settings})
        for name in kind._counts:
            whole_number(name, state[name])
        vars(self).update({f"_{name}": state[name] for name in own if name not in _HEADER})

    def resume(self, state: Mapping[str, Any]) -> None:
        """Load the saved state of any kind of scaler, but keep the current step counts.

        A `NoScaler` stays one, and takes no other's place: a run in float16 may resume from one in
        bfloat16.

        Parameters
        ----------
        state : dict
            A state that any scaler's `state_dict` has returned.
        """
        kind = str(state.get("kind")) if isinstance(state, Mapping) else ""
        saved = _KINDS.get(kind, LossScaler)()
        saved.load_state_dict(state)
        saved.steps, saved.skips = self.steps, self.skips
        if self.is_scaling and saved.is_scaling:
            vars(self).update(vars(saved))

    def __repr__(self) -> str:
        return f"{self.kind}({f'{self.loss_scale:g}' if self.is_scaling else ''})"


class StaticLossScaler(LossScaler):
    """A constant loss scale; steps with Inf or NaN gradients are still skipped.

    >>> StaticLossScaler(128).loss_scale
    128.0

    Parameters
    ----------
    scale : float, default 1
        The loss scale, above 0.
    """

    _settings = _counts = ()

    @checked_call
    def __init__(self, scale: float = 1.0) -> None:
        self._init_fields(positive_number("scale", scale))


class NoScaler(StaticLossScaler):
    """A loss scale of 1 for bfloat16 and float32: no gradient is checked, no step skipped.

    >>> NoScaler().loss_scale
    1.0
    """

    is_scaling = False

    def __init__(self) -> None:
        super().__init__()


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (LossScaler, StaticLossScaler, NoScaler)}


class SharedScale:
    """A loss scaler that several trainers share.

    They share the optimizer of a `decorate` call, or an automatic run: a script that never calls
    mxamp.

    `scaled_by` is the API's name. Copies of an optimizer share it too. MXNet pickles optimizers
    into state files, which plain MXNet has to load, so pickles leave it out.
    """

    def __init__(self, scaler: LossScaler, scaled_by: str) -> None:
        self.scaler, self.scaled_by = scaler, scaled_by

    loss_scale = property(lambda self: self.scaler.loss_scale)  #: of the next backward pass
    steps = property(lambda self: self.scaler.steps)  #: updates done, of all trainers and modules
    skips = property(lambda self: self.scaler.skips)

    def __deepcopy__(self, memo: object) -> "SharedScale":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


def scale_of(optimizer: object) -> SharedScale | None:
    """Return the loss scaler (`SharedScale`) that `decorate` attached to an optimizer, or None."""
    scale = getattr(optimizer, "_amp_scaling", None)
    return scale if isinstance(scale, SharedScale) else None
