"""Restart a script in the project's .venv if this Python lacks the packages that it needs.

The scripts import this module first. Without a .venv, --help prints the script's docstring, and any
other use exits with the command that makes one.
"""

import importlib.util
import os
import sys
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[2] / ".venv" / "bin" / "python"

if any(importlib.util.find_spec(name) is None for name in ("click", "mxnet", "rich")):
    if PYTHON.exists() and Path(sys.prefix).resolve() != PYTHON.parents[1].resolve():
        os.execv(PYTHON, [str(PYTHON), *sys.argv])
    if "--help" in sys.argv:
        print((sys.modules["__main__"].__doc__ or "").strip())
        sys.exit()
    sys.exit("error: this needs mxamp and its tools: run scripts/test --setup-only, and try again")
