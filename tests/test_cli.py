import json
import re
import subprocess
import sys
import warnings

import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner
from mxnet import gluon

import mxamp as amp
from helpers import kind, randn, run_python
from mxamp.cli.main import COMMANDS, main
from mxamp.framework import machine
from mxamp.policy.policy import Policy
from nets import convolutional, made


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


def test_saved_policies(saved, monkeypatch):
    folder, _, _ = saved
    monkeypatch.chdir(folder)
    policy = Policy.default("bfloat16").override(low=["exp"], fp32_layers=["*conv0_fwd"])
    policy.save("my.toml")
    assert " exp " in run("operators", "--class", "low", "--policy", "my.toml").output.replace(
        "\n", " "
    )
    nodes = json.loads(run("explain", "net", "--policy", "my.toml", "--json").output)["nodes"]
    precisions = {
        node["name"]: node["precision"] for node in nodes if node["operator"] == "Convolution"
    }
    assert [precisions[name] for name in sorted(precisions)].count("float32") == 2
    assert "bfloat16" in precisions.values()
    policy.override(fp32_layers=["none*"]).save("none.toml")
    output = run("explain", "net", "--policy", "none.toml").output.replace("\n", " ")
    assert "fp32_layers of the policy: unknown layer 'none*'" in output
    run("convert", "net", "--policy", "my.toml", "--out", "low")
    assert "amp_cast_bfloat16" in (folder / "low-symbol.json").read_text()
    for command in ("operators", "explain net", "convert net --out gpu"):
        output = run(*command.split(), "--policy", "my.toml", "--device", "gpu", status=2).output
        assert "GPU" in output
    Policy.default("float16", "cpu").save("cpu.toml")
    output = run("operators", "--policy", "cpu.toml", "--device", "gpu", status=2).output
    assert "the list is for the cpu only" in output
    output = run("operators", "--policy", "cpu.toml", "--dtype", "float16", status=2).output
    assert "--dtype or --policy, not both" in output


PRECISIONS = "'float16', 'bfloat16', 'float32'"
TRAINING = "explain net --mode training --input"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("operatos", "unknown command 'operatos'; the closest is 'operators'"),
        (
            "train.py",
            "there are 'convert', 'doctor', 'explain', ",
        ),
        ("operators nomatch", "unknown operator 'nomatch'; the closest is 'normal'"),
        ("operators nom*", "unknown operator 'nom*'"),
        ("operators softmax --class low", "low: softmax is fp32"),
        ("operators --class lo", "'lo' is not one of 'low', 'fp32', 'widest'"),
        ("operators --dtype flot16", "'flot16' is not one of 'float16', 'bfloat16'"),
        ("operators --device tpu", "'tpu' is not one of 'cpu', 'gpu'"),
        ("operators --dtype bfloat16 --device gpu", "no bfloat16 kernels on GPUs: give float16"),
        ("explain", "Missing argument 'PREFIX'"),
        ("explain net --precision flot32", f"'flot32' is not one of {PRECISIONS}"),
        ("explain net --dtype bfloat16 --precision float16", "computes in float16 here:"),
        ("explain net --name nomatch", "'nomatch'; there are 'residual0_conv0_fwd'"),
        ("explain net --name residual0_conv0", "Gluon adds _fwd to the name of a layer"),
        ("explain net --name nomatch --json", "The plan has 14 operators"),
        ("explain net --dtype float8", "'float8' is not one of"),
        ("explain net --mode evaluation", "'converted', 'inference', 'training'"),
        ("explain net --keep-fp32 nolayer", "unknown layer 'nolayer'"),
        ("explain net --epoch -1", "-1"),
        ("explain net --input data:1,4", "--input is for --mode inference and training"),
        (f"{TRAINING} data:0,2", "of sizes above 0"),
        (f"{TRAINING} data:99999999999,4", "up to 2,147,483,647"),
        (f"{TRAINING} data:1,4 --input data:1,4", "--input is given twice for 'data'"),
        (f"{TRAINING} dato:1,2", "--input: unknown input 'dato'"),
        ("convert net --out o --wrong", "--wrong"),
        ("convert net --out o --dtype bfloat16 --fp32-op Convolutoin", "'Convolution'"),
    ],
)
def test_bad_input_is_one_line(saved, monkeypatch, arguments, expected):
    monkeypatch.chdir(saved[0])
    output = run(*(one.strip("'") for one in arguments.split()), status=2).output
    assert expected in output
    assert len(output.strip().splitlines()) == 1
    assert not list(saved[0].glob("o-*"))


