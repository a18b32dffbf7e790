"""Two workers and a parameter server, on this machine."""

import os
import sys

import mxnet as mx
import numpy as np
import pytest
from distributed import OVERFLOWS, ROWS, STEPS
from mxnet import gluon, nd

from helpers import ROOT, backpropagate, python
from training import setup, weights

PROGRAM = str(ROOT / "tests" / "distributed.py")
LAUNCHER = str(ROOT / "examples" / "launch_workers.py")
AUTOMATIC = """
import distributed, training, mxnet as mx, numpy as np, sys
from helpers import backpropagate
from mxnet import gluon, nd
net = training.setup()[0]
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.05}, kvstore="dist_sync")
for step in range(distributed.STEPS):
    backpropagate(lambda: (net(nd.array(distributed.batch(step))) ** 2).sum())
    trainer.step(distributed.ROWS)
np.savez(sys.argv[1] + str(distributed.RANK), *distributed.values(net), scale=trainer.amp_loss_scale)
"""


def launch(*command):
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONWARNINGS": "ignore"}
    return python(LAUNCHER, "-n", "2", *command, timeout=120, **env)


def trained(way, folder, *options):
    """The weights and the scale of a run of two workers, which must be the same in both."""
    out = str(folder / "worker")
    command = [sys.executable, PROGRAM, way, out, *options]
    if way == "mxamp run":
        script = folder / "train.py"
        script.write_text(AUTOMATIC)
        command = [sys.executable, "-m", "mxamp", "run", "--dtype", "float16", str(script), out]
    done = launch(*command)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    one, two = (dict(np.load(f"{out}{rank}.npz")) for rank in (0, 1))
    np.testing.assert_equal(one, two)
    return [one[name] for name in one if name != "scale"], float(one["scale"])


def control():
    """The same steps of Adam in one process, without those that overflow."""
    net, _ = setup()
    trainer = gluon.Trainer(net.collect_params(), mx.optimizer.Adam(learning_rate=0.05))
    for step in set(range(STEPS)) - set(OVERFLOWS):
        data = np.random.RandomState(100 + step).randn(ROWS, 4).astype("float32")
        backpropagate(lambda data=data: (net(nd.array(data)) ** 2).sum())
        trainer.step(ROWS)
    return weights(net)


def assert_equals_one_process(found):
    for mine, expected in zip(found, control()):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["GradScaler", "decorate", "mxamp run", "Module"])
def test_an_overflow_in_one_worker_skips_the_step_in_all(tmp_path, way):
    # In one of its micro-batches, where gradients are added up.
    options = ["accumulate=2"] if way in ("GradScaler", "decorate") else []
    found, scale = trained(way, tmp_path, *options)
    if way == "mxamp run":  # in float16, whose largest scales overflow by themselves
        assert scale < 2.0**16
    else:
        assert scale == 1024 / 2 ** len(OVERFLOWS)
    assert all(np.isfinite(value).all() for value in found)
    if way in ("GradScaler", "decorate"):  # on float32 nets
        assert_equals_one_process(found)


@pytest.mark.slow
def test_scale_loss_and_a_run_that_goes_on_from_its_states(tmp_path):
    """It is, bit for bit, the run that was not interrupted."""
    saved = tmp_path / "saved"
    expected, scale = trained("scale_loss", tmp_path, f"save={saved}")
    assert_equals_one_process(expected)
    resumed = trained("scale_loss", tmp_path, f"load={saved}", "first=3")
    np.testing.assert_equal(resumed, (expected, scale))
    assert scale < 1024


BROKEN = """
import os, signal, sys, mxamp as amp, mxnet as mx
from distributed import RANK
from helpers import scaled_backward
from mxnet import gluon, nd
what = sys.argv[1]
net = gluon.nn.Dense(1, in_units=3)
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_sync")
amp.init("bfloat16", ctx=mx.cpu())
amp.init_trainer(trainer, amp.LossScaler(512 if what == "differs" and RANK else 1024))
for step in range(3):
    scaled_backward(lambda: net(nd.ones((2, 3))).sum(), trainer)
    if RANK and step == 1:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raises":
            raise RuntimeError("the reason")
    trainer.step(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what, status, words", [
    ("killed", 137, ""), ("raises", 1, "[worker 1] RuntimeError: the reason"),
    ("differs", 1, "worker 1 differs from worker 0"),
])  # fmt: skip
def test_a_broken_run_ends_at_once_and_says_why(what, status, words):
    done = launch(sys.executable, "-c", BROKEN, what)
    assert done.returncode == status, done.stdout + done.stderr
    assert words in done.stdout
