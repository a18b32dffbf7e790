"""`mxamp run` runs a program as `python` does: arguments, paths, errors, exit codes, processes."""

import os
import py_compile
import re
import subprocess
import sys
import textwrap
import zipfile
from importlib.util import MAGIC_NUMBER

import pytest

from helpers import ROOT, needs_float16, run_forked
from mxamp.cli import script

IN_MIXED_PRECISION = "import sys; amp = sys.modules['mxamp']; assert amp.is_enabled()\n"


def mxamp_run(folder, *arguments, stdin="", options=("--dtype", "bfloat16")):
    """Run the command in a process of its own, in a folder."""
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


def write(path, text, start=IN_MIXED_PRECISION):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(start + textwrap.dedent(text))
    return path


@pytest.mark.parametrize(
    "arguments",
    [["--epochs", "3", "-x"], ["--dtype", "int8", "--policy"], ["--help"], ["-m", "a"], ["--", "a", "--"], []],
)  # fmt: skip
def test_arguments_are_the_scripts(tmp_path, arguments):
    write(tmp_path / "train.py", "print(sys.argv)")
    assert mxamp_run(tmp_path, "train.py", *arguments) == (0, [str(["train.py", *arguments])], [])


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
    if __name__ == "__main__":
        print("end")
    """
    write(tmp_path / "far" / "train.py", text)
    status, lines, errors = mxamp_run(tmp_path, "far/train.py")
    assert errors == []
    assert lines[:3] == ["far/train.py True", "bfloat16", "end"]
    # A process of multiprocessing ends without the functions at exit.
    assert lines[3:4] == ["__main__ __main__"]
    assert status == 0


def test_modules_packages_folders_and_standard_input(tmp_path):
    show = "import os\nprint(__name__, __spec__ and __spec__.name, sys.argv[1:], os.path.basename(sys.argv[0]), sys.path[0] == os.getcwd())"
    write(tmp_path / "package" / "__init__.py", "", start="")
    write(tmp_path / "package" / "train.py", show)
    write(tmp_path / "package" / "__main__.py", f"from . import __name__ as n\n{show}")
    run = ["-m", "package.train", "--epochs"]
    assert mxamp_run(tmp_path, *run)[1:] == (
        ["__main__ package.train ['--epochs'] train.py True"],
        [],
    )
    assert mxamp_run(tmp_path, "-m", "package")[1:] == (
        ["__main__ package.__main__ [] __main__.py True"],
        [],
    )
    write(tmp_path / "folder" / "__main__.py", show)
    assert mxamp_run(tmp_path, "folder", "a")[1:] == (["__main__ __main__ ['a'] folder False"], [])
    text = IN_MIXED_PRECISION + "print(sys.argv, __name__, __file__, repr(sys.path[0]))"
    assert mxamp_run(tmp_path, "-", "a", stdin=text)[1:] == (["['-', 'a'] __main__ <stdin> ''"], [])


@pytest.mark.parametrize(
    "line, status, last",
    [
        ("sys.exit(7)", 7, None), ("sys.exit('no data')", 1, "no data"), ("sys.exit()", 0, None),
        ("raise OSError('mine')", 1, "OSError: mine"), ("open('none')", 1, "FileNotFoundError: [Errno 2] No such file or directory: 'none'"),
        ("raise amp.ArgumentError('x')", 1, "mxamp.errors.ArgumentError: x"),
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
    path = "train.py" if sys.version_info < (3, 9) else f"{tmp_path}/train.py"
    assert files == ([f'  File "{path}", line 2, in <module>'] if len(errors) > 1 else [])


#: What the main module says of itself; `python` itself is the oracle.
ATTRIBUTES = """
import sys
loader, spec = __loader__, __spec__
if spec:
    print(spec.name, spec.origin, spec.parent, spec.has_location, spec.loader is loader)
