"""Trains one model in float32 or with mxamp. It is served tasks: a model's name, and the way."""

import logging
import warnings
from typing import Any, Dict

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import mxamp as amp  # noqa: E402
from processes import serve  # noqa: E402
from training import train  # noqa: E402


def perform(name: str, way: str) -> Dict[str, Any]:
    """Return the losses."""
    if way == "float32":
        return train(name, None)
    amp.init(way.split()[1])
    return train(name, amp)


if __name__ == "__main__":
    serve(perform)
