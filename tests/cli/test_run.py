"""`mxamp run`: Python runs a program in mixed precision."""

import os
import re
import textwrap

import pytest

from helpers import ROOT, python, run_mxamp

PROGRAMS = ROOT / "tests" / "programs"
IN_MIXED_PRECISION = "import mxnet, os, sys; amp = sys.modules['mxamp']; assert amp.is_enabled()\n"


def mxamp_run(folder, *arguments, options=("--dtype", "bfloat16"), stdin="", before=()):
    """Run the command; return its status, lines of output and lines of errors."""
    command = [*before, "-m", "mxamp", "run", *options, *arguments]
    done = python(*command, cwd=folder, stdin=stdin)
    errors = [line for line in done.stderr.splitlines() if "No cuda driver detected" not in line]
    return done.returncode, done.stdout.splitlines(), errors


def write(path, text, start=IN_MIXED_PRECISION):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(start + textwrap.dedent(text))
    return path


@pytest.fixture(autouse=True)
def _with_start_up_hook():
    pytest.importorskip("mxamp_startup", reason="the start-up hook is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("arguments, wanted", [
    (["train.py", "--dtype", "int8", "--help", "-m"], "__main__ train.py ['--dtype', 'int8', '--help', '-m']"),
    (["-m", "package.train", "--epochs"], "package.train train.py ['--epochs']"),
    (["folder", "a"], "__main__ folder ['a']"),
    (["-", "a"], "None - ['a']"),
])  # fmt: skip
def test_programs_and_their_arguments(tmp_path, arguments, wanted):
    show = """
    print(__spec__ and __spec__.name, os.path.basename(sys.argv[0]), sys.argv[1:])
    """
    write(tmp_path / "package" / "__init__.py", "", start="")
    for path in ("package/train.py", "folder/__main__.py", "train.py"):
        write(tmp_path / path, show)
    stdin = IN_MIXED_PRECISION + textwrap.dedent(show)
    status, lines, _ = mxamp_run(tmp_path, *arguments, stdin=stdin)
    assert (status, lines) == (0, [wanted.replace("__main__ train", "None train")])


def test_the_end_of_a_program_is_its_own(tmp_path):
    text = "print(sys.flags.dev_mode, os.environ['MXNET_ENABLE_AUTO_MIXED_PRECISION'])\n1 / 0"
    write(tmp_path / "train.py", text)
    status, lines, errors = mxamp_run(tmp_path, "train.py", before=["-X", "dev"])
    assert (status, lines) == (1, ["True bfloat16"])
    assert "ZeroDivisionError: division by zero" in errors
    assert len([line for line in errors if line.startswith("  File ")]) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_script_that_calls_init_hears_of_both_policies(tmp_path, dtype):
    write(tmp_path / "train.py", f"from mxnet.contrib import amp\namp.init({dtype!r})")
    status, _, errors = mxamp_run(tmp_path, "train.py")
    assert status == 0
    on = [line for line in errors if "mixed precision is on: " in line]
    assert [f": {dtype} on cpu" in line for line in on] == [dtype == "bfloat16", True]
    assert len([line for line in errors if "hardware" in line]) <= 1
    assert not [line for line in errors if "is off" in line]


@pytest.mark.slow
def test_a_policy_file_counts_for_the_program(tmp_path):
    write(tmp_path / "train.py", "print(amp.current_policy().target_dtype)")
    options = ["--policy", os.path.relpath(ROOT / "lists" / "float16.toml", tmp_path)]
    assert mxamp_run(tmp_path, "train.py", options=options)[:2] == (0, ["float16"])


@pytest.mark.slow
def test_a_wrong_policy_file_ends_the_program(tmp_path):
    write(tmp_path / "train.py", "print('in float32')", start="import mxnet\n")
    (tmp_path / "wrong.toml").write_text("what = ")
    status, lines, errors = mxamp_run(tmp_path, "train.py", options=["--policy", "wrong.toml"])
    assert (status, lines, len(errors)) == (2, [], 1)
    assert "wrong.toml' is not valid TOML" in errors[0]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--dtype int8 train.py", "'int8' is not one of 'float16', 'bfloat16', 'float32', 'auto'"),
        ("--policy none.toml train.py", "'none.toml' does not exist"),
        ("--dtype float16 --policy {list} train.py", "--dtype or --policy, not both"),
        ("", "Missing argument 'SCRIPT'"),
    ],
)
def test_wrong_options_are_errors(arguments, words):
    given = arguments.format(list=ROOT / "lists" / "float16.toml").split()
    assert words in run_mxamp("run", *given, status=2).output.splitlines()[-1]


def test_an_error_where_the_hook_is_not_loaded(tmp_path):
    write(tmp_path / "train.py", "print('in float32')", start="")
    code = "import site; site.main(); del sys.modules['mxamp_startup']; import mxamp.cli.main as m; m.main()"
    code = f"import sys; sys.argv = ['mxamp', 'run', 'train.py']; {code}"
    done = python("-S", "-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch("Error: Python did not load mxamp_startup.pth: install .*\n", done.stderr)


def test_statistics_are_printed_whatever_the_end(tmp_path):
    text = "import mxnet as mx\nmx.nd.relu(mx.nd.relu(mx.nd.ones(1)))\nraise SystemExit(3)"
    write(tmp_path / "counted.py", text)
    options = ("--dtype", "bfloat16", "--stats")
    status, _, lines = mxamp_run(tmp_path, "counted.py", options=options)
    assert status == 3
    assert any(re.fullmatch(r"relu +float32 +2", line) for line in lines), lines


def test_auto_runs_the_script_in_float32_where_that_is_fast(tmp_path, monkeypatch):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    text = """
    import mxnet as mx, os, sys
    policy = sys.modules["mxamp"].current_policy()
    print(policy.target_dtype, os.environ["MXNET_ENABLE_AUTO_MIXED_PRECISION"])
    mx.nd.dot(mx.nd.ones((2, 2)), mx.nd.ones((2, 2))).wait_to_read()
    """
    write(tmp_path / "train.py", text, start="")
    status, lines, errors = mxamp_run(tmp_path, "train.py", options=("--dtype", "auto", "--stats"))
    assert (status, lines) == (0, ["float32 auto"])
    assert any(re.fullmatch(r"dot +float32 +1", line) for line in errors), errors
    assert any("'auto' is float32 here" in line for line in errors)


@pytest.mark.slow
def test_a_run_starts_fast(tmp_path):
    status, (first, modules), _ = mxamp_run(tmp_path, str(PROGRAMS / "loaded_modules.py"))
    assert status == 0
    loaded = modules.split()
    assert first == "True,True", "the collector is on, and never scans MXNet's modules"
    assert "mxamp.frontends.automatic" in loaded
    assert not [name for name in loaded if name == "rich" or name.startswith("mxamp.cli")]
    assert not [name for name in loaded if name.startswith(("mxamp.tools", "mxamp.convert"))]
