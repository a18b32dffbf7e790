"""The command's group: errors are one line on standard error, with exit status 2."""

import sys
from typing import Any

import click

from ..errors import AmpError

__all__ = ["DEVICES", "DTYPES", "OneLineErrors", "usage_error"]

DTYPES = click.Choice(["float16", "bfloat16"])
DEVICES = click.Choice(["cpu", "gpu"])


class OneLineErrors(click.Group):
    """A group whose errors, click's own of usage included, are one line each."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.Exit as done:
            sys.exit(done.exit_code)
        except click.Abort:
            _fail("interrupted")
        except click.UsageError as error:
            where = f" ({error.ctx.command_path} --help)" if error.ctx else ""
            _fail(" ".join(error.format_message().split()) + where)
        except (AmpError, OSError) as error:
            _fail(str(error))


def usage_error(message: str) -> click.UsageError:
    """Return the error for a bad option of the command that runs."""
    return click.UsageError(message, click.get_current_context())


def _fail(message: str) -> None:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(2)
