import logging
import re
import subprocess
import sys

import click
import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import WITHOUT_MXNET, kind, python, randn, run_python
from helpers import run_mxamp as run
from mxamp.cli.main import COMMANDS, main
from mxamp.policy.policy import Policy


def test_errors_and_log_lines_name_options(folder, monkeypatch, caplog):
    text = "`force=True`, `excluded_sym_names`, `target_dtype='float32'`, `check=False`, `x`"

    def fails(*_, **__):
        logging.getLogger("mxamp").warning("%s", text)
        raise amp.ArgumentError(text)

    for function in ("mxamp.cli.convert.convert_files", "mxamp.tools.onnx.export_onnx"):
        monkeypatch.setattr(function, fails)
    words = "--force, --keep-fp32, --dtype float32, `check=False`, `x`"
    command = ["convert", folder / "net", "--dtype", "float16", "--out", folder / "x"]
    assert run(*command, status=2).output.splitlines()[-1] == f"Error: {words}"
    command = ["export-onnx", folder / "net", "--input", "data:2,4,8,8", "--out", folder / "x"]
    assert "--force, `excluded_sym_names`" in run(*command, status=2).output
    assert caplog.messages[0] == words and "--no-check, `x`" in caplog.messages[-1]


def test_saved_policies(folder, monkeypatch):
    monkeypatch.chdir(folder)
    policy = Policy.default("bfloat16").untuned()  # with tiny layers
    policy.override(fp32_layers=["*conv0_fwd"]).save("my.toml")
    lines = run("explain", "net", "--policy", "my.toml").output.splitlines()
    assert [line.split()[2] for line in lines if " Convolution " in line].count("float32") == 2
    run("convert", "net", "--policy", "my.toml", "--out", "low")
    assert "amp_cast_bfloat16" in (folder / "low-symbol.json").read_text()
    for command in ("explain net", "convert net --out gpu"):
        output = run(*command.split(), "--policy", "my.toml", "--device", "gpu", status=2).output
        assert "GPU" in output


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("explan", "unknown command 'explan'; the closest is 'explain'"),
        ("explain net --precision flot32", "'flot32' is not one of 'float16', 'bfloat16'"),
        ("explain net --policy p.toml --dtype float16", "--dtype or --policy, not both"),
        ("convert net --out o --dtype bfloat16 --fp32-op Convolutoin", "'Convolution'"),
        ("explain net --name conv9", "unknown operator name 'conv9'; there are "),
        ("convert net --out o --dtype float32 --fp32-op softmax", "leave them out with --dtype"),
    ],
)
def test_bad_input_is_told_in_one_line(folder, monkeypatch, arguments, expected):
    monkeypatch.chdir(folder)
    output = run(*arguments.split(), status=2).output
    assert expected in output.splitlines()[-1]
    assert not list(folder.glob("o-*"))


def test_tables_are_whole_and_plain(tmp_path):
    layer = "a_layer_" + "with_a_long_name_" * 20
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name=layer)
    params = {f"{layer}_weight": randn(2, 3).tostype("row_sparse"), f"{layer}_bias": randn(2)}
    mx.model.save_checkpoint(str(tmp_path / "long"), 0, net, params, {})
    rows = run("explain", tmp_path / "long", "--dtype", "bfloat16").output.splitlines()
    reason = Policy.default("bfloat16").rule("FullyConnected").reason
    assert rows[1].startswith(f"{layer}  FullyConnected  bfloat16   {reason}")


def test_a_closed_pipe_ends_a_command_quietly(folder):
    command, pipe = [sys.executable, "-m", "mxamp", "explain", "net"], subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, text=True, stdout=pipe, stderr=pipe)
    process.stdout.close()
    assert "rror" not in process.stderr.read()  # where bfloat16 is slow, a warning is
    process.stderr.close()
    assert process.wait(timeout=60) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_whole_and_has_examples(command):
    lines = run(command, "-h").output.splitlines()
    assert max(map(len, lines)) <= 80
    assert f"    mxamp {command}" in "\n".join(lines[lines.index("  Examples:") :])
    assert COMMANDS[command][1] in run("--help").output
    options = main.get_command(click.Context(main), command).params
    assert all("May be repeated." in one.help for one in options if one.multiple)


@pytest.mark.parametrize("option, shown", [("--version", amp.__version__), ("--help", "Examples:")])
def test_version_and_help_load_neither_mxnet_nor_a_command(option, shown):
    done = python("-X", "importtime", "-m", "mxamp", option)
    assert shown in done.stdout
    assert "mxamp.cli.main" in done.stderr
    assert not re.search(r"\| +(mxnet|mxamp\.cli\.(convert|doctor))$", done.stderr, re.M)


@pytest.mark.parametrize("cast", [False, True])
def test_convert(folder, dtype, cast):
    options = ["--cast-params"] if cast else []
    command = f"convert {folder}/net --dtype {dtype} --out {folder}/low --device cpu"
    run(*command.split())
    assert "overwrite it with --force" in run(*command.split(), status=2).output
    run(*command.split(), *options, "--force")
    _, args, _ = mx.model.load_checkpoint(f"{folder}/low", 0)
    assert (dtype in map(kind, args.values())) == cast
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize(
    "given, options",
    [("2,4,8,8", []), ("data.npy", ["--input-dtype", "data:float32", "--cast-io"])],
)
def test_check(folder, monkeypatch, given, options):
    monkeypatch.chdir(folder)
    np.save("data.npy", randn(2, 4, 8, 8).asnumpy())
    command = "convert net --dtype float16 --out low --device cpu --check --input".split()
    output = run(*command, f"data:{given}", *options).output
    assert "relative error" in output and "2x3" in output and "bytes" in output
    assert re.search(r"\nlargest relative error: 0.0\d+; --tolerance: 0.25\n", output)
    declared = mx.sym.load("low-symbol.json").attr_dict().get("data", {}).get("__dtype__")
    assert (declared == "2") == ("--cast-io" in options)
    command = "convert net --dtype float32 --fuse --out x --check --tolerance 1e-9 --input".split()
    assert "a larger --tolerance" in run(*command, "data:2,4,8,8", status=1).output


@pytest.mark.parametrize("program", ["-m", "/usr/local/bin/mxamp"])
def test_without_mxnet_the_command_says_what_to_install(program):
    start = "import mxamp.__main__ as m; m.main()"
    if program == "-m":
        start = "runpy.run_module('mxamp', run_name='__main__')"
    typed = f"sys.argv = [{program!r}, 'explain', 'm']\nsys.orig_argv = ['python', '-m', 'mxamp']"
    done = run_python(f"{WITHOUT_MXNET}\n{typed}\n{start}")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Error: MXNet is not installed" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("gpus, dtype", [(0, "bfloat16"), (1, "float16")])
def test_the_default_dtype_is_the_machines(folder, on_machine, gpus, dtype):
    on_machine(gpus)
    assert f" in {dtype}" in run("explain", folder / "net").output
