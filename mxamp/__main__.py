"""The entry point of `mxamp` and `python -m mxamp`."""

from .cli.main import main

if __name__ == "__main__":
    main()
