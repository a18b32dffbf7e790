"""Runs `scripts/fuzz` in the project's .venv, as benchmarks are."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
__import__("environment")
