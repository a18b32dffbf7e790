"""A program to run as `python` would: a script, a module, a folder, a zip file, standard input."""

import importlib.util
import os
import pkgutil
import platform
import sys
from importlib.machinery import (
    BuiltinImporter,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple, NoReturn, Optional, Sequence, Union

from ..errors import AmpError

__all__ = ["Program", "execute", "find_module", "find_script"]

#: What shells make of a program that Ctrl-C has ended.
_INTERRUPTED = 130

NO_MODULE = "there is no Python module {name!r}, seen from {folder!r}"


Source = Union[str, bytes, None]


class Program(NamedTuple):
    """Code, and how Python would set the process up for it."""

    name: str  #: its `sys.argv[0]`
    source: Source  #: None where there is compiled code alone
    code: CodeType
    folder: str  #: where it finds its own modules
    file: str
    loader: Any
    spec: Optional[ModuleSpec] = None


def find_script(name: str) -> Program:
    """Return the program in a file, in the `__main__.py` of a folder or zip file, or in "-".

    That is standard input. A file may be compiled code (`.pyc`).
    """
    if name == "-":
        source = sys.stdin.buffer.read()
        code = _compiled(source, "<stdin>", "standard input")
        return Program(name, source, code, "", "<stdin>", BuiltinImporter)
    if not name:
        raise AmpError("the name of the script is empty: give one")
    # Not Path.exists, which raises where a name is too long for a file.
    if not os.path.exists(name):
        raise AmpError(f"there is no file {name!r}")
    # Python 3.8 leaves the path as it is typed.
    file = name if sys.version_info < (3, 9) else os.path.join(os.getcwd(), name)
    if pkgutil.get_importer(file) is not None:
        return _in_container(name, file)
    path = Path(name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise AmpError(f"{name!r} can't be read: {error.strerror}") from None
    folder = str(path.resolve().parent)
    if path.suffix == ".pyc" or data.startswith(MAGIC_NUMBER):
        sourceless = SourcelessFileLoader("__main__", file)
        return Program(name, None, _loaded(sourceless, name), folder, file, sourceless)
    code = _compiled(data, file, repr(name))
    return Program(name, data, code, folder, file, SourceFileLoader("__main__", file))


def _in_container(name: str, path: str) -> Program:
    spec = PathFinder.find_spec("__main__", [path])
    if spec is None or spec.loader is None:
        kind = "folder" if os.path.isdir(name) else "zip file"
        raise AmpError(f"{name!r} is a {kind} without a __main__.py: name the script in it")
    return _of_spec(spec, name, name, path)


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
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise AmpError(NO_MODULE.format(name=name, folder=os.getcwd()))
    return _of_spec(spec, spec.origin or name, name, os.getcwd())


def _of_spec(spec: ModuleSpec, argument: str, name: str, folder: str) -> Program:
    """Return the program of a module that was found; `argument` becomes its `sys.argv[0]`."""
    loader: Any = spec.loader
    file = spec.origin or name
    try:
        source = loader.get_source(spec.name)
    except (ImportError, SyntaxError, ValueError):  # no text, or one in another encoding
        source = loader.get_data(file)
    if source is not None:
        code = _compiled(source, file, repr(name))
    else:
        code = _loaded(loader, name, spec.name)
    return Program(argument, source, code, folder, file, loader, spec)


def _loaded(loader: Any, name: str, module: str = "__main__") -> CodeType:
    """Return code that was compiled before."""
    try:
        code = loader.get_code(module)
    except (ImportError, EOFError, ValueError):
        raise AmpError(
            f"{name!r} holds no code that this Python ({platform.python_version()}) has compiled: "
            "give the script itself"
        ) from None
    if not isinstance(code, CodeType):  # a module in C
        raise AmpError(NO_MODULE.format(name=name, folder=os.getcwd()))
    return code


def _compiled(source: Union[str, bytes], path: str, name: str) -> CodeType:
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
    spec = program.spec
    main.__package__, main.__loader__, main.__spec__ = spec and spec.parent, program.loader, spec
    main.__annotations__, main.__builtins__ = {}, sys.modules["builtins"]
    main.__file__, main.__cached__ = program.file, spec and spec.cached
    # For good, as Python does: threads and functions at exit may outlive the code's last line.
    sys.modules["__main__"] = main
    sys.argv = [program.name, *arguments]
    if not _isolated():
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
