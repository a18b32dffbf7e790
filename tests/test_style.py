"""ruff and mypy are clean, and the modules import in one direction."""

import ast
import sys

import pytest

import mxamp as amp
from helpers import ROOT, python

PACKAGE = ROOT / "mxamp"
#: The core: what runs in a program that trains or serves. Each may import those before it.
#: "backends" is the registry alone, which loads the packages in it when it is asked for one.
CORE = [
    "errors", "_version", "backends", "framework", "policy", "graph", "a backend", "scaling",
    "patches", "convert", "frontends",
]  # fmt: skip
#: Above it, loaded when they are first used: tools, which look at programs from outside, and commands.
ORDER = [*CORE, "tools", "debugging", "cli", "__main__", "__init__"]
MODULES = sorted(
    path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if "startup" not in path.parts
)


@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy"])
def test_tools_find_nothing(command):
    name, *arguments = command.split()
    pytest.importorskip(name)
    if name == "mypy" and sys.version_info[:2] != (3, 11):
        pytest.skip("types are the same everywhere")
    done = python("-m", name, *arguments)
    assert done.returncode == 0, done.stdout


def test_few_signatures_say_any():
    pytest.importorskip("ruff")
    options = "--select", "ANN401", "--output-format", "concise"
    done = python("-m", "ruff", "check", *options, "mxamp")
    assert 0 < done.stdout.count("ANN401") < 120, done.stdout


def imports(path):
    """The modules of mxamp that one imports, as tuples of names, at the top or inside functions."""
    package, tree = path.parent.parts, ast.parse((PACKAGE / path).read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in {*ast.walk(tree)} - for_types:
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "mxamp" for alias in node.names), path
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            for alias in node.names:
                target = (*base, *(node.module.split(".") if node.module else ()))
                inner = (*target, alias.name)
                at = PACKAGE.joinpath(*inner)
                yield inner if at.is_dir() or at.with_suffix(".py").exists() else target


def place(module):
    """The place of a module in the order of imports."""
    is_backend = module[0] == "backends" and module[1:] not in ((), ("__init__",))
    return ORDER.index("a backend" if is_backend else module[0])


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_import_points_up(path):
    """So the core imports no tool, and policy and graph no backend."""
    here = path.with_suffix("").parts
    for there in imports(path):
        assert place(there) <= place(here), f"{path} imports {'.'.join(there)}"


#: Modules without a test of their name, and where their tests are.
TESTED_ELSEWHERE = {
    "__main__": "cli/test_main", "_version": "test_packaging", "errors": "framework/test_keywords",
    "debugging": "test_style",
    "backends/onednn/inputs": "backends/test_passes", "cli/doctor": "tools/test_doctor",
    "cli/inputs": "cli/test_convert", "cli/onnx": "tools/test_onnx", "cli/options": "cli/test_main",
    "cli/output": "cli/test_main", "convert/options": "convert/test_models",
    "framework/data": "framework/test_traits", "framework/environment": "frontends/test_automatic",
    "framework/interrupts": "scaling/test_interrupts", "graph/casts/builder": "graph/casts/test_insert",
    "graph/casts/offline": "convert/test_known_by_name", "graph/edit": "backends/test_passes",
    "graph/inspect": "tools/debugging/test_explain", "patches/table": "framework/test_patching",
    "policy/rules": "policy/test_decision", "tools/onnx_operators": "tools/test_onnx",
    "tools/debugging/findings": "tools/debugging/test_numerics",
    "tools/debugging/measured": "tools/debugging/test_tensor_errors",
    "tools/debugging/observing": "tools/debugging/test_operator_counts",
}  # fmt: skip


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_has_a_test_of_its_name(path):
    if path.parts[0] == "scaling":
        pytest.skip("its tests stand by what users see: steps, devices, threads, files")
    module, tests = path.with_suffix("").as_posix(), ROOT / "tests"
    own = tests / path.parent / f"test_{path.name}"
    if module in TESTED_ELSEWHERE:
        assert not own.exists(), "take it out of TESTED_ELSEWHERE"
        own = tests / f"{TESTED_ELSEWHERE[module]}.py"
    assert own.exists() or path.name == "__init__.py"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_the_core_imports_no_backend(path):
    """It asks the registry."""
    here = path.with_suffix("").parts
    if here[0] in CORE and here[0] != "backends":
        assert all(ORDER[place(there)] != "a backend" for there in imports(path))
    if here[:2] == ("backends", "cuda"):
        assert all(there[:2] != ("backends", "onednn") for there in imports(path))


def complexity(function):
    """The cyclomatic complexity of a function with those inside it, as radon counts."""
    loops = (ast.For, ast.While, ast.comprehension)
    branches = (ast.If, ast.IfExp, ast.ExceptHandler, ast.Lambda, *loops)
    nodes = [*ast.walk(function)]
    operators = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    filters = sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return 1 + operators + filters + sum(isinstance(node, branches) for node in nodes)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_function_is_complex(path):
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert complexity(node) <= 18, f"{path}: {node.name}"


@pytest.mark.parametrize("room", ["policy", "graph"])
def test_policy_and_graph_name_no_device(room):
    for path in PACKAGE.joinpath(room).rglob("*.py"):
        tree = ast.parse(path.read_text())
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not words & {"cpu", "gpu", "oneDNN", "cuda"}, path


def test_the_package_shows_its_public_names_only():
    assert dir(amp) == sorted(amp.__all__)
    modules = {part for path in MODULES for part in path.with_suffix("").parts[:1]}
    assert modules & set(amp.__all__) == {"debugging"}, "a function hides a module"
    for name in amp.__all__:
        assert hasattr(amp, name), name


def test_the_debugging_tools_show_what_they_name():
    module = amp.debugging
    assert dir(module) == sorted(module.__all__)
    for name in module.__all__:
        assert hasattr(module, name) and name in module.__doc__, name
