"""Which form is chosen, by times that the tests make up: no test depends on how fast it runs."""

import math

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

import mxamp as amp
from helpers import with_avx512
from mxamp.tools.tuning import race
from mxamp.tools.tuning.accuracy import Accuracy, Verdict
from mxamp.tools.tuning.deadline import Deadline, OutOfTimeError


def net_with_relu():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, in_channels=16), nn.HybridLambda("relu"), nn.Flatten())
        net.add(nn.Dense(4))
    net.initialize(mx.init.Xavier())
    return net, mx.nd.random.normal(shape=(32, 16, 6, 6))


def tuned(budget=100, **options):
    net, data = net_with_relu()
    return amp.tune(net, data, target_dtype="bfloat16", budget=budget, progress=False, **options)


def described(form):
    """A form as a tuple: its way, whether it is in low precision, and its substitutions."""
    if form.policy is None:
        return ("plain",)
    graph = {"relu"} & {*form.policy.substitutions}
    return (form.way, "low" if form.policy.lowers else "float32", *sorted(graph))


@pytest.fixture
def clock(monkeypatch):
    """Make times up: a dict from forms, as `described` shows them, to milliseconds."""
    times = {}

    def turn(self, repeats=1):
        self._step()
        return times.get(described(self), 10.0) / 1e3

    monkeypatch.setattr(race.Form, "mean_seconds", turn)
    return times


def chosen(tuning):
    trial = tuning.chosen
    if trial.way == "plain":
        return ("plain",)
    low = "float32" if trial.precision == "float32" else "low"
    return (trial.way, low, *trial.substitutions)


@with_avx512
@pytest.mark.parametrize(
    "times, expected",
    [
        ({}, ("plain",)),
        ({("fused", "low", "relu"): 5}, ("fused", "low", "relu")),
        ({("fused", "float32", "relu"): 4, ("fused", "low", "relu"): 5}, ("fused", "float32", "relu")),
        ({("autocast", "low", "relu"): 7, ("converted", "low", "relu"): 6}, ("converted", "low", "relu")),
        ({("autocast", "float32", "relu"): 7}, ("autocast", "float32", "relu")),
        # As fast as each other: float32.
        ({("fused", "low", "relu"): 5, ("fused", "float32", "relu"): 5}, ("fused", "float32", "relu")),
        # No faster than chance.
        ({("fused", "low", "relu"): 9.9}, ("plain",)),
    ],
)  # fmt: skip
def test_the_fastest_form_is_chosen(clock, times, expected):
    clock.update(times)
    tuning = tuned()
    assert chosen(tuning) == expected
    assert tuning.complete
    assert tuning.policy.lowers == (expected[1:2] == ("low",))
    speeds = [trial.speedup for trial in tuning.trials if trial.within]
    assert tuning.chosen.speedup >= 1
    assert tuning.trials[0].milliseconds == pytest.approx(10)
    assert tuning.chosen.milliseconds == pytest.approx(times.get(expected, 10))
    assert tuning.chosen.speedup * 1.02 >= max(speeds)


@with_avx512
def test_what_is_not_accurate_enough_is_not_chosen(clock, monkeypatch):
    clock.update({("fused", "low", "relu"): 3, ("converted", "low", "relu"): 5})
    of = Accuracy.measure

    def of_fused(self, policy, block=None):
        fused = block is not None and any(
            name.startswith("_sg_mkldnn") for name in block._source.graph.operators
        )
        return Verdict(0.9, None, None, within=False) if fused else of(self, policy, block)

    monkeypatch.setattr(Accuracy, "measure", of_fused)
    tuning = tuned()
    assert chosen(tuning) == ("converted", "low", "relu")
    [fused] = [t for t in tuning.trials if t.way == "fused" and t.precision == "bfloat16"]
    assert (fused.error, fused.within) == (0.9, False)


@with_avx512
def test_low_precision_that_does_not_pay_is_not_searched(clock):
    clock.update({("autocast", "low", "relu"): 30, ("converted", "low", "relu"): 30})
    clock.update({("fused", "low", "relu"): 30})
    tuning = tuned(rtol=1e-4)
    assert chosen(tuning) == ("plain",)
    assert any("does not pay" in note for note in tuning.notes)
    assert not any(layer.kept for layer in tuning.layers)


@with_avx512
def test_ctrl_c_keeps_what_was_timed(clock, monkeypatch):
    clock.update({("fused", "low", "relu"): 4, ("fused", "float32", "relu"): 6})
    rounds, one_round = [], race.run_round

    def interrupted(plain, forms, repeats):
        one_round(plain, forms, repeats)
        rounds.append(forms)
        if len(rounds) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(race, "run_round", interrupted)
    tuning = tuned()
    assert not tuning.complete
    assert chosen(tuning) in [("fused", "low", "relu"), ("fused", "float32", "relu")]
    assert tuning.error <= 0.05


def test_nothing_is_claimed_of_what_was_not_timed(clock):
    tuning = tuned(budget=1e-6)
    said = " ".join(tuning.notes)
    assert "does not pay" not in said
    assert "Nothing that is accurate enough" not in said
    assert "not enough to choose" in said


