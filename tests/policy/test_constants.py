"""Numbers, indices and parameters of samplers that half precision would lose: what calls return."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

import mxamp as amp
from helpers import down, kind, values

H = nd.array([[0, 1], [2, 3]]).astype("float16")
MASK = nd.array([[1, 0], [0, 0]])


def both(call, low=H):
    """The result under mixed precision on float16 values, and plain MXNet's on the same in float32."""
    with amp.autocast("float16"):
        got = call(low)
    return values(got).astype("float32"), call(low.astype("float32")).asnumpy()


def numpy(x):
    return x.as_np_ndarray()


@pytest.mark.parametrize("call", [
    lambda x: nd.log(nd.clip(x, 1e-8, 1)),
    lambda x: nd.log(nd.maximum(x, 1e-10)),
    lambda x: nd.minimum(-x, -1e5),
    lambda x: nd.SequenceMask(x, nd.array([1, 0]), use_sequence_length=True, value=-1e9),
    lambda x: nd.pad(x.reshape((1, 1, 2, 2)), mode="constant", pad_width=(0,) * 7 + (1,), constant_value=1e6),
    lambda x: x * 1e-7,
    lambda x: nd.LeakyReLU(-x, slope=1e-8),
    lambda x: mx.np.where(numpy(MASK), numpy(x), -1e9),
    lambda x: mx.np.full_like(numpy(x), 1e5),
    lambda x: mx.np.ediff1d(numpy(x), to_begin=-1e9),
    lambda x: mx.np.nan_to_num(numpy(x) * np.nan, nan=1e9),
    lambda x: mx.np.insert(numpy(x)[0], 1, 1e9),
])  # fmt: skip
def test_numbers_that_float16_can_not_hold(call):
    got, wanted = both(call)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


# ---------------------------------------------------------------------- indices


@pytest.mark.parametrize("call", [
    lambda x: nd.argmax(x, axis=1), lambda x: nd.argmin(-x, axis=1), nd.argmax_channel,
    lambda x: nd.topk(x), lambda x: nd.argsort(x)[:, -1], lambda x: nd.contrib.arange_like(x)[0, -1],
])  # fmt: skip
def test_indices_are_whole(call):
    row = nd.zeros((1, 4099))
    row[0, 4097] = 1
    got, wanted = both(call, row.astype("float16"))
    assert got.ravel() == wanted.ravel()
    assert got.ravel() in (4097, 4098)


# ---------------------------------------------------------------------- samplers


@pytest.mark.parametrize("call", [
    lambda a, b: nd.random.normal(a, b), lambda a, b: nd.sample_normal(b, a),
    lambda a, b: nd.random.uniform(a, b + 9), lambda a, b: nd.random.gamma(a, b),
    lambda a, b: mx.np.random.normal(numpy(a), numpy(b)), lambda a, b: mx.np.random.gamma(numpy(a), numpy(b)),
    lambda a, b: mx.np.random.uniform(numpy(a), numpy(b) + 9),
    lambda a, b: mx.np.random.exponential(numpy(a)), lambda a, b: mx.npx.random.bernoulli(prob=numpy(a) / 4),
    lambda a, b: nd.random.multinomial(a / 6, get_prob=True)[1], lambda a, b: nd.random.normal_like(a),
])  # fmt: skip
def test_samplers_draw_what_they_do_without_mixed_precision(dtype, call):
    a, b = nd.array([1, 2, 3]), nd.array([1, 2, 2])
    mx.random.seed(1)
    wanted = call(a, b)
    low = down(a, dtype)
    with amp.autocast(dtype):
        mx.random.seed(1)
        got = call(low, b)
    assert kind(got) == kind(wanted) == "float32"
    np.testing.assert_allclose(got.asnumpy(), wanted.asnumpy(), rtol=2e-2)
