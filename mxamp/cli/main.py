"""The command `mxamp`: a click group that imports a subcommand's module when it runs."""

import importlib
import logging
import os
from typing import Dict, List, Optional, Tuple

import click

from .._version import __version__
from ..errors import AmpError, ArgumentError, CheckError, unknown
from ..framework.compat import import_mxnet
from ..framework.environment import AUTOMATIC
from .output import examples, in_options, print_errors

#: The commands in the order of the help: the module of each, and its summary.
COMMANDS: Dict[str, Tuple[str, str]] = {
    "compare": ("compare", "Compare the outputs and the times of two saved models."),
    "convert": ("convert", "Convert a saved model to mixed precision."),
    "doctor": ("doctor", "Check the installation: what is wrong, and what to do."),
    "explain": ("explain", "Show the precision of each operator of a saved model, and why."),
    "export-onnx": ("onnx", "Write a saved model as ONNX, for ONNX Runtime or OpenVINO."),
    "run": ("run", "Run a Python script in mixed precision."),
    "tune": ("tune", "Measure a saved model, and find its fastest policy."),
}

#: `run` starts Python anew, and a setting may make the import end the process: `doctor` says so.
_WITHOUT_MXNET = ("doctor", "run")

_EXAMPLES = examples(
    "mxamp run train.py",
    "mxamp explain model",
    "mxamp convert model --dtype bfloat16 --out model-bf16",
)


def _name_options(record: logging.LogRecord) -> bool:
    """Rewrite a log message to name the command's options in place of functions' arguments."""
    record.msg, record.args = in_options(record.getMessage()), ()
    return True


class _Commands(click.Group):
    """Click group that imports a subcommand on demand, and prints mxamp's errors in one line."""

    def invoke(self, ctx: click.Context) -> object:
        """Run a subcommand; exit with 2 for bad arguments or files, with 1 for other errors."""
        logger = logging.getLogger("mxamp")
        logger.addFilter(_name_options)
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `head` has read enough: click ends the process quietly
        except (AmpError, ImportError, OSError) as error:
            if isinstance(error, CheckError):
                print_errors(error.errors)
            failure = click.ClickException(in_options(str(error)))
            failure.exit_code = 2 if isinstance(error, ArgumentError) else 1
            raise failure from error
        finally:
            logger.removeFilter(_name_options)

    def list_commands(self, ctx: click.Context) -> List[str]:
        """Return the names of all subcommands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        """Import the module of a subcommand, and return its click command."""
        if cmd_name not in COMMANDS:
            raise click.UsageError(str(unknown("command", cmd_name, COMMANDS)), ctx)
        if cmd_name not in _WITHOUT_MXNET:
            os.environ.pop(AUTOMATIC, None)  # it is for scripts
            import_mxnet()
        module = importlib.import_module(f".{COMMANDS[cmd_name][0]}", __package__)
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        ctx.obj = command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the subcommands and their summaries to the help, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXAMPLES
)
@click.version_option(__version__, prog_name="mxamp")
def main() -> None:
    """Automatic mixed precision for Apache MXNet."""
