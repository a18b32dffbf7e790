import mxnet as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxnet import nd

from helpers import down, randn
from mxamp.scaling.finite import all_finite, divide_and_check, multiply, square_sum


def test_mixed_dtypes_devices_and_storage():
    sparse = nd.sparse.row_sparse_array((np.ones((2, 3)), [0, 4]), shape=(6, 3))
    bad = nd.sparse.row_sparse_array((np.full((1, 3), np.nan), [2]), shape=(6, 3))
    good = [randn(4), randn(4).astype("float16"), down(randn(4), "bfloat16"), sparse]
    good.append(randn(2, 2).as_in_context(mx.cpu(1)))
    assert all_finite(good)
    assert not all_finite([*good, bad])
    assert all_finite([nd.array([1, 2], dtype="int32")])


def test_nothing_and_empty_arrays():
    assert all_finite([])
    assert all_finite([nd.sparse.zeros("row_sparse", (3, 3))])
    mx.npx.set_np()
    assert all_finite([mx.np.zeros((0, 3), dtype="float16"), mx.np.array(1.0)])
    assert not all_finite([mx.np.array(np.nan)])


def test_convolution_gradients_in_blocked_layout():
    x, w = randn(2, 16, 8, 8), randn(16, 16, 3, 3)
    out = nd.Convolution(x, w, kernel=(3, 3), num_filter=16, no_bias=True)
    assert all_finite([out])
    x[0, 0, 0, 0] = np.inf
    assert not all_finite([nd.Convolution(x, w, kernel=(3, 3), num_filter=16, no_bias=True)])


def test_views():
    array = nd.ones((4, 4))
    array[3] = np.nan
    assert all_finite([array[:3]])
    assert not all_finite([array[3]])


@given(
    st.lists(st.floats(width=32), max_size=50), st.sampled_from(["float32", "float16", "bfloat16"])
)
def test_against_numpy(numbers, kind):
    with np.errstate(all="ignore"):
        array = nd.array(np.array([0, *numbers], "float32"))
        array = down(array, kind) if kind == "bfloat16" else array.astype(kind)
        expected = np.isfinite(nd.amp_cast(array, dtype="float32").asnumpy()).all()
    assert all_finite([array]) == expected


@pytest.mark.parametrize("scale", [2.0, 65536.0])
def test_unscaled_arrays_and_those_that_overflowed(scale):
    values = np.random.RandomState(0).randn(70000).astype("float32")
    arrays = [mx.nd.array(values), mx.nd.array(values), mx.nd.array([1e30])]
    arrays.append(mx.nd.zeros((2,)).astype("float16"))
    arrays[1][69999] = np.nan
    arrays[3][:] = np.inf
    assert divide_and_check(arrays, scale) == [1, 3]
    np.testing.assert_array_equal(arrays[0].asnumpy(), values / np.float32(scale))
    np.testing.assert_array_equal(arrays[2].asnumpy(), np.float32(1e30) / np.float32(scale))


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16"])
def test_the_sum_of_squares_in_every_dtype(kind):
    array = nd.array([1.5, -2, 256])
    array = down(array, kind) if kind == "bfloat16" else array.astype(kind)
    assert square_sum([array, array]) == 2 * (1.5**2 + 2**2 + 256**2)


@pytest.mark.parametrize("exponent", [-13, -14, -15, -27, -28, -40, 14, 15, 16, 31])
def test_float16_is_multiplied_by_numbers_that_it_can_not_hold(exponent):
    values = np.array([2.0**15, -(2.0**14), 0, 2.0**-20])
    array = nd.array(values, dtype="float16")
    multiply([array], 2.0**exponent)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(array.asnumpy(), (values * 2.0**exponent).astype("float16"))
