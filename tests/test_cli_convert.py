"""`mxamp convert`: what it says of bad input, in one line that names the file or the option."""

import io
import os
import re
import shutil
import sys
import textwrap

import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from helpers import randn, run_forked
from mxamp.cli import screen
from mxamp.cli.main import main
from mxamp.patches.announcements import _logged

S = mx.sym
NET = S.FullyConnected(S.var("data"), num_hidden=4, name="fc")
NET = S.FullyConnected(NET, num_hidden=3, name="head_fwd")
PARAMS = {
    "fc_weight": randn(4, 8), "fc_bias": randn(4), "head_fwd_weight": randn(3, 4),
    "head_fwd_bias": randn(3),
}  # fmt: skip
# Underflows in float16, and only there.
LOST = S.FullyConnected(S.var("data") * 1e-30, num_hidden=4, no_bias=True, name="fc") * 1e30
# Overflows in float16, and only there.
HUGE = S.FullyConnected(S.var("data") * 1e5, num_hidden=4, no_bias=True, name="fc")

CUSTOM = """
import mxnet as mx

@mx.operator.register("cli_doubled")
class Doubled(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        class Op(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                self.assign(out_data[0], req[0], in_data[0] * 2)
        return Op()
"""


ONES = np.ones((2, 8))
ARRAYS = {
    "data": ONES.astype("float32"), "huge": ONES * 1e300, "text": ONES.astype(str),
    "complex": ONES * 1j,
}  # fmt: skip


def save(prefix, epoch=0, net=NET, **changes):
    params = {**PARAMS, **changes}
    params = {name: value for name, value in params.items() if name in net.list_inputs()}
    mx.model.save_checkpoint(prefix, epoch, net, params, {})


@pytest.fixture(autouse=True)
def warned_before():
    """The line about float16 on CPUs, which a process writes once."""
    _logged.add("float16")


