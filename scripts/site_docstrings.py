"""Docstrings for the site: examples as code, remarks before parameters, all parameters.

Griffe, which reads the docstrings for MkDocs, calls this. `help` shows them as they are written.
"""

import re
from typing import Any, Dict, Iterator, List, Optional

from griffe import Alias, DocstringSectionKind, Extension, GriffeLoader, Module, Object

UNDERLINE = re.compile(r"-{3,}$")
#: A power, which Markdown would take for the start of bold text.
POWER = re.compile(r"(?<=\w)\*\*(?=[-\w(])")
OTHERS = re.compile(r"The other parameters are those of `(\w+)`\.\s*")


class Docstrings(Extension):
    """Rewrites docstrings for Markdown, and names of constants as their values."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package_loaded(self, *, pkg: Module, loader: GriffeLoader, **kwargs: Any) -> None:
        """Show the values of constants in defaults, and parameters described elsewhere."""
        for function in _functions(pkg):
            for parameter in function.parameters:
                value = _constant_value(function, str(parameter.default or ""))
                if value is not None:
                    parameter.default = value
        for function in _functions(pkg):
            if function.docstring is not None:
                _described(function, pkg)


def as_markdown(text: str) -> str:
    """Return a docstring with its examples fenced, and remarks before its sections."""
    lines = _fenced(text.splitlines())
    starts = [i for i, line in enumerate(lines[1:]) if UNDERLINE.match(line)]
    if not starts:
        return "\n".join(lines)
    head, sections = lines[: starts[0]], _paragraphs(lines[starts[0] :])
    # An entry of a section goes on with indented lines, or has a colon; a remark does neither.
    remarks = [paragraph for paragraph in sections if _is_remark(paragraph)]
    kept = [paragraph for paragraph in sections if not _is_remark(paragraph)]
    parts = [_stripped(head), *remarks, *kept]
    return "\n\n".join("\n".join(part) for part in parts)


def _fenced(lines: List[str]) -> List[str]:
    """Return lines with `>>>` examples and blocks indented below a `::` in code fences."""
    done: List[str] = []
    fence = ""
    for line in lines:
        if fence == "python" and line and not line.startswith("    "):
            done = [*_stripped(done), "```", ""]
            fence = ""
        elif fence == "pycon" and not line:
            done.append("```")
            fence = ""
        if not fence and line.startswith(">>> "):
            done.append("```pycon")
            fence = "pycon"
        if not fence and line.endswith("::"):
            done += [line[:-1], ""] if line != "::" else []
            done.append("```python")
            fence = "python"
            continue
        if fence == "python" and done[-1] == "```python" and not line:
            continue
        if fence:
            done.append(line[4:] if fence == "python" else line)
        else:
            parts = line.split("`")  # every other one is quoted code
            parts[::2] = [POWER.sub(r"\\*\\*", part) for part in parts[::2]]
            done.append("`".join(parts))
    return [*_stripped(done), "```"] if fence else done


def _paragraphs(lines: List[str]) -> List[List[str]]:
    """Return the groups of lines between empty lines."""
    paragraphs: List[List[str]] = [[]]
    for line in lines:
        if line:
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    return [paragraph for paragraph in paragraphs if paragraph]


def _is_remark(paragraph: List[str]) -> bool:
    """Return whether a paragraph below a section is no part of the section."""
    return not any(line.startswith(" ") or UNDERLINE.match(line) for line in paragraph)


def _stripped(lines: List[str]) -> List[str]:
    """Return lines without the empty ones at the end."""
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines


def _functions(module: Object) -> Iterator[Any]:
    """Yield all functions and methods of a module and its submodules."""
    for member in module.members.values():
        if isinstance(member, Alias):
            continue
        if member.is_function:
            yield member
        elif member.is_module or member.is_class:
            yield from _functions(member)


def _described(function: Any, package: Module) -> Dict[str, Any]:
    """Return a function's described parameters; add those that its docstring leaves to another."""
    sections = {one.kind: one for one in function.docstring.parsed}
    section = sections.get(DocstringSectionKind.parameters)
    described = {one.name: one for one in section.value} if section else {}
    others = OTHERS.search(function.docstring.value)
    if section and others:
        described = {**_described(package[others[1]].final_target, package), **described}
        section.value = [described[one.name] for one in function.parameters]
        text = sections[DocstringSectionKind.text]
        text.value = OTHERS.sub("", text.value)
    return described


def _constant_value(function: Any, default: str) -> Optional[str]:
    """Return the source of the value of a constant that is a default; None for other defaults."""
    if not re.fullmatch(r"[A-Z][A-Z_]+", default):
        return None
    try:
        found = function.module[default]
        found = found.final_target if isinstance(found, Alias) else found
    except KeyError:
        return None
    # A sentinel that equals a value is shown as that value.
    return re.sub(r"^_\w+\((.*)\)$", r"\1", str(getattr(found, "value", default)))
