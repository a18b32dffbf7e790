"""Attributes as values: spellings of one value, and numbers that a dtype can't hold."""

import numpy as np
import pytest
from mxnet import nd

from helpers import mx_dtype, values
from mxamp.policy.values import RANGES, same_value


@pytest.mark.parametrize("one, other", [
    ("True", "1"), ("false", "0"), ("False", "0"), ("1.0", "1"), ("1e0", "1"), ("-1", "-1.0"),
    ("0.1", "0.100000001"), ("0.0010000000474974513", "0.001"), ("None", "none"),
    ("(1, 1)", "[1,1]"), ("(1, 1)", "(1.0, True)"), ("(2,)", "2"), ("relu", "relu"),
])  # fmt: skip
def test_spellings_of_one_value(one, other):
    assert same_value(one, other) and same_value(other, one)


@pytest.mark.parametrize("one, other", [
    ("0", "None"), ("False", "None"), ("0", "1"), ("1", "1.5"), ("0.1", "0.11"), ("relu", "elu"),
    ("16777216", "16777217"), ("(1, 1)", "(1, 2)"), ("(1, 1)", "1"), ("", "0"), ("(1", "1"),
    ("1e300", "1e301"), ("nan", "relu"),
])  # fmt: skip
def test_different_values(one, other):
    assert not same_value(one, other)


@pytest.mark.parametrize(
    "dtype, limit", [("float16", 65520.0), ("bfloat16", (2 - 2.0**-8) * 2.0**127)]
)
def test_numbers_are_infinite_from_half_a_step_above_the_largest(dtype, limit):
    below = np.nextafter(np.float32(limit), np.float32(0))
    rounded = values(nd.amp_cast(nd.array([limit, below]), dtype=mx_dtype(dtype)))
    tiny = np.finfo("float16" if dtype == "float16" else "float32").tiny
    assert np.isinf(rounded[0]) and RANGES[dtype] == (rounded[1], tiny)
    assert RANGES["float32"] == (np.finfo("float32").max, np.finfo("float32").tiny)
