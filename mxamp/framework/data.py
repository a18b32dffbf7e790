"""Reader of mxamp's TOML files in lists/; parses TOML in every supported version of Python."""

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Mapping

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str) -> Dict[str, Any]:
    """Return the tables of a TOML text; raise `ValueError` if the syntax is wrong."""
    return dict(tomllib.loads(text))


@lru_cache(maxsize=None)
def own_tables(name: str) -> Mapping[str, Any]:
    """Return the tables of lists/<name>.toml, from the installed package or a source checkout."""
    package = Path(__file__).resolve().parent.parent
    folder = next(path for path in (package / "lists", package.parent / "lists") if path.is_dir())
    return parse_toml((folder / f"{name}.toml").read_text(encoding="utf-8"))
