"""Trains one model with mxnet.contrib.amp, in a process without mxamp."""

import sys
import warnings
from typing import Any, Dict

warnings.simplefilter("ignore")
from mxnet.contrib import amp  # noqa: E402

from processes import serve  # noqa: E402
from training import train  # noqa: E402


def perform(name: str, way: str) -> Dict[str, Any]:
    """Return the losses."""
    amp.init(way.split()[1])
    found = train(name, amp)
    assert not any(module.split(".")[0] == "mxamp" for module in sys.modules), "mxamp was imported"
    return found


if __name__ == "__main__":
    serve(perform)