@with_avx512
def test_forms_that_are_too_close_or_too_noisy_to_tell_are_named(clock, monkeypatch):
    net, data = net_with_relu()
    turns = []

    def turn(self, repeats=1):
        self._step()
        if self.way == "fused" and self.lowers:
            turns.append(0.012 if len(turns) % 3 == 2 else 0.008)
            return turns[-1]
        return 0.00995 if self.way == "converted" else 0.01

    monkeypatch.setattr(race.Form, "mean_seconds", turn)
    tuning = amp.tune(net, data, target_dtype="bfloat16", budget=100, progress=False)
    assert chosen(tuning) == ("plain",)
    said = [note for note in tuning.notes if note.startswith("Too ")]
    assert any(note.startswith("Too noisy to tell: fused in bfloat16, at 0.") for note in said)
    assert any(
        note.startswith("Too close to tell: converted in bfloat16, at 1.01") for note in said
    )
    assert any("by more than chance" in note for note in tuning.notes)


@with_avx512
def test_training_steps(clock):
    clock.update({("autocast", "low", "relu"): 5})
    net, data = net_with_relu()
    loss, labels = mx.gluon.loss.L2Loss(), mx.nd.zeros((32, 4))
    tuning = amp.tune(
        net, (data, labels), loss, target_dtype="bfloat16", budget=100, progress=False
    )
    assert chosen(tuning) == ("autocast", "low", "relu")
    assert {trial.way for trial in tuning.trials} == {"plain", "autocast"}
    assert tuning.gradient_error is not None


def test_forms_that_do_not_run_are_left_out(clock, monkeypatch):
    def fails(*_args, **_options):
        raise amp.ArgumentError("no kernels")

    monkeypatch.setattr(race, "convert_hybrid_block", fails)
    tuning = tuned()
    assert {trial.way for trial in tuning.trials} <= {"plain", "autocast"}


def test_what_is_far_too_slow_is_timed_once(clock):
    clock.update({("autocast", "low", "relu"): 500})
    tuning = tuned()
    slow = [t for t in tuning.trials if t.speedup < 0.1]
    assert slow and all(math.isnan(trial.spread) for trial in slow)


@with_avx512
def test_one_slow_turn_does_not_end_a_forms_race(monkeypatch):
    # Beside other work a turn may take three times as long.
    net, data = net_with_relu()

    def turn(self, repeats=1):
        self._step()
        low = self.lowers and self.way == "fused"
        return (30.0 if not self.ratios else 5.0) if low else 10.0

    monkeypatch.setattr(race.Form, "mean_seconds", turn)
    tuning = amp.tune(net, data, target_dtype="bfloat16", budget=100, progress=False)
    assert chosen(tuning)[:2] == ("fused", "low")


def test_ratios_are_those_of_one_round(clock, monkeypatch):
    # A machine that gets slower and slower slows float32 and the others alike.
    net, data = net_with_relu()
    turns = []

    def turn(self, repeats=1):
        self._step()
        turns.append(self)
        fast = self.way == "fused" and not self.lowers
        return (1 + len(turns) / 10) * (5.0 if fast else 10.0)

    monkeypatch.setattr(race.Form, "mean_seconds", turn)
    tuning = amp.tune(net, data, target_dtype="bfloat16", budget=100, progress=False)
    assert chosen(tuning) == ("fused", "float32", "relu")
    assert tuning.chosen.speedup == pytest.approx(2, rel=0.2)
    assert 1e3 < tuning.trials[0].spread < tuning.trials[0].milliseconds


def test_no_kernels_no_low_precision(clock, monkeypatch):
    net, data = net_with_relu()
    net(data).wait_to_read()  # oneDNN reads the variable at its first use, for the whole process
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    clock.update({("fused", "float32", "relu"): 5})
    tuning = amp.tune(net, data, target_dtype="bfloat16", budget=100, progress=False)
    assert chosen(tuning) == ("fused", "float32", "relu")
    assert all(trial.precision == "float32" for trial in tuning.trials)
    assert any("no bfloat16 kernels" in note for note in tuning.notes)


# ---------------------------------------------------------------------- what is chosen, used


def test_what_was_chosen_is_what_runs(clock):
    clock.update({("fused", "float32", "relu"): 5})
    tuning = tuned()
    net, data = net_with_relu()
    fast = amp.convert_hybrid_block(
        net, policy=tuning.policy, example_inputs=data, **tuning.convert_options
    )
    assert any(name.startswith("_sg_mkldnn") for name in fast._source.graph.operators)
    np.testing.assert_allclose(fast(data).asnumpy(), net(data).asnumpy(), rtol=1e-4, atol=1e-5)


def test_the_deadline():
    now = [0.0]
    deadline = Deadline(10, clock=lambda: now[0])
    now[0] = 6.0
    deadline.check()
    deadline.check(3.9)
    with pytest.raises(OutOfTimeError):
        deadline.check(4.1)
    assert deadline.complete
    with deadline.phase("half", 0.5):
        deadline.check(3.9, whole=True)
        deadline.check()
    assert (deadline.spent, deadline.complete) == (6.0, False)


def test_the_bar_shows_phase_and_time(monkeypatch, capsys):
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    now = [0.0]
    deadline = Deadline(10, clock=lambda: now[0])
    with deadline.watched(show=True):
        now[0] = 3.0
        with deadline.phase("layers to keep"):
            pass
    shown = capsys.readouterr().err
    assert "layers to keep" in shown
    assert "7 s left" in shown
    deadline = Deadline(10)
    with deadline.watched(show=False), deadline.phase("layers to keep"):
        pass
    assert not capsys.readouterr().err
