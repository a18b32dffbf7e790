"""Symbol files that are damaged: found before MXNet reads them, which may end the process."""

import json
from typing import Any

from ..errors import ArgumentError

__all__ = ["check_symbol_json"]


def check_symbol_json(text: str) -> None:
    """Raise an `ArgumentError` of one sentence where `text` is no symbol's JSON."""
    try:
        data = json.loads(text, strict=False)  # MXNet writes control characters as they are
        _check_graph(data)
    except json.JSONDecodeError as error:
        raise ArgumentError(f"it is no JSON, or was cut off: {error}") from None
    except RecursionError:
        raise ArgumentError("it is nested too deeply") from None
    for what in ("nodes", "heads"):
        if not data[what]:
            raise ArgumentError(f"its list of {what} is empty")


def _check_graph(data: Any) -> None:
    nodes = data.get("nodes") if isinstance(data, dict) else None
    heads = data.get("heads") if isinstance(data, dict) else None
    if not isinstance(nodes, list) or not isinstance(heads, list):
        raise ArgumentError("it has no lists of nodes and heads")
    for i, node in enumerate(nodes):
        if not isinstance(node, dict) or not all(
            isinstance(node.get(key), str) for key in ("op", "name")
        ):
            raise ArgumentError(f"node {i} has no op and name")
        # Inputs come before what reads them: no cycles.
        _check_entries(node.get("inputs", []), i, f"node {i} ({node['name']!r})")
        for body in node.get("subgraphs", ()):
            _check_graph(body)
    _check_entries(heads, len(nodes), "an output")


def _check_entries(entries: Any, limit: int, what: str) -> None:
    if not isinstance(entries, list):
        raise ArgumentError(f"{what} has no list of inputs")
    for entry in entries:
        # Two numbers, or three: the node, its output, a version.
        right = isinstance(entry, list) and len(entry) >= len(("node", "output"))
        if not right or not all(type(part) is int and part >= 0 for part in entry):
            raise ArgumentError(f"{what} reads {entry!r}, which is no output of a node")
        if entry[0] >= limit:
            raise ArgumentError(f"{what} reads node {entry[0]}, which does not come before it")
