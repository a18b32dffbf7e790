"""The manual as a site: its links, its pages and, where MkDocs is installed, its build."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")]
PAGES += sorted(DOCS.glob("*.md"))
CONFIG = (ROOT / "mkdocs.yml").read_text()
NAV = re.findall(r": ([\w/-]+\.md)$", CONFIG.split("\nnav:")[1], re.M)


def without_code(text):
    """The text without its code blocks and quoted code: what looks like a link there is none."""
    return re.sub(r"```.*?```|`[^`\n]*`", "code", text, flags=re.S)


def anchors(path):
    """The anchors of a page's headings, as code hosts and the site make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        name, _, anchor = target.partition("#")
        if re.match(r"https?:", target):
            continue
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_and_tables_are_so_to_code_hosts_and_to_the_site(page):
    """To the site, what follows a line without an empty one between goes on with its paragraph."""
    before = ""
    for line in re.sub(r"```.*?```", "", page.read_text(), flags=re.S).splitlines():
        if before.strip() and not re.match(r"- |\d+\. | ", before):
            assert not re.match(r"- |\d+\. ", line), line
            assert not line.startswith("|") or before.startswith("|"), line
        assert not re.match(
            r" {1,3}(-|\d+\.) ", line
        ), f"a list in a list needs four spaces: {line}"
        before = line


def test_the_site_shows_every_page_once():
    pages = [path.name for path in DOCS.glob("*.md")]
    pages += [f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")]
    pages += [f"lists/{path.stem}.md" for path in (ROOT / "lists").glob("*.toml")]
    pages += ["changelog.md", "contributing.md"]
    assert sorted(NAV) == sorted(pages), "put it into `nav` of mkdocs.yml"


def test_pictures_have_words_for_those_who_do_not_see_them():
    for page in PAGES:
        for words in re.findall(r"!\[([^]]*)\]", without_code(page.read_text())):
            assert len(words) > 20, (page, words)


def test_docstrings_become_markdown(monkeypatch):
    pytest.importorskip("griffe", reason="of the extra docs, which the set-up installs")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from site_docstrings import as_markdown

    text = "\n".join(
        ["Do 2**-1 it.", "", ">>> 2**a", "1", "", "::", "", "    b()", "", "    c()", "", "Parameters",
         "----------", "a : int", "    One.", "", "    Two.", "", "Costs", "much.", "", "Raises", "------",
         "Error", "    Always."]
    )  # fmt: skip
    assert as_markdown(text).splitlines() == [
        "Do 2\\*\\*-1 it.", "", "```pycon", ">>> 2**a", "1", "```", "", "```python", "b()", "", "c()", "```", "", "Costs",
        "much.", "", "Parameters", "----------", "a : int", "    One.", "", "    Two.", "", "Raises", "------",
        "Error", "    Always.",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="of the extra docs, which the set-up installs")
    pytest.importorskip("mkdocstrings", reason="of the extra docs, too")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for path in Path(tmp_path).rglob("*.html"):
        text = path.read_text()
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', text)
        loaded += re.findall(
            r'<link[^>]* rel="(?:stylesheet|preconnect)"[^>]* href="([^"]+)"', text
        )
        assert loaded and not [url for url in loaded if re.match(r"(https?:)?//", url)], path
    text = (tmp_path / "api.html").read_text()
    assert 'id="mxamp.tune"' in text and "<blockquote>" not in text  # an example as text
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    # The search ranks matches in titles before all others.
    found = [page["location"] for page in index if re.search(r"(?i)multi.gpu", page["title"])]
    assert [location.partition("#")[0] for location in found] == ["scale-out.html"]
