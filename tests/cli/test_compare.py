"""`mxamp compare`."""

import re

import pytest
from click.testing import CliRunner

from mxamp.cli import compare
from mxamp.cli.main import main
from nets import convolutional, made


@pytest.fixture
def folder(tmp_path):
    net, data = made(convolutional)
    net.hybridize()
    net(*data)
    net.export(str(tmp_path / "net"))
    return tmp_path


def run(*arguments, status=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result


def test_compare_shows_errors_and_times(folder, monkeypatch, dtype):
    monkeypatch.setattr(compare, "_BUDGET", 0)
    monkeypatch.chdir(folder)
    run("convert", "net", "--dtype", dtype, "--cast-params", "--device", "cpu", "--out", "low")
    for other in ("low", "low-0000.params"):
        heads, row, times = run(
            "compare", "net", other, "--input", "data:2,4,8,8"
        ).output.splitlines()
        assert "relative error" in heads
        assert 0 < float(re.split(" {2,}", row)[2]) < 0.1
        assert re.search(r": .* ms; .*: .* ms, .* times as fast \(quartiles ", times)
