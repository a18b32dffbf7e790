"""`mxamp run` runs a program as `python` does: arguments, paths, errors, exit codes, processes."""

import os
import py_compile
import re
import subprocess
import sys
import textwrap
import zipfile

import pytest

from helpers import ROOT, run_forked

IN_MIXED_PRECISION = "import sys; amp = sys.modules['mxamp']; assert amp.is_enabled()\n"
PROGRAMS = ROOT / "tests" / "programs"


def mxamp_run(folder, *arguments, stdin="", options=("--dtype", "bfloat16")):
    """Run the command in a forked process; return its status, output and errors without log lines."""
    code = f"""
    import io, os, sys
    os.chdir({str(folder)!r})
    sys.path[0] = "of the command"
    sys.stdin = io.TextIOWrapper(io.BytesIO({stdin.encode()!r}))
    sys.argv = ["mxamp", "run", *{options!r}, *{arguments!r}]
    from mxamp.cli.main import main
    main()
    """
    done = run_forked(textwrap.dedent(code), folder)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("mxamp: ")]
    # MXNet's GPU build says in each process that there is no driver, where there is none.
    lines = [line for line in lines if "No cuda driver detected" not in line]
    return done.returncode, done.stdout.splitlines(), lines


def log_lines(folder):
    lines = (folder / "stderr").read_text().splitlines()
    return [line for line in lines if line.startswith("mxamp: ")]


def write(path, text, start=IN_MIXED_PRECISION):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(start + textwrap.dedent(text))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["--epochs", "3", "-x"], ["--dtype", "int8", "--help", "-m", "a"], ["--", "a", "--"], []]
)  # fmt: skip
def test_arguments_are_the_scripts(tmp_path, arguments):
    write(tmp_path / "train.py", "print(sys.argv)")
    assert mxamp_run(tmp_path, "train.py", *arguments) == (0, [str(["train.py", *arguments])], [])


@pytest.mark.slow
def test_options_after_the_script_are_told(tmp_path):
    write(tmp_path / "train.py", "")
    mxamp_run(tmp_path, "train.py", "--dtype=float16", "--epochs", "3", "--dtype", "x")
    told = [line for line in log_lines(tmp_path) if "go before it" in line]
    assert told == [
        "mxamp: --dtype stands after train.py and went to the script; options of mxamp run go "
        "before it"
    ]


@pytest.mark.slow
def test_a_script_in_another_folder_is_the_main_module(tmp_path):
    write(tmp_path / "far" / "beside.py", "x = 1", start="")
    text = """
    import atexit, pickle, threading, time, os, beside
    class Config:
        pass
    def late():
        print(type(pickle.loads(pickle.dumps(Config()))).__module__, __name__)
    atexit.register(late)
    threading.Thread(target=lambda: (time.sleep(0.2), late())).start()
    print(sys.argv[0], sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
    print(os.environ["MXNET_ENABLE_AUTO_MIXED_PRECISION"])  # for the processes that it starts
    """
    write(tmp_path / "far" / "train.py", text)
    # A process of multiprocessing ends without the functions at exit: `late` runs in the thread.
    wanted = ["far/train.py True", "bfloat16", "__main__ __main__"]
    assert mxamp_run(tmp_path, "far/train.py") == (0, wanted, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, wanted",
    [
        (["-m", "package.train", "--epochs"], "package.train train.py True ['--epochs']"),
        (["-m", "package"], "package.__main__ __main__.py True []"),
        (["folder", "a"], "__main__ folder False ['a']"),
        (["-", "a"], "None - False ['a']"),
    ],
)
def test_modules_packages_folders_and_standard_input(tmp_path, arguments, wanted):
    show = """
    import os
    name = os.path.basename(sys.argv[0])
    print(__spec__ and __spec__.name, name, sys.path[0] == os.getcwd(), sys.argv[1:])
    """
    write(tmp_path / "package" / "__init__.py", "", start="")
    for path in ("package/train.py", "package/__main__.py", "folder/__main__.py"):
        write(tmp_path / path, show)
    stdin = IN_MIXED_PRECISION + textwrap.dedent(show)
    assert mxamp_run(tmp_path, *arguments, stdin=stdin) == (0, [wanted], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, status, last",
    [
        ("sys.exit(7)", 7, None), ("sys.exit('no data')", 1, "no data"), ("sys.exit()", 0, None),
        ("raise OSError('mine')", 1, "OSError: mine"), ("raise amp.ArgumentError('x')", 1, "mxamp.errors.ArgumentError: x"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"), ("raise EOFError", 1, "EOFError"),
        ("sys.excepthook = lambda *e: print('hooked'); 1 / 0", 1, None),
    ],
)  # fmt: skip
def test_the_end_of_a_script_is_its_own(tmp_path, line, status, last):
    write(tmp_path / "train.py", line)
    found, lines, errors = mxamp_run(tmp_path, "train.py")
    assert found == status
    assert lines == (["hooked"] if "hooked" in line else [])
    assert (errors[-1] if errors else None) == last
    files = [text for text in errors if text.startswith("  File ")]
    assert len(files) == (1 if len(errors) > 1 else 0)  # no frame of mxamp
    assert all(re.search(r'train.py", line 2, in <module>', text) for text in files)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["far/main.py"], ["./far/main.py"], ["folder", "a"], ["./folder"], ["sourceless"],
        ["all.zip"], ["-m", "package.main"], ["-m", "package"], ["-m", "old.main"],
    ],
)  # fmt: skip
@pytest.mark.skipif(sys.version_info < (3, 9), reason="Python 3.8 leaves paths as they are typed")
def test_the_main_module_is_as_python_makes_it(tmp_path, arguments):
    source = PROGRAMS / "main_attributes.py"
    for path in ("far/main.py", "folder/__main__.py", "package/__main__.py", "package/main.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(source.read_bytes())
    for path in ("sourceless/__main__.pyc", "old/main.pyc"):
        py_compile.compile(str(source), str(tmp_path / path))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(source, "__main__.py")
    command = [sys.executable, "-W", "ignore", *arguments]
    plain = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert mxamp_run(tmp_path, *arguments) == (0, plain.stdout.splitlines(), [])


@pytest.mark.parametrize("dtype, times", [("bfloat16", 1), ("float16", 2)])
def test_a_script_that_calls_init_hears_once_what_has_not_changed(tmp_path, dtype, times):
    write(tmp_path / "train.py", f"from mxnet.contrib import amp\namp.init({dtype!r})")
    assert mxamp_run(tmp_path, "train.py")[::2] == (0, [])
    said = log_lines(tmp_path)
    assert len([line for line in said if "mixed precision is on: " in line]) == times
    assert len([line for line in said if "hardware" in line]) <= 1
    assert not [line for line in said if "is off" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, words",
    [
        (["python", "train.py"], "'python'; mxamp run takes the script itself"), (["python3.11"], "itself: mxamp run train.py"),
        ([""], "no file ''"), (["n" * 300], "no file 'nnn"), (["none.py"], "no file 'none.py'"),
        (["empty"], "can't find '__main__' module in"), (["empty.zip"], "can't find '__main__' module in"),
        (["-m", "none"], "No module named none"), (["-m", "empty"], "No module named empty.__main__"),
        (["-m", "empty.none"], "No module named empty.none"), (["-m", ".x"], "Relative module names"),
        (["-m", "math"], "No code object available for math"), (["-m", "_json"], "No code object available"),
        (["--dtyp", "float16", "train.py"], "--dtyp"), ([], "Missing argument 'SCRIPT'"),
    ],
)  # fmt: skip
def test_what_is_no_script_is_one_sentence(tmp_path, arguments, words):
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(tmp_path / "empty.zip", "w") as archive:
        archive.writestr("other.py", "")
    status, lines, errors = mxamp_run(tmp_path, *arguments)
    assert (status, lines) == (2, [])
    assert len(errors) == 1
    assert words in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["text.md"], ["binary"], ["-"], ["-m", "package"]], ids=lambda one: one[-1]
)
def test_what_is_no_python_is_shown_as_python_does(tmp_path, arguments):
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\xff\xfe")
    write(tmp_path / "text.md", "A text, in English.", start="")
    write(tmp_path / "package" / "__main__.py", "A text.", start="")
    status, lines, errors = mxamp_run(tmp_path, *arguments, stdin="A text.")
    assert (status, lines) == (1, [])
    assert re.match(r"(SyntaxError|ValueError): ", errors[-1])
    assert not any("mxamp" in line for line in errors)


