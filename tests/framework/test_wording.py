import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import BF16
from mxamp.framework.wording import counted, one_of, shortened, shown


def test_counts_and_lists_of_names():
    assert [counted(n, "step") for n in (1, 1234)] == ["1 step", "1,234 steps"]
    assert [shortened([*names]) for names in ("", "a", "abcd")] == ["", "a", "a, b, c and 1 other"]
    assert [one_of(allowed) for allowed in (["a"], ["a", "b", 1])] == ["'a'", "'a', 'b' or 1"]


@pytest.mark.parametrize("value, text", [
    ("int8", "'int8'"), ([1, "a"], "[1, 'a']"), (BF16, "bfloat16"), (np.float16, "float16"), (int, "the class int"),
    (np, "the module numpy"), (len, "the function len"), (object(), "an object"),
    (mx.cpu(), "cpu(0)"), (amp.Policy.default("float16", "cpu"), "a Policy"), ([0] * 100, "a list"),
    (mx.nd.zeros((2, 3), dtype="float16"), "an NDArray of shape (2, 3) in float16"),
])  # fmt: skip
def test_values(value, text):
    assert shown(value) == text
