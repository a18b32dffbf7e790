"""Convolutions of narrow groups, merged where oneDNN can cut blocks of channels."""

import mxnet as mx
import pytest

import mxamp as amp
from helpers import chosen, substitutions

S = mx.sym
FLOAT32 = amp.Policy.default("bfloat16").in_float32()
X = S.var("data")


def joined(axis=1):
    return S.Concat(X, X, dim=axis)


def grouped(data, groups=8, kernel=3):
    size = {"kernel": (kernel, kernel), "num_filter": 32, "num_group": groups}
    return S.Flatten(S.Convolution(data, name="c", **size))


PLACES = {
    "nothing": (X, True),
    "a convolution": (S.Convolution(joined(), kernel=(1, 1), num_filter=32), True),
    "a concatenation": (joined(), False),
    "one of rows": (joined(2), True),
    "a chain": (S.Pooling(S.relu(S.BatchNorm(joined())), kernel=(2, 2)), False),
    "a sum": (S.elemwise_add(S.relu(joined()), joined()), False),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_groups_are_not_merged_behind_a_concat(name, training):
    data, merged = PLACES[name]
    shapes = {"c_weight": (32, 4, 3, 3)}
    names = substitutions(grouped(data), FLOAT32, shapes=shapes, training=training)
    assert ("merged_groups" in names) == (merged or not training)


#: Groups of 32 channels, kernel, training, and the blocks (AVX2 8, avx512 16) that groups fill.
GROUPS = [
    (8, 3, False, (8, 16)), (8, 3, True, (8, 16)), (4, 3, False, ()), (4, 3, True, (16,)),
    (32, 3, True, ()), (32, 5, False, ()), (32, 5, True, (8,)), (16, 3, True, (8, 16)),
]  # fmt: skip


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("groups, kernel, training, blocks", GROUPS)
def test_groups_are_merged_up_to_a_block(groups, kernel, training, blocks, block, on_machine):
    on_machine(features=["avx512"] if block == 16 else [])
    shapes = {"data": (4, 32, 40, 40), "c_weight": (32, 32 // groups, kernel, kernel)}
    made = chosen(grouped(X, groups, kernel), FLOAT32, shapes=shapes, training=training).substituted
    assert [detail[0] for _, (_, detail) in made] == [block] * (block in blocks)