@pytest.mark.slow
def test_policy_files(tmp_path):
    text = "import os; print(amp.current_policy().target_dtype, [n for n in os.environ if 'MIXED' in n])"
    write(tmp_path / "train.py", text)
    options = ["--policy", str(ROOT / "lists" / "float16.toml")]
    assert mxamp_run(tmp_path, "train.py", options=options) == (0, ["float16 []"], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--policy", "none.toml"], ["--policy", ""], ["--dtype", "float16", "--policy", ""], ["--dtype", "int8"],
        ["--dtype", "float16", "--policy", "x"],
    ],
)  # fmt: skip
def test_wrong_options_are_one_sentence(tmp_path, options):
    write(tmp_path / "train.py", "")
    status, lines, errors = mxamp_run(tmp_path, "train.py", options=options)
    assert (status, lines, len(errors)) == (2, [], 1)


def test_a_module_that_the_program_lacks_is_its_own_error(tmp_path):
    write(tmp_path / "package" / "__init__.py", "import none_of_that", start="")
    _, _, errors = mxamp_run(tmp_path, "-m", "package.train")
    assert errors[-1] == "ModuleNotFoundError: No module named 'none_of_that'"


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
    import os, sys
    import mxnet as mx
    print(sys.modules["mxamp"].is_enabled(), os.environ["MXNET_ENABLE_AUTO_MIXED_PRECISION"])
    mx.nd.dot(mx.nd.ones((2, 2)), mx.nd.ones((2, 2))).wait_to_read()
    """
    write(tmp_path / "train.py", text, start="")
    status, lines, errors = mxamp_run(tmp_path, "train.py", options=("--dtype", "auto", "--stats"))
    assert (status, lines) == (0, ["False auto"])
    assert any(re.fullmatch(r"dot +float32 +1", line) for line in errors), errors
    (said,) = log_lines(tmp_path)
    assert "'auto' is float32 here" in said


@pytest.mark.slow
def test_a_run_starts_fast(tmp_path):
    program = PROGRAMS / "loaded_modules.py"
    command = [sys.executable, "-W", "ignore", "-m", "mxamp", "run", "--dtype", "bfloat16", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, check=True, env=environment
    )
    first, *loaded = done.stdout.split()
    assert first == "True,True", "the collector is on, and never scans MXNet's modules"
    assert "mxamp.frontends.automatic" in loaded
    assert "rich" not in loaded
    assert not [name for name in loaded if name.startswith(("mxamp.tools", "mxamp.convert"))]
    assert len(loaded) <= 90
