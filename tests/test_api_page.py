"""docs/api.md: what scripts/api_page writes, and every public name in it."""

import re
import runpy

import mxamp as amp
from helpers import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "api_page"))
PAGE = (ROOT / "docs" / "api.md").read_text()


def test_it_agrees_with_the_help():
    assert SCRIPT["page"]() == PAGE, "write it anew: scripts/api_page"


def test_it_has_every_public_name_once():
    names = [name for _, _, listed in SCRIPT["SECTIONS"] for name in listed.split()]
    assert sorted(name for name in names if "." not in name) == sorted(
        {*amp.__all__} - {"__version__"}
    )
    assert {f"debugging.{name}" for name in amp.debugging.__all__} < set(names)
    assert len(names) == len(set(names))
    assert all(name.split(".")[0] in amp.__all__ for name in names)


def test_every_name_has_one_line():
    rows = re.findall(r"^\| `(.+)` \| (.+) \|$", PAGE, re.M)
    assert all(len(summary) < 110 for _, summary in rows)
