"""The entry point of `mxamp` and `python -m mxamp`."""

import sys

from .cli import starting
from .errors import InstallError

__all__ = ["main"]


def main() -> None:
    """Run the command `mxamp`; one line if MXNet can't be imported."""
    if starting.needs_mxnet(sys.argv[1:]):
        from .framework.compat import import_mxnet

        try:
            import_mxnet()
        except InstallError as error:
            sys.exit(f"error: {error}")
    from .cli.main import main as command

    starting.restore_ctrl_c()
    command()


if __name__ == "__main__":
    main()
