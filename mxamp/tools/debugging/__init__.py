"""Debugging tools, public as `mxamp.debugging`: finding NaN, comparing, counting operators."""
