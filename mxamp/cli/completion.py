"""`mxamp completion`: completion of commands and options by Tab."""

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from .output import examples

__all__ = ["completion"]

_SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(
    epilog=examples(
        "mxamp completion bash >> ~/.bashrc",
        "mxamp completion zsh >> ~/.zshrc",
        "mxamp completion fish > ~/.config/fish/completions/mxamp.fish",
    )
)
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that makes a shell complete mxamp's commands and options."""
    root = context.find_root().command
    try:
        script = _SHELLS[shell](root, {}, "mxamp", "_MXAMP_COMPLETE").source()
    except RuntimeError as error:  # of a shell too old
        raise click.ClickException(str(error)) from None
    click.echo(script)
