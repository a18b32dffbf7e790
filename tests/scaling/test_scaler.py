import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxamp.errors import ArgumentError
from mxamp.scaling.scaler import LossScaler, NoScaler, StaticLossScaler


def reference(steps, scale, growth, backoff, interval, low, high, hysteresis):
    """The whole state machine in ten lines."""
    clean, left, seen = 0, hysteresis, []
    for finite in steps:
        clean = clean + 1 if finite else 0
        left = left if finite else max(left - 1, 0)
        if not finite and left == 0:
            scale = max(scale * backoff, low)
        if clean == interval:
            scale, clean, left = min(scale * growth, high), 0, hysteresis
        seen.append(scale)
    return seen


def test_the_scale_of_a_new_scaler_halves_at_once_and_doubles_after_2000_steps():
    scaler = LossScaler()
    assert (scaler.loss_scale, scaler.update(False)) == (2.0**16, 2.0**15)
    assert [scaler.update(True) for _ in range(2000)][-2:] == [2.0**15, 2.0**16]


@given(
    st.lists(st.booleans(), max_size=200), st.floats(1, 2.0**20), st.floats(1.01, 8),
    st.floats(0.05, 0.95), st.integers(1, 20), st.floats(2**-10, 1), st.floats(2.0**20, 2.0**120),
    st.integers(1, 4),
)  # fmt: skip
def test_against_the_reference(steps, scale, growth, backoff, interval, low, high, hysteresis):
    scaler = LossScaler(scale, growth, backoff, interval, low, high, hysteresis)
    seen = [scaler.update(finite) for finite in steps]
    assert seen == reference(steps, scale, growth, backoff, interval, low, high, hysteresis)
    assert all(low <= s <= high and math.isfinite(s) for s in seen)


@pytest.mark.parametrize("argument, value", [
    ("init_scale", 0), ("init_scale", -1), ("init_scale", math.nan), ("init_scale", "65536"),
    ("growth_factor", 1), ("growth_factor", 0.5), ("growth_factor", math.inf),
    ("backoff_factor", 1), ("backoff_factor", 0), ("backoff_factor", 2),
    ("growth_interval", 0), ("growth_interval", 1.5), ("growth_interval", True),
    ("min_scale", 2.0**20), ("max_scale", 2), ("min_scale", 0), ("hysteresis", 0),
    ("hysteresis", "1"),
])  # fmt: skip
def test_invalid_arguments_are_named(argument, value):
    with pytest.raises(ArgumentError, match=argument):
        LossScaler(**{argument: value})


class Own(LossScaler):
    """A scaler of a user's, with settings of its own."""

    def __init__(self):
        super().__init__(init_scale=4)


@pytest.mark.parametrize(
    "scaler", [LossScaler(8, hysteresis=2), Own(), StaticLossScaler(3), NoScaler()]
)
def test_states_round_trip(scaler):
    scaler.update(True)
    scaler.update(False)
    state = scaler.state_dict()
    assert all(isinstance(v, (int, float, str)) for v in state.values())
    again = pickle.loads(pickle.dumps(type(scaler)()))  # noqa: S301
    for one in (again, LossScaler()) if scaler.is_scaling else (again,):
        one.resume(state)  # a scaler of another kind becomes one of this kind
        assert one.state_dict() == state
    assert [again.update(f) for f in (False, True)] == [scaler.update(f) for f in (False, True)]
    assert str(int(scaler.loss_scale)) in repr(scaler) or isinstance(scaler, NoScaler)


@pytest.mark.parametrize("change", [
    lambda s: {}, lambda s: None, lambda s: {**s, "version": 2}, lambda s: {**s, "kind": "Other"},
    lambda s: {k: v for k, v in s.items() if k != "clean_steps"},
    lambda s: {**s, "loss_scale": math.nan}, lambda s: {**s, "growth_factor": 0.5},
    lambda s: {**s, "clean_steps": -1},
])  # fmt: skip
def test_foreign_states_change_nothing(change):
    scaler = LossScaler()
    before = scaler.state_dict()
    with pytest.raises(ArgumentError):
        scaler.load_state_dict(change(before))
    assert scaler.state_dict() == before