print(loader if isinstance(loader, type) else type(loader).__name__, getattr(loader, "path", None))
print({n: v for n, v in globals().items() if n not in ("__spec__", "__loader__", "sys", "loader", "spec")})
print(sys.argv, sys.path[0], (lambda: 0).__code__.co_filename, sys.modules["__main__"].__dict__ is globals())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["far/train.py"], ["./far/train.py"], ["far/train.pyc"], ["far/compiled"], ["folder", "a"], ["./folder"],
        ["sourceless"], ["all.zip"], ["-"], ["-m", "package.train"], ["-m", "package"], ["-m", "old.train"],
    ],
)  # fmt: skip
def test_the_main_module_is_as_python_makes_it(tmp_path, arguments):
    for path in ("far/train.py", "folder/__main__.py", "package/__main__.py", "package/train.py"):
        # Characters of another encoding: the code is read as its first line says.
        (tmp_path / path).parent.mkdir(exist_ok=True)
        text = f"# -*- coding: latin-1 -*-\n{ATTRIBUTES}\nprint(ascii('\xe9'))"
        (tmp_path / path).write_bytes(text.encode("latin-1"))
    script_file = str(tmp_path / "far" / "train.py")
    for path in ("far/train.pyc", "far/compiled", "sourceless/__main__.pyc", "old/train.pyc"):
        py_compile.compile(script_file, str(tmp_path / path))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "folder" / "__main__.py", "__main__.py")
    python = [sys.executable, "-W", "ignore", *arguments]
    plain = subprocess.run(
        python, capture_output=True, text=True, input=ATTRIBUTES, cwd=tmp_path, check=False
    )
    assert mxamp_run(tmp_path, *arguments, stdin=ATTRIBUTES) == (0, plain.stdout.splitlines(), [])


def test_compiled_code_that_imports_mxamp_is_left_alone(tmp_path):
    source = write(
        tmp_path / "train.py",
        "def f():\n    import mxamp.errors\nprint(sys.modules['mxamp'].is_enabled())",
        start="import sys\n",
    )
    py_compile.compile(str(source), str(tmp_path / "train.pyc"))
    assert mxamp_run(tmp_path, "train.pyc") == (0, ["False"], [])


def log_lines(folder):
    return [
        line for line in (folder / "stderr").read_text().splitlines() if line.startswith("mxamp: ")
    ]


