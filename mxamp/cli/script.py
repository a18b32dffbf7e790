"""A program to run as `python` would: a script, a module, a folder, or standard input."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple, NoReturn, Optional, Sequence

from ..errors import AmpError

__all__ = ["Program", "execute", "find_module", "find_script"]

#: What shells make of a program that Ctrl-C has ended.
_INTERRUPTED = 130


class Program(NamedTuple):
    """Code, and how Python would set the process up for it."""

    name: str  #: its `sys.argv[0]`
    source: bytes
    code: CodeType
    folder: Optional[str]  #: where it finds its own modules
    spec: Optional[importlib.machinery.ModuleSpec] = None


def find_script(name: str) -> Program:
    """Return the program in a file, in a folder's `__main__.py`, or, for "-", on standard input."""
    if name == "-":
        source = sys.stdin.buffer.read()
        return Program(name, source, _compiled(source, "<stdin>", "standard input"), "")
    if not name:
        raise AmpError("the name of the script is empty: give one")
    path = Path(name)
    # Not Path.is_dir and exists, which raise where a name is too long for a file.
    if os.path.isdir(path):
        path = path / "__main__.py"
        if not path.is_file():
            raise AmpError(f"{name!r} is a folder without a __main__.py: name the script in it")
    if not os.path.exists(path):
        raise AmpError(f"there is no file {name!r}")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise AmpError(f"{name!r} can't be read: {error.strerror}") from None
    code = _compiled(source, os.path.abspath(path), repr(name))
    return Program(name, source, code, str(path.resolve().parent))


def find_module(name: str) -> Program:
    """Return the program that `python -m` would run."""
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name) if all(name.split(".")) else None
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                raise AmpError(f"{name!r} is a package without a __main__ module")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the package needs
        spec = None
    except ValueError:
        spec = None
    finally:
        del sys.path[0]
    get_source = getattr(spec and spec.loader, "get_source", None)
    source = get_source(spec.name) if spec is not None and get_source is not None else None
    if spec is None or source is None:
        raise AmpError(f"there is no Python module {name!r}, seen from {os.getcwd()!r}")
    origin = spec.origin or name
    code = _compiled(source.encode(), origin, repr(name))
    return Program(origin, source.encode(), code, os.getcwd(), spec)


def _compiled(source: bytes, path: str, name: str) -> CodeType:
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        raise AmpError(f"{name}{where} is no Python: {error.msg}") from None
    except ValueError as error:
        raise AmpError(f"{name} is no Python: {error}") from None


def execute(program: Program, arguments: Sequence[str]) -> None:
    """Run a program as the main one of this process; ends the process where it fails."""
    main: Any = ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]
    main.__spec__, main.__package__ = program.spec, program.spec and program.spec.parent
    if program.name != "-":
        main.__file__ = program.code.co_filename
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
    # For good, as Python does: threads and functions at exit may outlive the code's last line.
    sys.modules["__main__"] = main
    sys.argv = [program.name, *arguments]
    if program.folder is not None and not _isolated():
        sys.path[:1] = [program.folder]
    try:
        exec(program.code, vars(main))  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:
        _end(error)


def _isolated() -> bool:
    # Then Python has put no folder of a script in front.
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def _end(error: BaseException) -> NoReturn:
    """Show an error as Python does, without the line of this module, and exit as Python does."""
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
