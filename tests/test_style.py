"""ruff and mypy are clean, and the modules import in one direction."""

import ast
import subprocess
import sys

import pytest

import mxamp as amp
from helpers import ROOT

PACKAGE = ROOT / "mxamp"
#: The core: what runs in a program that trains or serves. Each may import those before it.
CORE = [
    "errors", "_version", "framework", "policy", "graph", "scaling", "patches", "convert", "frontends",
]  # fmt: skip
#: Above it, loaded when they are first used: tools, which look at programs from outside, and commands.
ORDER = [*CORE, "tools", "debugging", "cli", "__main__", "__init__"]
MODULES = sorted(
    path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if "startup" not in path.parts
)


def tool(name, *arguments):
    pytest.importorskip(name)
    return subprocess.run(
        [sys.executable, "-m", name, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.parametrize("arguments", [("check", "."), ("format", "--check", ".")])
def test_ruff(arguments):
    done = tool("ruff", *arguments)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="types are the same everywhere")
def test_mypy():
    done = tool("mypy")
    assert done.returncode == 0, done.stdout


def place(parts):
    """Where a module stands: its package, or itself where it is on top."""
    return ORDER.index(parts[0])


def imports(path):
    """The modules of mxamp that one imports, as tuples of names, at the top or inside functions."""
    package = path.parent.parts
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "mxamp" for alias in node.names), path
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            for alias in node.names:
                target = (*base, *(node.module.split(".") if node.module else ()))
                inner = (*target, alias.name)
                at = PACKAGE.joinpath(*inner)
                yield inner if at.is_dir() or at.with_suffix(".py").exists() else target


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_import_points_up(path):
    """So the core imports no tool."""
    here = path.with_suffix("").parts
    for there in imports(path):
        assert place(there) <= place(here), f"{path} imports {'.'.join(there)}"


def test_no_modules_import_each_other_in_a_circle():
    edges = {path.with_suffix("").parts: set(imports(path)) for path in MODULES}
    done = set()

    def visit(module, trail):
        assert module not in trail, " -> ".join(".".join(m) for m in (*trail, module))
        if module not in done:
            for there in edges.get(module, ()):
                visit(there, (*trail, module))
            done.add(module)

    for module in edges:
        visit(module, ())


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_functions_are_short(path):
    tree = ast.parse((PACKAGE / path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            documented = isinstance(node.body[0], ast.Expr) and ast.get_docstring(node) is not None
            first = node.body[1 if documented and len(node.body) > 1 else 0]
            assert node.end_lineno - first.lineno < 60, node.name


@pytest.mark.parametrize("package", [name for name in ORDER if (PACKAGE / name).is_dir()])
def test_a_package_itself_holds_a_docstring_alone(package):
    tree = ast.parse((PACKAGE / package / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


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


#: The files of the repository's root.
IN_ROOT = {
    ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE",
    "MANIFEST.in", "Makefile", "README.md", "SECURITY.md", "mkdocs.yml", "noxfile.py",
    "pyproject.toml", "setup.cfg", "setup.py",
}  # fmt: skip


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_the_root_holds_no_file_that_a_run_has_left():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {path for path in listed if "/" not in path} == IN_ROOT
    written = (".params", ".states", ".npz", ".log", ".onnx")
    kept = [path for path in listed if path.endswith(written)]
    assert all("/files_of_1_0/" in path for path in kept), kept
