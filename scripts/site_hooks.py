"""Pages of the site from outside docs/: examples, operator lists, project pages.

On a code host the pages in docs/ are read as they are, and their links lead to files. MkDocs calls
these functions, which make pages of such files and let the links lead there.
"""

import ast
import re
from pathlib import Path
from typing import Iterator, Match, Tuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: Pages of the project that are not in docs/.
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
#: Without the column for a page's contents.
WIDE = "---\nhide: [toc]\n---\n"
LANGUAGES = {".py": "python", ".toml": "toml"}
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.S)
CODE = re.compile(r"<code>.*?</code>", re.S)
#: Where a name may be broken on a narrow screen, which site.css decides.
BREAK = re.compile(r"(?<=\w[._(=])(?=[a-zA-Z\"])(?![^<]*>)")
PICTURE = re.compile(r"!\[[^]]*\]\(([^)]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages made from files outside docs/."""
    for name, text in _pages():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link files to their pages."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    markdown = LINK.sub(lambda found: f"]({_target(found[1], folder)}{found[2] or ''})", markdown)
    # A picture on a small screen: a touch shows it in full size, as on code hosts.
    return PICTURE.sub(r"[\g<0>](\1)", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let code in tables be broken after the dots and underscores of names."""

    def breakable(cell: Match[str]) -> str:
        return CODE.sub(lambda code: BREAK.sub("<wbr>", code[0]), cell[0])

    return CELL.sub(breakable, html)


def _pages() -> Iterator[Tuple[str, str]]:
    """Yield the path and the Markdown of each page that is made from a file outside docs/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        yield page, LINK.sub(lambda found: f"]({_from_docs(found[1])}{found[2] or ''})", text)
    for path in (*(ROOT / "examples").rglob("*.py"), *(ROOT / "lists").glob("*.toml")):
        yield _page_path(path), _page_text(path)


def _from_docs(target: str) -> str:
    """Return a link of a page in the project's folder as one of a page in docs/."""
    return target[len("docs/") :] if target.startswith("docs/") else f"../{target}"


def _page_path(path: Path) -> str:
    """Return the path of the page of an example or a list, such as examples/train.md."""
    return path.relative_to(ROOT).with_suffix(".md").as_posix()


def _page_text(path: Path) -> str:
    """Return the Markdown of a page that shows a file."""
    text = path.read_text(encoding="utf-8").rstrip()
    summary = ""
    if path.suffix == ".py":
        summary = f"{(ast.get_docstring(ast.parse(text)) or '').splitlines()[0]}\n\n"
    title = path.relative_to(ROOT).as_posix()
    fence = f'```{LANGUAGES[path.suffix]} title="{title}"'
    return f"{WIDE}# {path.name}\n\n{summary}{fence}\n{text}\n```\n"


def _target(target: str, folder: Path) -> str:
    """Return the target of a link in the site: the page of a file outside docs/, if it has one."""
    if not target.startswith("../"):
        return target
    path = (folder / target).resolve()
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    return _page_path(path) if path.suffix in LANGUAGES else target
