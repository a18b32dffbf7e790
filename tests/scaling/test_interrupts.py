"""Ctrl-C at any line: whole patches, the policy from before, and right steps afterwards."""

import contextlib
import random
import signal
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

import mxamp as amp
from helpers import initialized, parallel
from mxamp.framework import patching
from training import end_step, run_backward, trainer_in

PACKAGE = str(Path(amp.__file__).parent)
RATE = 2.0**-6
X = nd.array([[1.0, 2.0]])


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of mxamp's that runs; without n, lists them."""

    def __init__(self, n=None):
        self.n, self.seen = n, []

    def __call__(self, frame, event, _argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.seen.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            if len(self.seen) == self.n:
                raise KeyboardInterrupt
        return self

    def run(self, function):
        before = sys.gettrace()  # that of coverage
        sys.settrace(self)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                function()
        finally:
            sys.settrace(before)


class Program:
    """A net of which the gradient is X times a constant, and steps of it in one way."""

    def __init__(self, way, adds):
        self.way, self.adds = way, adds
        self.net = initialized(gluon.nn.Dense(1, in_units=2, use_bias=False), init=mx.init.One())
        self.net.weight.grad_req = "add" if adds else "write"
        optimizer, self.scales = (
            mx.optimizer.SGD(learning_rate=RATE),
            way.replace("clip", "scale_loss"),
        )
        params = self.net.collect_params()
        self.trainer, self.scaler = trainer_in(self.scales, params, 8.0, optimizer)
        if way == "region":
            amp.init_trainer(self.trainer, amp.NoScaler())

    def step(self):
        with amp.autocast("float16"):
            run_backward(lambda: self.net(X).sum() * 2, self.trainer, self.scales, self.scaler)
        if self.way == "clip":
            amp.clip_grad_global_norm(self.trainer, 100.0)
        end_step(self.trainer, self.scaler)
        if self.adds:
            self.net.weight.zero_grad()

    def recover(self):
        """What a script does after Ctrl-C before it goes on: begin a new sum, and a new update."""
        if self.adds:
            self.net.weight.zero_grad()
        if self.scaler:
            self.scaler.update(self.scaler.get_scale())

    def assert_right(self):
        """Two steps are those of plain MXNet."""
        for _ in range(2):
            before = self.net.weight.data().asnumpy()
            self.step()
            assert self.trainer.amp_last_step.stepped
            after = self.net.weight.data().asnumpy()
            np.testing.assert_allclose(after, before - RATE * 2 * X.asnumpy(), rtol=1e-6)


WAYS = ("scale_loss", "clip", "GradScaler", "decorate", "region")


def assert_whole(program):
    """Nothing of the interrupted step is left but what a step of `passes` needs."""
    assert amp.current_policy() is None
    assert not autograd.is_recording()
    weight = program.net.weight.data().asnumpy()
    steps = (1 - weight) / (RATE * 2 * X.asnumpy())
    assert (abs(steps - steps.round()) < 1e-4).all(), weight
    assert steps[0, 0] == pytest.approx(steps[0, 1])
    open_sets = [one for one in patching._open_sets if not isinstance(one, patching.FrontEnd)]
    assert not open_sets
    assert all(one.is_open for one in patching._open_sets)


def shut_down_after(program):
    """Nothing stays patched or locked, whatever was interrupted."""
    program.assert_right()
    with parallel(Program("scale_loss", adds=True).assert_right):
        pass
    amp.shutdown()
    assert not patching._open_sets


@pytest.mark.parametrize("count", [12, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_interrupts_at_a_line(way, adds, count):
    program, counter, chance = Program(way, adds), Interrupt(), random.Random(0)  # noqa: S311
    program.step()
    counter.run(program.step)
    runs = [*enumerate(counter.seen, 1)]
    # Each line of code once: any of the times that a step runs it.
    lines = sorted({place: n for n, place in chance.sample(runs, len(runs))}.values())
    for n in chance.sample(lines, min(count, len(lines))):
        Interrupt(n).run(program.step)
        try:
            assert_whole(program)
            program.recover()
            program.assert_right()
        except BaseException as error:
            raise AssertionError(f"interrupted at {counter.seen[n - 1]}") from error
    shut_down_after(program)


def interrupt(_signal, frame):
    """Raise KeyboardInterrupt, but later inside the `__exit__` of Python's own contexts.

    Cut off before it does anything, no `with` statement ends.
    """
    if frame.f_code.co_filename == contextlib.__file__:
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
    else:
        raise KeyboardInterrupt


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
@pytest.mark.parametrize("way", WAYS)
def test_signals(way):
    """SIGINT at random times: in Python's code and MXNet's too, which may skip or end an update."""
    program, delays = Program(way, adds=False), random.Random(0)  # noqa: S311
    program.step()
    for _ in range(20):
        signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-5, 4e-3))
            program.step()
            time.sleep(5e-3)
        except KeyboardInterrupt:
            pass
        # MXNet's own `record()` may be interrupted before its body.
        autograd.set_recording(False)
        autograd.set_training(False)
        assert amp.current_policy() is None
        program.recover()
        program.assert_right()
    shut_down_after(program)
