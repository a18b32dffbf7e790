"""Environment variables: read MXNET_ENABLE_AUTO_MIXED_PRECISION; set a variable temporarily."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

AUTOMATIC = "MXNET_ENABLE_AUTO_MIXED_PRECISION"
#: Its values, in lower case, that leave mixed precision off.
OFF_VALUES = ("", "0", "false", "off", "no")


def automatic_value() -> str:
    """Return MXNET_ENABLE_AUTO_MIXED_PRECISION in lower case, or "" if it is unset or "off"."""
    value = os.environ.get(AUTOMATIC, "").strip().lower()
    return "" if value in OFF_VALUES else value


@contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """Return a context that sets an environment variable to `value`, or does nothing for None."""
    if value is None:
        yield
        return
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
