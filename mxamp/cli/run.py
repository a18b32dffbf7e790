"""`mxamp run`: a script in mixed precision, with no change to it."""

import importlib.util
import os
import pkgutil
import sys
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence

import click

from ..errors import AmpError
from ..frontends import automatic
from ..policy.policy import Policy
from ..policy.targets import TARGETS_OR_AUTO
from .output import POLICY_HOLDS, examples, usage_error

__all__ = ["run"]

_DTYPE_HELP = (
    "Default: float16 with a GPU, else bfloat16. With auto, CPUs without bfloat16 arithmetic run "
    "the script in float32."
)
_EXAMPLES = examples(
    "mxamp run train.py --epochs 3",
    "mxamp run --dtype float16 -m package.train --epochs 3",
    "mxamp run --stats train.py",
)


@click.command(
    epilog=_EXAMPLES,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] [-m]",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.option("--dtype", type=click.Choice(TARGETS_OR_AUTO), help=_DTYPE_HELP)
@click.option("--policy", "path", type=click.Path(), help="A policy file (TOML).")
@click.option("--stats", is_flag=True, help="Print the operators by dtype at the end.")
def run(
    script: str,
    arguments: Sequence[str],
    as_module: bool,
    dtype: Optional[str],
    path: Optional[str],
    stats: bool,
) -> None:
    """Run a Python SCRIPT with ARGUMENTS in mixed precision, loss scaling included.

    SCRIPT may be - for standard input. Options before it are mxamp's, options after it are the
    script's. The script needs no change. A script that imports mxamp is left alone. A script that
    calls init of mxnet.contrib.amp goes on by its own calls.
    """
    if dtype and path is not None:
        raise usage_error(POLICY_HOLDS)
    try:
        program = _find_module(script) if as_module else _find_script(script)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        sys.excepthook(type(error), error.with_traceback(None), None)  # as Python shows it
        sys.exit(1)
    automatic.show_log()
    if automatic.imports_mxamp(program.code):
        automatic.logger.info(automatic.OWN_AMP, script)
    else:
        policy = Policy.load(path) if path is not None else None
        automatic.start(dtype, policy, name="mxamp run", instead="give --dtype bfloat16")
        if policy is None:
            # For the processes that it starts.
            os.environ[automatic.VARIABLE] = dtype or "1"
    with _shown_at_end() if stats else nullcontext():
        _execute(program, [program.name, *arguments])


@contextmanager
def _shown_at_end() -> Iterator[None]:
    """Count the operators that run, and print the table when the script ends in any way."""
    from ..tools.debugging.operator_counts import operator_stats

    with operator_stats() as counted:
        try:
            yield
        finally:
            sys.stdout.flush()
            click.echo(f"\n{counted}", err=True)


# ---------------------------------------------------------------------- running it as `python` does


class _Program(NamedTuple):
    """The code of a main module, and how Python sets the process up for it."""

    name: str  #: `sys.argv[0]`
    code: CodeType
    folder: str  #: `sys.path[0]`
    file: str
    loader: Any
    spec: Optional[ModuleSpec] = None


def _find_script(name: str) -> _Program:
    """Return the program in a file, in the `__main__.py` of a folder or zip file, or in "-"."""
    if name == "-":
        code = compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True)
        return _Program(name, code, "", "<stdin>", None)
    if not os.path.exists(name):
        raise AmpError(f"there is no file {name!r}")
    file = os.path.join(os.getcwd(), name)
    if pkgutil.get_importer(file) is not None:
        spec = PathFinder.find_spec("__main__", [file])
        if spec is None:
            raise AmpError(f"{name!r} has no __main__.py: name the script in it")
        return _of_spec(spec, name, file)
    folder = os.path.dirname(os.path.realpath(name))
    loader = SourceFileLoader("__main__", file)
    # Not `get_code`, which would write a .pyc file beside the script.
    return _Program(name, loader.source_to_code(loader.get_data(file), file), folder, file, loader)


def _find_module(name: str) -> _Program:
    """Return the program that `python -m` would run."""
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name) if all(name.split(".")) else None
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as error:
        missing = getattr(error, "name", None)
        if missing is not None and not f"{name}.".startswith(f"{missing}."):
            raise  # a module that the package needs
        spec = None
    finally:
        del sys.path[0]
    if spec is None:
        raise AmpError(f"there is no Python module {name!r} to run, seen from {os.getcwd()!r}")
    return _of_spec(spec, spec.origin or name, os.getcwd())


def _of_spec(spec: ModuleSpec, argument: str, folder: str) -> _Program:
    loader: Any = spec.loader
    try:
        code = loader.get_code(spec.name)
    except (AttributeError, ImportError):
        code = None
    if code is None:
        raise AmpError(f"{argument!r} holds no code for this Python")
    return _Program(argument, code, folder, spec.origin or argument, loader, spec)


def _execute(program: _Program, arguments: List[str]) -> None:
    """Run a program as the main module of this process; end the process if it fails."""
    main: Any = ModuleType("__main__")
    spec = program.spec
    main.__package__, main.__loader__, main.__spec__ = spec and spec.parent, program.loader, spec
    main.__annotations__, main.__builtins__ = {}, sys.modules["builtins"]
    main.__file__, main.__cached__ = program.file, spec and spec.cached
    # For good, as Python does: threads and functions at exit may outlive the last line.
    sys.modules["__main__"] = main
    sys.argv = arguments
    # An isolated Python has put no folder in front.
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[:1] = [program.folder]
    try:
        exec(program.code, vars(main))  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:
        # The traceback without this frame. Shells take 130 for a program that Ctrl-C has ended.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
