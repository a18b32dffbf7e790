"""`mxamp compare`."""

import re

from helpers import run_mxamp as run
from mxamp.cli import compare


def test_compare_shows_errors_and_times(folder, monkeypatch, dtype):
    monkeypatch.setattr(compare, "_BUDGET", 0)
    monkeypatch.chdir(folder)
    run("convert", "net", "--dtype", dtype, "--cast-params", "--device", "cpu", "--out", "low")
    for other in ("low", "low-0000.params"):
        shown = run("compare", "net", other, "--input", "data:2,4,8,8").output
        heads, row, times = shown.splitlines()
        assert "relative error" in heads
        assert 0 < float(re.split(" {2,}", row)[2]) < 0.1
        assert re.search(r": .* ms; .*: .* ms, .* times as fast \(quartiles ", times)
