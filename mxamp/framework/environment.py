"""The environment variable that runs scripts in mixed precision."""

import os

AUTOMATIC = "MXNET_ENABLE_AUTO_MIXED_PRECISION"
#: Its values, in lower case, that leave mixed precision off.
OFF_VALUES = ("", "0", "false", "off", "no")


def automatic_value() -> str:
    """Return the variable's value in lower case, "" where it leaves mixed precision off."""
    value = os.environ.get(AUTOMATIC, "").strip().lower()
    return "" if value in OFF_VALUES else value
