"""ruff and mypy are clean, and the modules import in one direction."""

import ast
import subprocess
import sys

import pytest

from helpers import ROOT

# Each room may import those to its left; see docs of the modules themselves.
ROOMS = [
    "errors", "_version", "_compat", "machine", "operators", "substitutions", "rules", "policy", "casting", "patching", "doors", "seen", "graph", "choices",
    "rewrite", "heads", "eager", "offline", "symbolic", "states", "memory", "updates", "clipping", "autocast", "scaler", "containers", "finite", "hook", "trainer", "grad_scaler", "shared", "modules", "decorate", "functions", "levels", "contrib", "automatic", "stock_lists", "arguments", "fusion", "conversion", "blocks", "convert",
    "explain", "drawing", "compare", "files",
    "cli", "__init__", "__main__",
]  # fmt: skip


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


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="types are the same everywhere")
def test_mypy():
    done = tool("mypy")
    assert done.returncode == 0, done.stdout


def test_every_module_has_its_room():
    assert sorted(path.stem for path in (ROOT / "mxamp").glob("*.py")) == sorted(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room):
    path = ROOT / "mxamp" / f"{room}.py"
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module.split(".")[0]] if node.module else [a.name for a in node.names]
            for name in names:
                assert ROOMS.index(name) < ROOMS.index(room), f"{room} imports {name}"
    assert len(text.splitlines()) <= 400, "two ideas in one room"


def test_pure_rooms_import_no_mxnet():
    for room in ("errors", "scaler", "patching"):
        assert "mxnet" not in [
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse((ROOT / "mxamp" / f"{room}.py").read_text()))
            if isinstance(node, ast.Import)
            for alias in node.names
        ]
