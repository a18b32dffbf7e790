"""The manual as a site: its links, its pages and, where MkDocs is installed, its build."""

import json
import re

import pytest

from helpers import ROOT, python

PAGES = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def without_code(text):
    """The text without its code blocks and quoted code: what looks like a link there is none."""
    return re.sub(r"```.*?```|`[^`\n]*`", "code", text, flags=re.S)


def anchors(path):
    """The anchors of a page's headings, as code hosts and the site make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", without_code(page.read_text())):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocstrings", reason="of the extra docs, which the set-up installs")
    # --quiet would hide warnings from --strict too.
    done = python("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    search = (tmp_path / "search" / "search_index.js").read_text().split("=", 1)[1]
    words = re.split(json.loads(search)["config"]["separator"], "amp.init scale_loss(x) 1.9.1")
    assert words == ["amp", "init", "scale", "loss", "x", "1.9.1"]
    for path in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', path.read_text())
        assert loaded and not [url for url in loaded if re.match(r"(https?:)?//", url)], path
