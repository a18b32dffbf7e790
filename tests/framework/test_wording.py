import re

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import BF16, ROOT
from mxamp.framework.wording import counted, one_of, shortened, shown


def test_counts():
    assert [counted(n, "step") for n in (0, 1, 2, 1234)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "1,234 steps",
    ]
    assert counted(2, "loss", "losses") == "2 losses"


def test_lists_of_names():
    assert shortened([]) == ""
    assert shortened(["a"]) == "a"
    assert shortened(["a", "b", "c", "d"]) == "a, b, c and 1 other"
    assert one_of(["a"]) == "'a'"
    assert one_of(["a", "b", 1]) == "'a', 'b' or 1"


@pytest.mark.parametrize("value, text", [
    ("int8", "'int8'"), (3, "3"), (None, "None"), ([1, "a"], "[1, 'a']"),
    (BF16, "bfloat16"), (np.float16, "float16"), (np.dtype("int8"), "int8"), ([BF16], "[bfloat16]"),
    (int, "the class int"), (mx.nd.NDArray, "the class NDArray"), (np, "the module numpy"),
    (counted, "the function counted"), (len, "the function len"), (object(), "an object"),
    (mx.cpu(), "cpu(0)"), (amp.Policy.default("float16", "cpu"), "a Policy"),
])  # fmt: skip
def test_values(value, text):
    assert shown(value) == text


def test_arrays_and_what_is_long():
    array = mx.nd.zeros((2, 3))
    assert shown(array) == "an NDArray of 2x3 in float32"
    assert shown(array.astype("float16")) == "an NDArray of 2x3 in float16"
    assert shown({"a": mx.nd.amp_cast(array, dtype=BF16)}) == "{'a': an NDArray of 2x3 in bfloat16}"
    net = mx.gluon.nn.HybridSequential()
    for _ in range(9):
        net.add(mx.gluon.nn.Dense(3))
    assert shown(net) == "a HybridSequential"
    for value in ("x" * 10_000, list(range(10_000)), {i: i for i in range(10_000)}, b"y" * 10_000):
        assert len(shown(value)) < 100
        assert "\n" not in shown(value)


def sources():
    for path in sorted((ROOT / "mxamp").rglob("*.py")):
        yield path, path.read_text()


def test_counts_are_in_words_made_by_one_function():
    plural = re.compile(r"\{[^{}]*\b(?:len\(|count|size)[^{}]*\} [a-z]+s\b|%d [a-z]+s\b")
    found = [(path.name, match[0]) for path, text in sources() for match in plural.finditer(text)]
    assert not found
