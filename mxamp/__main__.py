"""The entry point of `mxamp` and `python -m mxamp`; one line where MXNet can't be imported.

`mxamp doctor` and `mxamp info` run without MXNet: its import may be what is wrong. `mxamp launch`
only starts the processes that import it.
"""

import sys

from .cli.starting import WITHOUT_MXNET, unguard
from .errors import InstallError
from .framework.compat import import_mxnet

__all__ = ["main"]


def main() -> None:
    """Run the command `mxamp`."""
    if sys.argv[1:2] and sys.argv[1] in WITHOUT_MXNET:
        from .cli.without_mxnet import without_mxnet

        without_mxnet()
        return
    try:
        import_mxnet()
    except InstallError as error:
        sys.exit(f"error: {error}")
    from .cli.main import main as command

    unguard()
    command()


if __name__ == "__main__":
    main()
