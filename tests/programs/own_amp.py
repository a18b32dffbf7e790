"""Turns mixed precision on by itself."""

import mxamp as amp

amp.init("bfloat16")
print("on", amp.is_enabled())