@pytest.mark.parametrize(
    "dtype, times", [("bfloat16", 1), pytest.param("float16", 2, marks=needs_float16)]
)
def test_a_script_that_calls_init_hears_once_what_has_not_changed(tmp_path, dtype, times):
    text = f"from mxnet.contrib import amp\namp.init({dtype!r})"
    write(tmp_path / "train.py", text)
    assert mxamp_run(tmp_path, "train.py")[::2] == (0, [])
    said = log_lines(tmp_path)
    assert len([line for line in said if "mixed precision is on: " in line]) == times
    assert len([line for line in said if "hardware" in line]) <= 1
    assert not [line for line in said if "is off" in line]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([""], "the name of the script is empty"), (["n" * 300], f"there is no file {'n' * 300!r}"),
        (["none.py"], "there is no file 'none.py'"), (["empty"], "'empty' is a folder without a __main__.py"),
        (["binary"], "'binary' is no Python"), (["text.md"], "'text.md' (line 1) is no Python: "),
        (["-"], "standard input (line 1) is no Python"), (["-m", "none"], "there is no Python module 'none'"),
        (["-m", "empty"], "'empty' is a package without a __main__ module"), (["-m", "empty.none"], "no Python module 'empty.none'"),
        (["-m", "math"], "no Python module 'math'"), (["-m", ".x"], "no Python module '.x'"),
        (["-m", "_json"], "no Python module '_json'"), (["bad.pyc"], "'bad.pyc' holds no code that this Python ("),
        (["short.pyc"], "'short.pyc' holds no code"), (["empty.zip"], "'empty.zip' is a zip file without a __main__.py"),
        (["bytes"], "'bytes' (line 1) is no Python"), (["-m", "bytes"], "no Python: "),
        (["--dtyp", "float16", "train.py"], "those of the script stand behind it: mxamp run SCRIPT --dtyp"), ([], "Missing argument 'SCRIPT'"),
    ],
)  # fmt: skip
def test_what_is_no_script_is_one_sentence(tmp_path, arguments, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\xff\xfe")
    (tmp_path / "text.md").write_text("A text, in English.")
    (tmp_path / "bad.pyc").write_bytes(b"\x00" * 32)
    (tmp_path / "short.pyc").write_bytes(MAGIC_NUMBER)
    write(tmp_path / "bytes" / "__main__.py", "").write_bytes(b"\xff\xfe")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w") as archive:
        archive.writestr("other.py", "")
    status, lines, errors = mxamp_run(tmp_path, *arguments, stdin="A text.")
    assert (status, lines) == (2, [])
    assert len(errors) == 1
    assert words in errors[0]


@needs_float16
def test_policy_files(tmp_path):
    write(
        tmp_path / "train.py",
        "import os; print(amp.current_policy().target_dtype, [n for n in os.environ if 'MIXED' in n])",
    )
    options = ["--policy", str(ROOT / "lists" / "float16.toml")]
    assert mxamp_run(tmp_path, "train.py", options=options) == (0, ["float16 []"], [])
    for wrong in (
        ["--policy", "none.toml"],
        ["--policy", ""],
        ["--dtype", "float16", "--policy", ""],
        ["--dtype", "int8"],
        ["--dtype", "float16", "--policy", "x"],
    ):
        status, lines, errors = mxamp_run(tmp_path, "train.py", options=wrong)
        assert (status, lines, len(errors)) == (2, [], 1)


def test_a_file_that_can_not_be_read_is_one_sentence(tmp_path, monkeypatch):
    path = write(tmp_path / "train.py", "")

    def refuse(_self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    with pytest.raises(script.AmpError, match="train.py' can't be read: Permission denied$"):
        script.find_script(str(path))


def test_what_a_module_lacks_is_its_own_error(tmp_path):
    write(tmp_path / "package" / "__init__.py", "import none_of_that", start="")
    _, _, errors = mxamp_run(tmp_path, "-m", "package.train")
    assert errors[-1] == "ModuleNotFoundError: No module named 'none_of_that'"


TRAIN = """
import multiprocessing, sys
import mxnet as mx
from mxnet import autograd, gluon

def product(_):
    return float(mx.nd.dot(mx.nd.ones((1, 1)) * 1.001, mx.nd.ones((1, 1))).asscalar()) > 1.0001

def train(results):
    net = gluon.nn.Dense(1)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with autograd.record():
        loss = net(mx.nd.ones((1, 2)))
    loss.backward()
    trainer.step(1)
    results.put((sys.modules["mxamp"].current_policy().target_dtype, trainer.amp_steps))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    results = context.Queue()
    process = context.Process(target=train, args=(results,))
    process.start()
    print(*results.get(timeout=60))
    process.join()
    with context.Pool(1) as pool:
        print(process.exitcode, "exact", pool.map(product, [0]))
"""


def test_forked_processes_that_train_do_so_in_mixed_precision(tmp_path):
    write(tmp_path / "train.py", TRAIN, start="")
    done = mxamp_run(tmp_path, "train.py", "fork")
    assert done == (0, ["bfloat16 1", "0 exact [True]"], [])
    assert len([line for line in log_lines(tmp_path) if "mixed precision is on: " in line]) == 1


def test_statistics_are_printed_whatever_the_end(tmp_path):
    write(
        tmp_path / "counted.py",
        "import mxnet as mx\nmx.nd.relu(mx.nd.relu(mx.nd.ones(1)))\nraise SystemExit(3)",
    )
    options = ("--dtype", "bfloat16", "--stats")
    status, _, lines = mxamp_run(tmp_path, "counted.py", options=options)
    assert status == 3
    assert any(re.fullmatch(r"relu +float32 +2", line) for line in lines), lines


def test_auto_runs_the_script_in_float32_where_that_is_fast(tmp_path, monkeypatch):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    script = """
    import os, sys
    import mxnet as mx
    print(sys.modules["mxamp"].is_enabled(), os.environ["MXNET_ENABLE_AUTO_MIXED_PRECISION"])
    x = mx.nd.dot(mx.nd.ones((2, 2)), mx.nd.ones((2, 2)))
    x.wait_to_read()
    """
    write(tmp_path / "train.py", script, start="")
    status, lines, errors = mxamp_run(tmp_path, "train.py", options=("--dtype", "auto", "--stats"))
    assert (status, lines) == (0, ["False auto"])
    assert any(re.fullmatch(r"dot +float32 +1", line) for line in errors), errors
    (said,) = log_lines(tmp_path)
    assert "'auto' is float32 here" in said
    assert said.endswith("give --dtype bfloat16")


@pytest.mark.slow
def test_spawned_processes_that_train_do_so_too(tmp_path, monkeypatch):
    places = [str(ROOT), str(ROOT / "mxamp" / "startup")]
    # An installed mxamp has a start-up hook; here sitecustomize is one.
    (tmp_path / "sitecustomize.py").write_text("import mxamp_startup; mxamp_startup.install()")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *places]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    write(tmp_path / "train.py", TRAIN, start="")
    status, lines, errors = mxamp_run(tmp_path, "train.py", "spawn")
    assert (status, lines, errors) == (0, ["bfloat16 1", "0 exact [True]"], [])
    assert len([line for line in log_lines(tmp_path) if "mixed precision is on: " in line]) == 1
