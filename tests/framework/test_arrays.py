import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

from helpers import down, kind, leaf, randn, values
from mxamp.framework import arrays
from mxamp.framework.machine import DTYPE_CODES, dtype_name


@pytest.mark.parametrize("shape", [(0,), (2, 0), (), (1,), (3,)])
def test_arrays_of_any_shape_are_rounded_to_the_nearest(shape, dtype, monkeypatch):
    # Empty grids can't be launched on GPUs: amp_cast tries to, Cast asks for the size.
    used, invoke = [], arrays.invoke
    monkeypatch.setattr(arrays, "invoke", lambda *call: used.append(call[0]) or invoke(*call))
    mx.npx.set_np()
    epsilon = {"bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    full = leaf(mx.np.full(shape, 1 + 0.75 * epsilon))
    with mx.autograd.record():
        low = arrays.cast(full, dtype, True)
        wide = arrays.cast(low, "float32", True)
        loss = (wide * (1 + 0.75 * epsilon)).sum()
    loss.backward()
    assert (kind(low), low.shape) == (dtype, shape)
    assert (values(wide) == 1 + epsilon).all() and (values(full.grad) == 1 + epsilon).all()
    assert (arrays._AMP_CAST in used) == (low.size > 0)


@pytest.mark.parametrize("dtype", sorted(DTYPE_CODES))
def test_the_dtype_of_an_array_is_the_name_of_its_dtype(dtype):
    array = down(mx.nd.ones(1), dtype) if dtype == "bfloat16" else mx.nd.ones(1, dtype=dtype)
    assert arrays.dtype_of(array) == dtype_name(array.dtype) == dtype


def joined(array):
    return np.concatenate([one.ravel() for one in arrays.float32_parts(array)])


def test_parts_are_the_values_in_float32():
    x = randn(5, 3, 4)
    for array in (x, down(x, "bfloat16"), x.reshape(-1), x[:1], randn(4, 3).tostype("row_sparse")):
        np.testing.assert_array_equal(joined(array), values(array).ravel())
    large = randn(3, arrays._PART // 2 + 1)  # two rows are more than a part, one is less
    assert len([*arrays.float32_parts(large)]) == 3
    for array in (large, large.reshape(-1)):
        np.testing.assert_array_equal(joined(array), values(array).ravel())
    mx.npx.set_np()
    for shape in ((), (0,), (0, 3), (3, 0)):
        found = list(arrays.float32_parts(mx.np.ones(shape)))
        assert sum(one.size for one in found) == (shape == ())


def test_parts_of_a_weight_that_onednn_has_laid_out():
    for layer in (nn.Conv2D(32, 3, groups=2, in_channels=32), nn.Dense(2100, in_units=2100)):
        layer.initialize(mx.init.Uniform())
        expected = layer.weight.data().asnumpy()
        layer.hybridize()
        data = randn(32, 2100) if isinstance(layer, nn.Dense) else randn(2, 32, 8, 8)
        layer(data).wait_to_read()
        np.testing.assert_array_equal(joined(layer.weight.data()), expected.ravel())
