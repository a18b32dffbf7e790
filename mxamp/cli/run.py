"""`mxamp run`: a script in mixed precision, with no change to it."""

import os
import pkgutil
import re
import runpy
import sys
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec, SourceFileLoader
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
    "Default: float16 with a GPU, else bfloat16. auto: the same, but float32 on CPUs without "
    "bfloat16 instructions."
)
TAKES_SCRIPTS = "mxamp run takes the script itself: mxamp run train.py"
TO_THE_SCRIPT = "%s stands after %s and went to the script; options of mxamp run go before it"
#: The name of an interpreter.
_PYTHON = re.compile(r"python[\d.]*(\.exe)?$")

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
@click.option("--stats", is_flag=True, help="Count operators by dtype, and print them at the end.")
def run(
    script: str,
    arguments: Sequence[str],
    as_module: bool,
    dtype: Optional[str],
    path: Optional[str],
    stats: bool,
) -> None:
    """Run a Python SCRIPT with ARGUMENTS in mixed precision, loss scaling included.

    SCRIPT needs no change; - means standard input. Options before SCRIPT are mxamp's, options after
    it are the script's. A script that imports mxamp runs as without this command. If a script calls
    init of mxnet.contrib.amp, mxamp's functions replace that module's from then on.
    """
    if dtype and path is not None:
        raise usage_error(POLICY_HOLDS)
    try:
        program = _find_module(script) if as_module else _find_script(script)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        sys.excepthook(type(error), error.with_traceback(None), None)  # as Python shows it
        sys.exit(1)
    automatic.show_log()
    for option in _own_options(arguments):
        automatic.logger.info(TO_THE_SCRIPT, option, script)
    if automatic.imports_mxamp(program.code):
        automatic.logger.info(automatic.OWN_AMP, script)
    else:
        policy = Policy.load(path) if path is not None else None
        automatic.start(dtype, policy, name="mxamp run", instead="give --dtype bfloat16")
        if policy is None:
            # For the processes that it starts.
            os.environ[automatic.VARIABLE] = dtype or "1"
    with _operator_table_at_end() if stats else nullcontext():
        _execute(program, [program.name, *arguments])


def _own_options(arguments: Sequence[str]) -> List[str]:
    """Return the long options of `mxamp run` among the arguments of a script."""
    own = {name for one in run.params for name in one.opts if name.startswith("--")}
    given = (argument.partition("=")[0] for argument in arguments)
    return [name for name in dict.fromkeys(given) if name in own]


@contextmanager
def _operator_table_at_end() -> Iterator[None]:
    """Context that counts the operators that run, and prints the counts at its end."""
    from ..tools.debugging.operator_counts import operator_stats

    with operator_stats() as counted:
        try:
            yield
        finally:
            sys.stdout.flush()
            click.echo(f"\n{counted}", err=True)


# ---------------------------------------------------------------------- running it as `python` does

#: With private functions, which pdb calls too, that find the code of `python -m` and of folders.
_runpy: Any = runpy


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
        hint = f"; {TAKES_SCRIPTS}" if _PYTHON.match(name) else ""
        raise AmpError(f"there is no file {name!r}{hint}")
    file = os.path.join(os.getcwd(), name)
    if pkgutil.get_importer(file) is not None:
        path, sys.path = sys.path, [file]
        try:
            _, spec, code = _runpy._get_main_module_details(AmpError)
        finally:
            sys.path = path
        return _Program(name, code, file, spec.origin, spec.loader, spec)
    folder = os.path.dirname(os.path.realpath(name))
    loader = SourceFileLoader("__main__", file)
    # Not `get_code`, which would write a .pyc file beside the script.
    return _Program(name, loader.source_to_code(loader.get_data(file), file), folder, file, loader)


def _find_module(name: str) -> _Program:
    """Return the program that `python -m` would run."""
    sys.path.insert(0, os.getcwd())
    try:
        _, spec, code = _runpy._get_module_details(name, AmpError)
    finally:
        del sys.path[0]
    return _Program(spec.origin, code, os.getcwd(), spec.origin, spec.loader, spec)


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
