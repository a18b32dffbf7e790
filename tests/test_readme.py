"""The Python blocks of README and of each page run in order, as a reader would paste them."""

import re
import runpy

import mxamp as amp

# isort: split
import numpy as np
import pytest

from helpers import ROOT, with_avx512

TEXT = (ROOT / "README.md").read_text()
DIFF = re.search(r"```diff\n(.*?)```", TEXT, re.S)[1].splitlines()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def marks(text):
    """Without bfloat16 kernels, a fused conversion to bfloat16 is an error."""
    fused = any("fuse=True" in code for code in re.findall(r"```python\n(.*?)```", text, re.S))
    return [with_avx512] if fused else []


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=marks(page.read_text()), id=page.name) for page in PAGES]
)
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


@pytest.mark.slow
@pytest.mark.parametrize("side", "-+")
def test_both_sides_of_the_diff_run(side, tmp_path):
    path = tmp_path / "train.py"
    path.write_text("\n".join(line[2:] for line in DIFF if line[:1] in (side, " ", "")))
    try:
        names = runpy.run_path(str(path))
    finally:
        amp.shutdown()
    assert ("amp" in names) == (side == "+")
    assert np.isfinite(names["loss"].asnumpy()).all()
