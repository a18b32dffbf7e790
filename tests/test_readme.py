"""The README's Python blocks run, one after another, as a reader would paste them."""

import re
import runpy
import sys
import types

import pytest

from helpers import ROOT

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = BLOCKS[number]
    path = tmp_path / f"block{number}.py"
    path.write_text(code)
    runpy.run_path(str(path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks
    names = {}
    for number, code in enumerate(blocks):
        path = tmp_path / f"block{number}.py"
        path.write_text(code)
        # A later block may use the names of earlier ones.
        given = {name: value for name, value in names.items() if not name.startswith("__")}
        names = runpy.run_path(str(path), init_globals=given)


def test_it_is_short_and_has_blocks_and_both_commands():
    assert len(TEXT.splitlines()) <= 120
    assert len(BLOCKS) >= 3
    assert "scripts/quickstart" in TEXT
    assert "scripts/test" in TEXT


def test_the_first_use_is_short():
    assert len(BLOCKS[0].strip().splitlines()) <= 20


def test_modules_are_modules():
    assert isinstance(sys.modules["mxamp"], types.ModuleType)
