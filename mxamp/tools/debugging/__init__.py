"""Debugging tools (`mxamp.debugging`): find NaN, compare precisions, count operators."""
