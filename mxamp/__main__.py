"""The entry point of `mxamp` and `python -m mxamp`; one line where MXNet can't be imported."""

import sys

from .cli.starting import unguard
from .errors import InstallError
from .framework.compat import import_mxnet

__all__ = ["main"]


def main() -> None:
    """Run the command `mxamp`."""
    try:
        import_mxnet()
    except InstallError as error:
        sys.exit(f"error: {error}")
    from .cli.main import main as command

    unguard()
    command()


if __name__ == "__main__":
    main()
