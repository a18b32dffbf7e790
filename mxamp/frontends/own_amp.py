"""Whether a program uses mxamp itself, so that an automatic run leaves it alone."""

import ast
import dis
from pathlib import Path
from types import CodeType
from typing import Iterator, List, Union

__all__ = ["OWN_AMP", "OWN_CALLS", "imports_mxamp", "script_imports_mxamp"]

OWN_AMP = "%s uses %s itself: automatic mixed precision leaves it alone"
OWN_CALLS = "%s calls %s of %s: from here on it runs by its own calls, by way of mxamp"


def imports_mxamp(source: Union[str, bytes, CodeType]) -> bool:
    """Tell whether Python code imports mxamp; False for what is no Python code."""
    if isinstance(source, CodeType):
        return any(name.split(".")[0] == "mxamp" for name in _imported_by(source))
    try:
        tree = ast.parse(source)
    except (ValueError, SyntaxError):
        return False
    return any(name.split(".")[0] == "mxamp" for node in ast.walk(tree) for name in _imported(node))


def script_imports_mxamp(path: Path) -> bool:
    """Tell whether a script imports mxamp; False for one that can't be read."""
    try:
        return imports_mxamp(path.read_bytes())
    except OSError:
        return False


def _imported(node: ast.AST) -> List[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def _imported_by(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imported_by(constant)
