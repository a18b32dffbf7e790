"""`python -m mxamp` is the command `mxamp`."""

from .cli import main

if __name__ == "__main__":
    main()
