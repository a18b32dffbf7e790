"""Runs a benchmark in the project's .venv where the Python that started it has nothing installed.

The benchmarks import this first. Without a .venv, --help still prints what the benchmark says of
itself, and anything else ends with what to do.
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