@pytest.mark.parametrize("given", ["net", "net-symbol.json", "net-0000.params"])
def test_explain_takes_a_prefix_or_either_file(saved, given):
    folder, _, _ = saved
    assert "14 operators: " in run("explain", folder / given).output


def test_operators_by_pattern():
    assert "FullyConnected" in run("operators", "--class", "low", "--dtype", "bfloat16").output
    rows = run("operators", "conv*", "concat", "softmax", "softmi?", "--dtype", "float16").output
    assert "Convolution " in rows and "Concat" in rows and "widest" in rows
    assert rows.count("\nsoftmax ") == 1
    assert "\nsoftmin " in rows


@pytest.mark.slow
def test_tables_in_a_pipe_are_whole_and_plain(saved, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    layer = "a_layer_" + "with_a_long_name_" * 20
    mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name=layer).save(
        str(tmp_path / "long-symbol.json")
    )
    params = {f"arg:{layer}_weight": randn(2, 3), f"arg:{layer}_bias": randn(2)}
    mx.nd.save(str(tmp_path / "long-0000.params"), params)
    for output in (
        run("explain", tmp_path / "long").output,
        run("operators").output,
    ):
        assert "\x1b" not in output
        assert "…" not in output
        assert "..." not in output
        assert not set("│┃─") & set(output)
    assert f"{layer}  " in run("explain", tmp_path / "long").output
    (row,) = [line for line in run("operators", "softmax").output.splitlines() if "softmax" in line]
    assert Policy.default(machine.default_dtype()).rule("softmax").reason in row


