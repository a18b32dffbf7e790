import json
import subprocess
import sys
import warnings

import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner
from mxnet import gluon

import mxamp as amp
from helpers import kind, randn
from mxamp.cli import main
from test_symbolic import convolutional, made


@pytest.fixture
def saved(tmp_path):
    net, data = made(convolutional)
    net.hybridize()
    expected = net(*data)
    net.export(str(tmp_path / "net"))
    return tmp_path, data[0], expected


def run(*arguments, status=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result


def test_info():
    assert "bfloat16 on the CPU" in run("info").output


def test_operators():
    output = run("operators", "concat", "softmax", "--dtype", "float16").output
    assert "Concat" in output
    assert "widest" in output
    assert "FullyConnected" in run("operators", "--class", "low", "--dtype", "bfloat16").output


def test_version_and_module():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mxamp", "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert amp.__version__ in done.stdout


@pytest.mark.parametrize("cast", [False, True])
def test_convert(saved, dtype, cast):
    folder, data, expected = saved
    options = ["--cast-params"] if cast else []
    run(
        "convert",
        folder / "net",
        "--dtype",
        dtype,
        "--out",
        folder / "low",
        "--device",
        "cpu",
        *options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = gluon.SymbolBlock.imports(
            str(folder / "low-symbol.json"), ["data"], str(folder / "low-0000.params")
        )
    np.testing.assert_allclose(net(data).asnumpy(), expected.asnumpy(), rtol=0.1, atol=0.1)
    kinds = {kind(p.data()) for p in net.collect_params().values()}
    assert (dtype in kinds) == cast
    assert sorted(p.name for p in folder.iterdir()) == [
        "low-0000.params", "low-symbol.json", "net-0000.params", "net-symbol.json",
    ]  # fmt: skip


def test_nothing_is_overwritten_without_force(saved):
    folder, _, _ = saved
    before = (folder / "net-symbol.json").read_bytes()
    command = [
        "convert",
        folder / "net",
        "--dtype",
        "float16",
        "--out",
        folder / "net",
        "--device",
        "cpu",
    ]
    assert "--force" in run(*command, status=2).output
    assert (folder / "net-symbol.json").read_bytes() == before
    run(*command, "--force")
    assert (folder / "net-symbol.json").read_bytes() != before


@pytest.mark.parametrize(
    "change, words",
    [
        ({"prefix": "none"}, "no file"),
        ({"--fp32-op": "Convolutoin"}, "'Convolution'"),
        ({"--keep-fp32": "no_such_layer"}, "no_such_layer"),
    ],
)
def test_errors_are_one_line(saved, change, words):
    folder, _, _ = saved
    options = [x for k, v in change.items() if k.startswith("--") for x in (k, v)]
    prefix = change.get("prefix", "net")
    result = run(
        "convert",
        folder / prefix,
        "--dtype",
        "bfloat16",
        "--out",
        folder / "low",
        *options,
        status=2,
    )
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not list(folder.glob("low*"))


def test_files_that_are_no_models(tmp_path):
    (tmp_path / "net-symbol.json").write_text("{}")
    mx.nd.save(str(tmp_path / "net-0000.params"), {"arg:x": randn(1)})
    result = run(
        "convert", tmp_path / "net", "--dtype", "float16", "--out", tmp_path / "o", status=2
    )
    assert "can't be read" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_explain(saved):
    folder, _, _ = saved
    output = run("explain", folder / "net", "--dtype", "float16", "--device", "gpu").output
    assert "Convolution" in output
    assert "casts" in output
    command = ["explain", folder / "net", "--device", "gpu", "--precision", "float16", "--json"]
    data = json.loads(run(*command).output)
    assert data["nodes"]
    assert {node["precision"] for node in data["nodes"]} == {"float16"}
    assert "no file" in run("explain", folder / "none", status=2).output
