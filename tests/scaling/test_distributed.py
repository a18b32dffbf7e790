"""Two workers and a parameter server, on this machine."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from helpers import ROOT

SERVER = "import mxamp"  # as scheduler or server, importing MXNet serves until workers are done

WORKER = """
import sys
import mxamp as amp, mxnet as mx, numpy as np
from mxnet import autograd, gluon, nd
from training import setup, weights
kvstore = mx.kv.create("dist_sync")
net, _ = setup()
way = sys.argv[2]
optimizer = mx.optimizer.SGD(learning_rate=0.1)
if way == "decorate":
    optimizer = amp.decorate(optimizer, 1024.0)
trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=kvstore)
if way == "scale_loss":
    amp.init_trainer(trainer, amp.LossScaler(init_scale=1024))
scaler = amp.GradScaler(init_scale=1024)
rank, rng = kvstore.rank, np.random.RandomState(7)
for step in range(4):
    data = rng.randn(8, 4).astype("float32")[rank::2]
    if step == 1 and rank == 1:
        data[0, 0] = np.inf  # in one worker alone
    with autograd.record():
        loss = (net(nd.array(data)) ** 2).sum()
        if way == "scale_loss":
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
    if way == "GradScaler":
        scaler.scale(loss).backward()
        scaler.step(trainer, 8)
        scaler.update()
    else:
        if way == "decorate":
            loss.backward()
        trainer.step(8)
    assert trainer.amp_last_step.stepped == (step != 1), (rank, step)
np.savez(sys.argv[1] + str(rank), *weights(net), scale=trainer.amp_loss_scale)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["scale_loss", "GradScaler", "decorate"])
def test_an_overflow_in_one_worker_skips_the_step_in_all(tmp_path, way):
    env = {
        **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "2", "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_INTERFACE": "lo",
    }  # fmt: skip

    def start(role, code):
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "worker"), way],
            env={**env, "DMLC_ROLE": role}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    others = [start("scheduler", SERVER), start("server", SERVER)]
    workers = [start("worker", WORKER), start("worker", WORKER)]
    try:
        for worker in workers:
            printed, _ = worker.communicate(timeout=120)
            assert worker.returncode == 0, printed.decode()[-3000:]
    finally:
        for process in [*workers, *others]:
            process.kill()
            process.communicate()
    one, two = (np.load(tmp_path / f"worker{rank}.npz") for rank in (0, 1))
    for name in one.files:
        np.testing.assert_array_equal(one[name], two[name])
    assert one["scale"] == 512
    for mine, control in zip((one[n] for n in one.files if n != "scale"), expected()):
        np.testing.assert_allclose(mine, control, rtol=1e-5, atol=1e-6)


def expected():
    """The same steps in one process, without the one that overflows."""
    from mxnet import autograd, nd

    from training import setup, weights

    net, trainer = setup()
    rng = np.random.RandomState(7)
    for step in range(4):
        data = rng.randn(8, 4).astype("float32")
        if step == 1:
            continue
        with autograd.record():
            loss = (net(nd.array(data)) ** 2).sum()
        loss.backward()
        trainer.step(8)
    return weights(net)