def test_float16_on_a_cpu_is_warned_of(tmp_path, models):
    _logged.clear()
    result = run("m", "--dtype", "float16", "--out", str(tmp_path / "x"))
    assert result.exit_code == 0
    assert "warning: float16 on a CPU is for trying" in result.output
    assert "For GPUs give --device gpu" in result.output


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    before = os.getcwd()
    os.chdir(folder)
    for name in ("m", "cut", "cutp", "list", "foreign", "attribute", "folder", "pipe"):
        save(name)
    for epoch in (3, 7):
        save("many", epoch)
    save("one", 5)
    save("lost", net=LOST)
    save("large", fc_weight=PARAMS["fc_weight"] * 1e6)
    save("huge", net=HUGE)
    mx.nd.save("list-0000.params", [mx.nd.ones(2)])
    foreign = {f"arg:conv{i}_weight": mx.nd.ones(2) for i in range(5)}
    mx.nd.save("foreign-0000.params", foreign)
    mx.nd.waitall()
    with open("m-symbol.json") as file:
        text = file.read()
    with open("m-0000.params", "rb") as file:
        params = file.read()
    contents = {
        "cut-symbol.json": text[: len(text) // 2].encode(),
        "cutp-0000.params": params[: len(params) // 2], "m.onnx": b"x",
        "cli_custom.py": CUSTOM.encode(), "cli_broken.py": b"1 / 0",
    }  # fmt: skip
    for name, content in contents.items():
        with open(name, "wb") as file:
            file.write(content)
    # Saved where the operator is registered, and read where it is not.
    custom = S.FullyConnected(S.sigmoid(S.var("data"), name="custom"), num_hidden=4, name="fc")
    save("custom", net=custom)
    with open("custom-symbol.json") as file:
        text = file.read().replace(
            '"op": "sigmoid"', '"op": "Custom", "attrs": {"op_type": "cli_doubled"}'
        )
    with open("custom-symbol.json", "w") as file:
        file.write(text)
    os.mkdir("dir-symbol.json")
    for name, values in ARRAYS.items():
        np.save(f"{name}.npy", values)
    with open("attribute-symbol.json", "w") as file:
        file.write(NET.tojson().replace("num_hidden", "num_hiddn"))
    for name in ("folder", "pipe"):
        os.remove(f"{name}-0000.params")
    os.mkdir("folder-0000.params")
    os.mkfifo("pipe-0000.params")
    for part in ("symbol.json", "0000.params"):
        os.symlink(f"m-{part}", f"link-{part}")
    shutil.copytree(os.path.dirname(lists("float16")), "lists")
    os.chdir(before)
    return folder


def lists(dtype):
    from mxamp.policy.lists import lists_folder

    return str(lists_folder() / f"{dtype}.toml")


def run(*arguments):
    return CliRunner().invoke(main, ["convert", *arguments], prog_name="mxamp")


@pytest.fixture(autouse=True)
def in_folder(models, monkeypatch):
    """Run in the folder of the models, and leave it and the path of imports as they were."""
    monkeypatch.chdir(models)
    monkeypatch.setattr(sys, "path", sys.path[:])
    before = set(os.listdir())
    yield
    for name in set(os.listdir()) - before:
        (shutil.rmtree if os.path.isdir(name) else os.remove)(name)


F16 = "--dtype float16"
CHECK = f"m {F16} --out x --check --input"
LONG = "n" * 300

#: The arguments, what the answer says, and the status.
BAD = [
    (f"m {F16} --out x --tolerance 0.1", ["--tolerance is for --check"], 2),
    (f"m {F16} --out x-symbol.json", ["--out must be the prefix", "'x', not 'x-symbol.json'"], 2),
    (f"m {F16} --out x --input-dtype data", ["--input-dtype takes NAME:VALUE"], 2),
    (f"cut {F16} --out x", ["'cut-symbol.json'", "no JSON, or was cut off"], 2),
    (f"cutp {F16} --out x", ["'cutp-0000.params'", "cut off"], 2),
    (f"list {F16} --out x", ["'list-0000.params'", "start with arg: or aux:"], 2),
    (f"foreign {F16} --out x",
     ["'foreign-0000.params'", "'foreign-symbol.json'", "4 missing (fc_bias, fc_weight, head_fwd_bias and 1 other)",
      "5 that the symbol does not have (conv0_weight,"], 2),
    ("m --dtype float32 --out x --fp32-op softmax", ["leave out --policy and --fp32-op"], 2),
    (f"{CHECK} data:0,8", ["--input", "sizes above 0", "'data:0,8'"], 2),
    (f"{CHECK} data:99999999999,8", ["less than 2**31 elements"], 2),
    (f"{CHECK} data:nofile.npy", ["--input data:nofile.npy", "No such file"], 2),
    (f"{CHECK} data:1,3", ["don't fit", "fc"], 2),
    (f"m {F16} --out x --check", ["shapes of the inputs data", "--input"], 2),
    (f"m.onnx {F16} --out x", ["give the prefix", "('m')"], 2),
    (f"nothing {F16} --out x", ["no file 'nothing-symbol.json'", "the prefix"], 2),
    (f"many {F16} --epoch 4 --out x", ["epoch 3, 7 (--epoch)"], 2),
    (f"many {F16} --out x", ["epochs 3, 7", "--epoch"], 2),
    (f"custom {F16} --out x", ["'custom-symbol.json'", "'cli_doubled'", "--import"], 2),
    (f"m {F16} --out x --import cli_broken", ["--import", "'cli_broken'", "division by zero"], 2),
    ("m --out x", ["--dtype", "--policy"], 2),
    ("m --out x --policy nofile.toml", ["'nofile.toml'"], 2),
    (f"m --out x --policy lists/float16.toml {F16}", ["--dtype or --policy, not both"], 2),
    (f"m {F16} --out ./m --force", ["the model itself", "never overwrites"], 2),
    (f"link {F16} --out m --force", ["the model itself"], 2),
    (f"m {F16} --out ''", ["empty", "--out"], 2),
    (f"m {F16} --out none/x", ["no folder", "none'"], 2),
    (f"m {F16} --out dir", ["'dir-symbol.json' is a folder"], 2),
    (f"m {F16} --out one --epoch 5", ["'one-symbol.json' is there already", "--force"], 2),
    (f"m {F16} --out x --keep-fp32 head", ["unknown layer 'head'", "'head_fwd'", "_fwd"], 2),
    (f"m {F16} --out x --fuse", ["--fuse is for inference in bfloat16"], 2),
    ("m --dtype bfloat16 --device gpu --out x", ["no bfloat16 kernels on GPUs", "give float16, or the CPU"], 2),
    (f"m {F16} --device gpu --out x --check --input data:2,8", ["does not run here", "GPU"], 1),
    (f"m {F16} --out {LONG}", [f"'{LONG}-symbol.json' can't be written (File name too long): give another name"], 2),
    *((f"{CHECK} data:{name}.npy", ["input 'data' must be an array of booleans, integers or floats", f"2x8 in {kind}"], 2)
      for name, kind in (("text", "str"), ("complex", "complex128"))),
    (f"{CHECK} data:huge.npy", ["input 'data' is NaN, infinity or beyond float32 in 16 elements"], 2),
    (f"{CHECK} data:2,8 --input data:data.npy", ["--input is given twice for 'data': '2,8' and 'data.npy'"], 2),
    (f"m {F16} --out x --input-dtype dato:int32", ["--input-dtype: unknown input 'dato'"], 2),
    (f"attribute {F16} --out x", ["'attribute-symbol.json'", "Cannot find argument 'num_hiddn'"], 2),
    (f"folder {F16} --out x", ["'folder-0000.params' is a folder, and not a file"], 2),
    (f"pipe {F16} --out x", ["'pipe-0000.params' is a pipe or a device, and not a file"], 2),
]  # fmt: skip


@pytest.mark.parametrize("arguments, said, status", BAD, ids=[one[0] for one in BAD])
def test_bad_input_is_one_line(arguments, said, status):
    before = set(os.listdir())
    result = run(*(one.strip("'") for one in arguments.split()))
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == status, result.output
    assert len(result.output.strip().splitlines()) == 1
    for part in said:
        assert part in result.output
    for argument in ("Traceback", "excluded_sym_names", "cast_optional_params", "force=", "fuse="):
        assert argument not in result.output
    assert set(os.listdir()) - {"__pycache__"} == before - {"__pycache__"}


#: The arguments of a check that fails, the last cells of a row of its table, and words of the error.
FAILED = [
    (f"{CHECK} data:2,8 --tolerance 1e-9", ["0", "100.0%"], ["'head_fwd_output'", "tolerance of 1e-09", "--tolerance"]),
    (f"lost {F16} --out x --check --input data:2,8", ["1.00e+00"], ["relative error of 1,", "--keep-fp32"]),
    ("huge --dtype float16 --out x --check --input data:data.npy", ["8"], ["Inf or NaN in 8 elements", "--keep-fp32"]),
]  # fmt: skip


@pytest.mark.parametrize("arguments, cells, said", FAILED, ids=[one[0] for one in FAILED])
def test_a_failed_check_shows_the_errors_of_outputs_then_one_line(arguments, cells, said):
    before = set(os.listdir())
    result = run(*arguments.split())
    assert result.exit_code == 1, result.output
    (row,) = (
        line for line in result.stdout.splitlines() if "_output" in line and "error:" not in line
    )
    assert set(cells) <= set(re.split(" {2,}", row))
    *_, last = result.output.strip().splitlines()
    for part in ("error: ", "nothing was written", *said):
        assert part in last
    assert set(os.listdir()) - {"__pycache__"} == before - {"__pycache__"}


#: The arguments, the file that is written, and what warnings and the last line say.
GOOD = [
    (f"m {F16}", "x-0000.params", ["larger", "--cast-params"]),
    (f"m-symbol.json {F16}", "x-0000.params", []),
    (f"one {F16}", "x-0005.params", []),
    (f"large {F16}", "x-0000.params",
     ["warning: ", "'fc_weight' holds", "finite values that would be infinity in float16", "--keep-fp32"]),
    (f"large {F16} --cast-params", "x-0000.params", ["warning: ", "'fc_weight' to float16", "--cast-params off"]),
    (f"m {F16} --check --input data:data.npy", "x-0000.params", ["head_fwd_output", "relative error"]),
]  # fmt: skip


@pytest.mark.parametrize("arguments, written, said", GOOD, ids=[one[0] for one in GOOD])
def test_a_model_is_converted(tmp_path, arguments, written, said):
    result = run(*arguments.split(), "--out", str(tmp_path / "x"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / written).is_file()
    assert "amp_cast_float16" in (tmp_path / "x-symbol.json").read_text()
    for part in ("bytes, from", *said):
        assert part in result.output
    assert ("warning" in result.output) == ("warning: " in said)


def test_policies_from_files(tmp_path):
    result = run("m", "--policy", "lists/bfloat16.toml", "--out", str(tmp_path / "x"))
    assert result.exit_code == 0, result.output
    assert "amp_cast_bfloat16" in (tmp_path / "x-symbol.json").read_text()
    result = CliRunner().invoke(main, ["explain", "m", "--policy", "lists/float16.toml", "--json"])
    assert '"target_dtype": "float16"' in result.output


@pytest.mark.slow
def test_custom_operators_are_imported(tmp_path):
    """In another process, as MXNet keeps what is registered until the process ends."""
    code = """
        import sys
        from mxamp.cli.main import main
        try:
            main(sys.argv[1:], prog_name="mxamp")
        except SystemExit as done:
            assert not done.code, done.code
    """
    for command in ("convert", "explain"):
        out = ["--out", str(tmp_path / "x")] if command == "convert" else []
        arguments = [command, "custom", "--dtype", "float16", "--import", "cli_custom", *out]
        lines = f"import sys; sys.argv[1:] = {arguments!r}\n{textwrap.dedent(code)}"
        done = run_forked(lines, tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "x-symbol.json").is_file()


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_for_terminals(tmp_path, terminal, monkeypatch):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=200)
    monkeypatch.setattr(screen, "Console", lambda **_: console)
    result = run("m", "--dtype", "float16", "--out", str(tmp_path / "x"), "--cast-params")
    assert len(result.output.strip().splitlines()) == 1
    assert bool(shown.getvalue()) == terminal


def test_half_precision_is_taken_out():
    assert run("m", "--dtype", "float16", "--cast-params", "--out", "half").exit_code == 0
    done = run("half", "--dtype", "float32", "--out", "wide", "--check", "--input", "data:2,8")
    assert done.exit_code == 0, done.output
    assert "larger" not in done.output
    _, args, _ = mx.model.load_checkpoint("wide", 0)
    assert {str(value.dtype) for value in args.values()} == {"<class 'numpy.float32'>"}