@pytest.mark.parametrize("columns", [40, 80])
def test_tables_in_a_pipe_are_as_wide_as_columns(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("operators", "conv*", "softmax", "relu").output.splitlines()
    assert columns - 20 < max(map(len, lines)) <= columns
    assert "│" not in "".join(lines)


@pytest.mark.parametrize("command", ["operators", "explain net"])
def test_a_closed_pipe_ends_a_command_quietly(saved, command):
    folder, _, _ = saved
    process = subprocess.Popen([sys.executable, "-m", "mxamp", *command.split()], cwd=folder, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(command):
    lines = run(command, "-h").output.splitlines()
    assert max(map(len, lines)) <= 80


def test_help_is_whole_and_has_examples():
    summaries = run("--help").output
    assert "..." not in summaries.partition("Commands:")[2]
    assert run().output == summaries
    for command in COMMANDS:
        text = run(command, "--help").output
        assert "Examples:" in text
        assert f"mxamp {command}" in text
    assert "PATTERN is a name" in run("explain", "--help").output


@pytest.mark.parametrize(
    "command, place",
    [("doctor", "mxamp.cli.doctor.collect"), ("operators", "mxamp.cli.explain.print_table")],
)
def test_interrupted_commands_end_in_one_line(monkeypatch, command, place):
    def interrupt(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupt)
    assert run(command, status=130).output.split() == ["interrupted"]


@pytest.mark.parametrize("option, shown", [("--version", amp.__version__), ("--help", "Examples:")])
def test_version_and_help_load_neither_mxnet_nor_a_command(option, shown):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mxamp", option],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown in done.stdout
    assert "mxamp.cli.main" in done.stderr
    assert not re.search(r"\| +(mxnet|mxamp\.cli\.(convert|doctor))$", done.stderr, re.M)


@pytest.mark.parametrize("cast", [False, True])
def test_convert(saved, dtype, cast):
    folder, data, expected = saved
    options = ["--cast-params"] if cast else []
    command = f"convert {folder}/net --dtype {dtype} --out {folder}/low --device cpu"
    run(*command.split(), *options)
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


@pytest.mark.parametrize(
    "given, options",
    [
        ("2,4,8,8", []),
        ("data.npy", []),
        ("2,4,8,8", ["--input-dtype", "data:float32", "--cast-io"]),
    ],
)
def test_check(saved, monkeypatch, given, options):
    folder, data, _ = saved
    monkeypatch.chdir(folder)
    np.save("data.npy", data.asnumpy())
    command = "convert net --dtype float16 --out low --device cpu --check --input".split()
    output = run(*command, f"data:{given}", *options).output
    assert "relative error" in output and "2x3" in output and "bytes" in output
    declared = mx.sym.load("low-symbol.json").attr_dict().get("data", {}).get("__dtype__")
    assert (declared == "2") == ("--cast-io" in options)


def test_files_are_overwritten_with_force(saved):
    folder, _, _ = saved
    (folder / "low-symbol.json").write_text("before")
    command = f"convert {folder}/net --dtype float16 --out {folder}/low --device cpu"
    assert "--force" in run(*command.split(), status=2).output
    assert (folder / "low-symbol.json").read_text() == "before"
    run(*command.split(), "--force")
    assert "amp_cast" in (folder / "low-symbol.json").read_text()


def test_explain(saved):
    folder, _, _ = saved
    command = ["explain", folder / "net", "--dtype", "float16", "--device", "gpu"]
    output = run(*command).output
    assert "Convolution" in output and "casts" in output
    command = ["explain", folder / "net", "--device", "gpu", "--precision", "float16", "--json"]
    data = json.loads(run(*command).output)
    assert data["nodes"]
    assert {node["precision"] for node in data["nodes"]} == {"float16"}


def test_explain_shows_a_converted_model_as_it_is(saved, monkeypatch):
    folder, _, _ = saved
    monkeypatch.chdir(folder)
    run("convert", "net", "--dtype", "float16", "--device", "gpu", "--out", "half")
    shown = run("explain", "half").output
    assert "the model as it is: 14 operators: " in shown and " in float16" in shown
    again = run("explain", "half", "--dtype", "bfloat16").output
    assert "This model was converted before" in again and "as it is" not in again


def test_explain_in_other_modes(saved):
    folder, _, _ = saved
    arguments = ["explain", folder / "net", "--dtype", "bfloat16", "--json"]
    shapes = ["--input", "data:2,4,8,8"]
    converted = run(*arguments).output
    training = run(*arguments, *shapes, "--mode", "training").output
    assert "layout" in converted
    assert "layout" in training
    assert "few rows" not in converted


@pytest.mark.parametrize("mode", ["converted", "inference", "training"])
def test_explain_takes_sparse_parameters(tmp_path, mode):
    mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc").save(
        str(tmp_path / "net-symbol.json")
    )
    params = {"arg:fc_weight": randn(2, 3).tostype("row_sparse"), "arg:fc_bias": randn(2)}
    mx.nd.save(str(tmp_path / "net-0000.params"), params)
    assert "1 operator: " in run("explain", tmp_path / "net", "--mode", mode).output


WITHOUT_MXNET = """
import importlib.util, runpy, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "mxnet" else real(name, package)
"""


@pytest.mark.parametrize("program", ["-m", "/usr/local/bin/mxamp"])
def test_without_mxnet_the_command_says_what_to_install(program):
    start = (
        "runpy.run_module('mxamp', run_name='__main__')"
        if program == "-m"
        else "import mxamp.__main__ as m; m.main()"
    )
    done = run_python(f"{WITHOUT_MXNET}\nsys.argv = [{program!r}, 'operators']\n"
                      f"sys.orig_argv = ['python', '-m', 'mxamp']\n{start}")  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.strip().splitlines() == [
        "error: MXNet is not installed. Install mxamp with one of its extras: mxamp[cpu] for mxnet==1.9.1, "
        "mxamp[cu112] for mxnet-cu112==1.9.1."
    ]


def test_without_mxnet_the_package_does_not_import():
    done = run_python(f"{WITHOUT_MXNET}\nsys.argv = ['train.py']\nimport mxamp")
    assert "InstallError: MXNet is not installed" in done.stderr


def test_the_default_dtype_is_the_machines(saved, monkeypatch):
    tmp_path, _, _ = saved
    for gpus, dtype in ((0, "bfloat16"), (1, "float16")):
        monkeypatch.setattr(machine, "_gpu_count", lambda gpus=gpus: gpus)
        assert machine.default_dtype() == dtype
        explained = run("explain", tmp_path / "net", "--json").output
        assert json.loads(explained)["target_dtype"] == dtype
        run("operators", "softmax")


@pytest.mark.parametrize("columns", [60, 200])
def test_reports_fit_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = CliRunner().invoke(main, ["doctor", "--no-measure"]).output.splitlines()
    assert max(map(len, lines)) <= min(columns, 100)
