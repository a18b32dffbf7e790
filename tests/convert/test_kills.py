"""A process that is killed while it writes leaves whole files: the old version or the new one.

MXAMP_KILLS is how often each kind of write is killed, at random moments; 4 by default.
"""

import os
import random
import subprocess
import sys
import time

import mxnet as mx
import pytest

import mxamp as amp
from helpers import ROOT

KILLS = int(os.environ.get("MXAMP_KILLS", "4"))
#: A version is a number in the symbol and in each parameter, or the loss scale and each momentum.
CHILD = """
import sys
import mxamp as amp
import mxnet as mx
from mxnet import autograd, gluon

kind, version, folder = sys.argv[1], float(sys.argv[2]), sys.argv[3]
if kind == "model":
    symbol, params = mx.sym.var("data"), {}
    for i in range(8):
        symbol = mx.sym.FullyConnected(symbol, num_hidden=1024, no_bias=True, name=f"layer{i}")
        params[f"layer{i}_weight"] = mx.nd.full((1024, 256), version)
    mx.model.save_checkpoint(f"{folder}/source", 0, symbol * version, params, {})
    options = {"target_dtype": "bfloat16", "force": True}
    write = lambda: amp.convert_files(f"{folder}/source", f"{folder}/model", **options)
else:
    params = gluon.ParameterDict()
    for i in range(8):
        params.get(f"w{i}", shape=(1024, 256), init="zeros")
    params.initialize()
    settings = {"learning_rate": 1.0, "momentum": 1.0}
    trainer = gluon.Trainer(params, "sgd", settings, update_on_kvstore=False)
    with autograd.record():
        loss = sum((param.data() * -version).sum() for param in params.values())
    loss.backward()
    trainer.step(1)
    amp.init_trainer(trainer, amp.StaticLossScaler(version))
    write = lambda: trainer.save_states(f"{folder}/states")
mx.nd.waitall()
print("ready", flush=True)
write()
"""


def started(kind, version, folder):
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, kind, str(version), str(folder)],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    with child.stdout:
        assert child.stdout.readline() == b"ready\n"
    return child


def versions(kind, folder):
    """Return all numbers in the files."""
    if kind == "model":
        symbol, params, _ = mx.model.load_checkpoint(str(folder / "model"), 0)
        arrays, others = params.values(), [float(symbol.attr("scalar"))]
    else:
        params = mx.gluon.ParameterDict()
        for i in range(8):
            params.get(f"w{i}", shape=(1024, 256), init="zeros")
        params.initialize()
        trainer = mx.gluon.Trainer(params, "sgd", {"momentum": 1.0}, update_on_kvstore=False)
        amp.init_trainer(trainer, amp.StaticLossScaler(1))
        trainer.load_states(str(folder / "states"))
        arrays, others = trainer._updaters[0].states.values(), [trainer.amp_loss_scale]
    assert len(arrays) == 8
    return {
        *others,
        *(float(end) for one in arrays for end in (one.max().asscalar(), one.min().asscalar())),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "states"])
def test_a_killed_write_leaves_whole_files(kind, tmp_path):
    first = started(kind, 1, tmp_path)
    start = time.monotonic()
    assert first.wait() == 0
    usual, old = time.monotonic() - start, 1
    expected = set(os.listdir(tmp_path))
    for version in range(2, KILLS + 2):
        child = started(kind, version, tmp_path)
        time.sleep(random.random() * usual)
        child.kill()
        child.wait()
        if kind == "model" and not (tmp_path / "model-symbol.json").exists():
            continue  # no reader finds a mixture
        found = versions(kind, tmp_path)
        assert found in ({old}, {version})
        old = found.pop()
    for orphan in tmp_path.glob(".*.mxamp-new-*"):
        os.utime(orphan, (0, 0))
    assert started(kind, KILLS + 2, tmp_path).wait() == 0
    assert versions(kind, tmp_path) == {KILLS + 2}
    assert set(os.listdir(tmp_path)) == expected, "temporary files stay"
