"""Writing the TOML file of a policy, and which lists it belongs to."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any, Mapping

from .._version import __version__
from .lists import own_data

HEAD = """\
# A policy: changes to mxamp's own operator list, written by Policy.save for Policy.load.
# docs/policy-files.md describes all tables and keys.
"""

_WIDTH = 100
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def list_number(dtype: str) -> str:
    """Return a checksum of mxamp's own operator list, by which a file knows that it has changed."""
    return f"{zlib.crc32(own_data(dtype).encode()):08x}"


def origin(dtype: str) -> Mapping[str, str]:
    """Return the keys of a file that say with which lists it was written."""
    return {"mxamp": __version__, "lists": list_number(dtype)}


def toml_text(data: Mapping[str, Any]) -> str:
    """Return the TOML text of a policy's tables."""
    lines = [HEAD]
    # The keys above the first table, single tables, tables that can be repeated.
    lines += [_key_line(key, value) for key, value in data.items() if not _is_table(value)]
    for name, value in data.items():
        for table in value if _is_table(value) and isinstance(value, list) else ():
            lines += ["", f"[[{name}]]", *(_key_line(*pair) for pair in table.items())]
        if isinstance(value, dict):
            lines += ["", f"[{name}]", *(_key_line(*pair) for pair in value.items())]
    return "\n".join([*lines, ""])


def _is_table(value: Any) -> bool:
    """Return whether a value is written as a table or as several."""
    return isinstance(value[0] if isinstance(value, list) and value else value, dict)


def _key_line(key: str, value: Any) -> str:
    """Return the TOML line `key = value`; each item of a long list has its line."""
    key = key if _BARE.fullmatch(key) else _toml_value(key)
    line = f"{key} = {_toml_value(value)}"
    if len(line) <= _WIDTH or not isinstance(value, (list, tuple)):
        return line
    return "\n".join([f"{key} = [", *(f"    {_toml_value(item)}," for item in value), "]"])


def _toml_value(value: Any) -> str:
    """Return a string, boolean, number or list as TOML on one line."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml_value, value))}]"
    # TOML has JSON's escapes, but also requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
