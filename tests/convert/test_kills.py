"""A process that is killed while it writes leaves whole files: the old version or the new one.

MXAMP_KILLS is how often a write is killed, at random moments; 4 by default.
"""

import os
import random
import subprocess
import sys
import time

import mxnet as mx
import pytest

from helpers import ROOT

KILLS = int(os.environ.get("MXAMP_KILLS", "4"))
#: A version is a number in the symbol and in each parameter.
CHILD = """
import sys
import mxamp as amp
import mxnet as mx

version, folder = float(sys.argv[1]), sys.argv[2]
symbol, params = mx.sym.var("data"), {}
for i in range(8):
    symbol = mx.sym.FullyConnected(symbol, num_hidden=512, no_bias=True, name=f"layer{i}")
    params[f"layer{i}_weight"] = mx.nd.full((512, 512), version)
mx.model.save_checkpoint(f"{folder}/source", 0, symbol * version, params, {})
options = {"target_dtype": "bfloat16", "force": True}
mx.nd.waitall()
print("ready", flush=True)
amp.convert_files(f"{folder}/source", f"{folder}/model", **options)
"""


def started(version, folder):
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(version), str(folder)],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    with child.stdout:
        assert child.stdout.readline() == b"ready\n"
    return child


def versions(folder):
    """Return all numbers in the files."""
    symbol, params, _ = mx.model.load_checkpoint(str(folder / "model"), 0)
    arrays, number = params.values(), float(symbol.attr("scalar"))
    assert len(arrays) == 8
    ends = [float(end) for one in arrays for end in (one.max().asscalar(), one.min().asscalar())]
    return {number, *ends}


@pytest.mark.slow
def test_a_killed_write_leaves_whole_files(tmp_path):
    first = started(1, tmp_path)
    start = time.monotonic()
    assert first.wait() == 0
    usual, old = time.monotonic() - start, 1
    expected = set(os.listdir(tmp_path))
    for version in range(2, KILLS + 2):
        child = started(version, tmp_path)
        time.sleep(random.random() * usual)
        child.kill()
        child.wait()
        if not (tmp_path / "model-symbol.json").exists():
            continue  # no reader finds a mixture
        found = versions(tmp_path)
        assert found in ({old}, {version})
        old = found.pop()
    for orphan in tmp_path.glob(".*.mxamp-new-*"):
        os.utime(orphan, (0, 0))
    assert started(KILLS + 2, tmp_path).wait() == 0
    assert versions(tmp_path) == {KILLS + 2}
    assert set(os.listdir(tmp_path)) == expected, "temporary files stay"
