"""The command `mxamp`: a group that loads the module of a command when it is called."""

import importlib
import os
from typing import Any, Dict, List, Optional, Tuple

import click

from .._version import __version__
from ..errors import AmpError, InstallError, unknown
from ..framework.compat import import_mxnet
from .output import examples, exit_with

#: The commands in the order of the help: the module of each, and its summary.
COMMANDS: Dict[str, Tuple[str, str]] = {
    "convert": ("convert", "Convert a saved model to mixed precision."),
    "doctor": ("doctor", "Check the installation, and measure the speed of each dtype."),
    "explain": ("explain", "Show the precision of each operator of a saved model, and why."),
    "export-onnx": ("onnx", "Write a saved model as ONNX, for ONNX Runtime or OpenVINO."),
    "operators": ("explain", "Show the precision class of MXNet's operators, and why."),
    "run": ("run", "Run a Python script in mixed precision, loss scaling included."),
    "tune": ("tune", "Measure a saved model, and find its fastest policy."),
}

#: `run` starts Python anew, and a setting may make the import end the process: `doctor` says so.
_WITHOUT_MXNET = ("doctor", "run")

_EXAMPLES = examples(
    "mxamp doctor",
    "mxamp run train.py",
    "mxamp explain model",
    "mxamp convert model --dtype bfloat16 --out model-bf16",
)


class _Commands(click.Group):
    """A group that loads a command's module when it runs, and prints errors as one line."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; print its error, click's own included, as one line."""
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.Abort:
            exit_with("interrupted", 130)
        except click.UsageError as error:
            where = f" ({error.ctx.command_path} --help)" if error.ctx else ""
            exit_with(f"error: {error.format_message()}{where}", 2)
        except click.ClickException as error:
            exit_with(f"error: {error.format_message()}", 2)
        except InstallError as error:
            exit_with(f"error: {error}", 1)
        except (AmpError, OSError) as error:
            exit_with(f"error: {error}", 2)

    def list_commands(self, ctx: click.Context) -> List[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        """Import the module of a command, and return the command; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in _WITHOUT_MXNET:
            os.environ.pop("MXNET_ENABLE_AUTO_MIXED_PRECISION", None)  # it is for scripts
            import_mxnet()
        module = importlib.import_module(f".{COMMANDS[cmd_name][0]}", __package__)
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def resolve_command(self, ctx: click.Context, args: List[str]) -> Any:
        """Return the named command, or raise with the closest names."""
        if args[0] not in COMMANDS:
            raise click.UsageError(str(unknown("command", args[0], COMMANDS)), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    epilog=_EXAMPLES,
)
@click.version_option(__version__, prog_name="mxamp")
@click.pass_context
def main(context: click.Context) -> None:
    """Automatic mixed precision for Apache MXNet."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
