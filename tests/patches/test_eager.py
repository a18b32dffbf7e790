from contextlib import nullcontext

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import nn
from mxnet.ndarray import FullyConnected as EarlyFullyConnected

import mxamp as amp
from helpers import check_python, down, kind, leaf, randn, rounded, same, untuned, up, values
from mxamp.framework import arrays

X, W, B = randn(4, 8), randn(5, 8, seed=1), randn(5, seed=2)
UNTUNED = untuned("bfloat16")


def product():
    return nd.FullyConnected(X, W, B, num_hidden=5)


def fully_connected_by_hand(dtype):
    """What FullyConnected has to give: rounded inputs, float32 sums, a rounded result."""
    out = nd.FullyConnected(rounded(X, dtype), rounded(W, dtype), rounded(B, dtype), num_hidden=5)
    return down(out, dtype)


@pytest.mark.parametrize(
    "call",
    [
        product,
        lambda: nd.FullyConnected(data=X, weight=W, bias=B, num_hidden=5),
        lambda: EarlyFullyConnected(X, W, B, num_hidden=5),
        lambda: nd.op.FullyConnected(X, W, B, num_hidden=5),
        lambda: mx.npx.fully_connected(*[x.as_np_ndarray() for x in (X, W, B)], num_hidden=5),
    ],
)
def test_every_way_to_call_an_operator_is_covered(on, call):
    out = call()
    assert kind(out) == on.dtype
    # float16 is exact. oneDNN may sum bfloat16 products in another order than float32 ones.
    with amp.autocast(enabled=False):
        expected = values(fully_connected_by_hand(on.dtype))
    np.testing.assert_allclose(values(out), expected, rtol=2**-7 if on.dtype == "bfloat16" else 0)


def test_products_methods_and_python_operators_on_float16():
    a, b = randn(4, 8), randn(8, 3, seed=1)
    expected = down(nd.dot(rounded(a, "float16"), rounded(b, "float16")), "float16")
    with amp.autocast("float16"):
        assert same(nd.dot(a, b), expected)
        na, nb = a.as_np_ndarray(), b.as_np_ndarray()
        for out in (mx.np.dot(na, nb), na @ nb, mx.np.matmul(na, nb), na.dot(nb)):
            assert kind(out) == "float16"
            assert isinstance(out, mx.np.ndarray)
            np.testing.assert_array_equal(out.asnumpy(), values(expected))
        assert kind(mx.np.tensordot(na, nb, axes=1)) == "float16"
        assert kind(mx.np.tensordot(na, nb, axes=([1], [0]))) == "float16"
        with amp.autocast(enabled=False):
            assert kind(mx.np.tensordot(na, nb, axes=1)) == "float32"
        assert kind(mx.np.einsum("ij,jk->ik", na, nb)) == "float16"


WIDE = randn(4, 5, seed=7)
INTS, LONGS = nd.array([[1, 2], [3, 4]], dtype="int32"), nd.array([1, 2], dtype="int64")
#: By the dtype of the result: "low" is the target dtype, "float16" is float32 in bfloat16.
KINDS = {
    "low": [
        lambda low: nd.concat(low, low, dim=0), lambda low: nd.Activation(low, "relu"), nd.LeakyReLU,
        lambda low: nd.SequenceMask(low, nd.array([1] * 5), use_sequence_length=True),
    ],
    "float16": [
        lambda low: nd.where(nd.ones((4, 5)), low, low), lambda low: nd.take(low, nd.array([0, 3])),
        lambda low: nd.pick(low, nd.array([0, 1, 2, 3])),
        lambda low: nd.LeakyReLU(low, B, act_type="prelu"),
    ],
    "float32": [
        nd.softmax, lambda low: low.softmax(), nd.exp, lambda low: low.sum(),
        lambda low: nd.LayerNorm(low, B, B), lambda low: low + WIDE, lambda low: WIDE + low,
        lambda low: nd.concat(low, WIDE, dim=0), lambda low: nd.stack(WIDE, low),
        lambda low: nd.where(nd.ones((4, 5)), low, WIDE), lambda low: nd.Activation(low, "softrelu"),
        lambda low: nd.LeakyReLU(low, act_type="selu"),
        lambda low: nd.Embedding(LONGS, W, input_dim=5, output_dim=8),
        lambda low: nd.sparse.dot(X.tostype("csr"), W.T),
    ],
    "float64": [lambda low: nd.dot(X.astype("float64"), W.astype("float64").T)],
    "int32": [lambda low: INTS + INTS, lambda low: nd.sum(INTS)],
}  # fmt: skip


@pytest.mark.parametrize(
    "wanted, call", [(k, call) for k, calls in KINDS.items() for call in calls]
)
def test_dtypes_of_results(on, wanted, call):
    low = product()
    assert kind(low) == on.dtype
    out = call(low)
    by_name = {"low": on.dtype, "float16": "float16" if on.dtype == "float16" else "float32"}
    assert kind(out) == by_name.get(wanted, wanted)
    assert np.isfinite(values(out)).all()


def test_out_keeps_its_dtype_and_identity(on):
    out = nd.zeros((4, 5))
    returned = nd.FullyConnected(X, W, B, num_hidden=5, out=out)
    assert returned is out
    assert kind(out) == "float32"
    assert same(out, up(product()))
    whole = nd.zeros((8, 5))
    nd.FullyConnected(X, W, B, num_hidden=5, out=whole[2:6])
    assert same(whole[2:6], out)
    assert (whole[:2].asnumpy() == 0).all()
    low = down(nd.zeros((4, 5)), on.dtype)
    nd.exp(down(nd.ones((4, 5)), on.dtype), out=low)
    assert kind(low) == on.dtype


def test_assignment_and_in_place_arithmetic(on):
    low = product()
    x = nd.zeros((4, 5))
    x[:] = low
    assert kind(x) == "float32"
    assert same(x, up(low))
    x[1:2] = low[1:2]
    x += low
    x *= 2
    assert kind(x) == "float32"
    low += nd.ones((4, 5))
    assert kind(low) == on.dtype


@pytest.mark.parametrize("call", [
    lambda: nd.split(X, num_outputs=2), lambda: mx.np.split(X.as_np_ndarray(), 1),
    lambda: X.tostype("csr"), lambda: [X * number for number in (1, True, 1.0, 0.0, -0.0)],
    lambda: nd.sgd_mom_update(X, X, X.copy(), lr=0.1, momentum=0.9, out=X.copy()),
    lambda: nd.mp_sgd_update(*[X.astype("float16")] * 2, X.copy(), lr=0.1, out=X.astype("float16")),
    lambda: nd.FullyConnected(X, W, B, num_hidden=np.array(5)),
    # Errors of MXNet.
    lambda: nd.FullyConnected(X, num_hidden=5), lambda: nd.FullyConnected(X, W, B, num_hidden=[5]),
    lambda: nd.Convolution(X, num_filter=2, kernel=[1]), lambda: nd.sort(X, axis="x"),
    lambda: nd.Convolution(X, W, num_filter=2, kernel=[1], num_group="x", no_bias=True),
])  # fmt: skip
@pytest.mark.backend
def test_calls_that_stay_in_float32_are_those_of_mxnet(call):
    def outcome():
        try:
            return repr(call())
        except mx.MXNetError as error:
            return str(error).splitlines()[-1]

    plain = outcome()
    with amp.autocast("bfloat16"):
        assert outcome() == plain


def test_asnumpy_gives_values(on):
    low = product()
    got = low.asnumpy()
    assert got.dtype == ("float16" if on.dtype == "float16" else "float32")
    np.testing.assert_allclose(got, X.asnumpy() @ W.asnumpy().T + B.asnumpy(), rtol=0.05, atol=0.05)
    assert abs(low[0, 0].asscalar() - got[0, 0]) == 0
    assert repr(low).startswith("\n[[")
    assert low.as_np_ndarray()[0, 0].item() == got[0, 0]


@pytest.mark.backend
def test_grouped_convolution_after_a_float32_inference_pass():
    # After it oneDNN keeps the weight in a layout that it can't reorder to bfloat16.
    x, w = randn(2, 8, 6, 6), randn(8, 1, 3, 3)
    options = {"kernel": (3, 3), "num_filter": 8, "num_group": 8, "no_bias": True}
    plain = nd.Convolution(x, w, **options)
    plain.wait_to_read()
    with amp.autocast(policy=UNTUNED):
        low = nd.Convolution(x, w, **options)
        low.wait_to_read()
    np.testing.assert_allclose(values(low), plain.asnumpy(), atol=0.1)
    assert same(nd.Convolution(x, w, **options), plain)


@pytest.mark.parametrize("other", ["float16", "bfloat16"])
def test_the_users_own_half_precision_arrays(dtype, other):
    low = down(X, other)
    with amp.autocast(policy=untuned(dtype)):
        out = nd.FullyConnected(low, W, B, num_hidden=5)
        assert kind(out) == (dtype if dtype == other else "float32")
        assert kind(nd.softmax(low)) == "float32"


@pytest.mark.slow
def test_operators_that_end_the_process_in_bfloat16_run():
    # transpose of bfloat16 aborts in plain MXNet: in a process of its own.
    check_python(
        """
        import mxamp as amp, mxnet as mx
        from helpers import down, randn, kind
        with amp.autocast("bfloat16"):
            low = down(randn(4, 5), "bfloat16")
            for out in (low.T, mx.nd.transpose(low), mx.nd.dot(low, low.T), mx.nd.Dropout(low),
                        mx.nd.norm(low), mx.nd.UpSampling(low.reshape((1, 1, 4, 5)), scale=2,
                        sample_type="nearest")):
                assert kind(out) == "float32", out
                out.wait_to_read()
        """
    )


def assigned(array, key):
    made = mx.nd.zeros(array.shape)
    made[key] = array[key]
    return made


@pytest.mark.parametrize("copy", [
    lambda array: array.astype("float32"), lambda array: assigned(array, slice(None)),
    lambda array: array.as_np_ndarray().astype("float32").as_nd_ndarray(),
    lambda array: array.copyto(mx.nd.zeros(array.shape)),
    lambda array: assigned(array, slice(1, None)),
])  # fmt: skip
def test_arrays_in_onednns_layouts_are_copied_to_other_dtypes(copy, on):
    def convolved():
        data, weight = randn(2, 32, 8, 8), randn(16, 32, 1, 1)
        return mx.nd.Convolution(data, weight, kernel=(1, 1), num_filter=16, no_bias=True)

    expected, copied = mx.nd.cast(convolved(), dtype="float32").asnumpy(), copy(convolved())
    assert copied.dtype == np.float32
    found = copied.asnumpy()
    rows = found.reshape(2, -1).any(axis=1)
    np.testing.assert_array_equal(found[rows], expected[rows])
    assert rows.any()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.backend
def test_small_layers_stay_in_float32(recorded):
    def convolve(size):
        attrs = {"kernel": [3, 3], "num_filter": 32, "no_bias": True}  # a list, as Gluon passes on
        return kind(nd.Convolution(randn(1, 32, size, size), randn(32, 32, 3, 3), **attrs))

    def dense(rows, columns, units, dtype="float32"):
        weight = leaf(randn(units, columns))
        with autograd.record() if recorded else nullcontext():
            nd.FullyConnected(randn(rows, columns), weight, no_bias=True, num_hidden=units)
            data = randn(rows, columns) if dtype == "float32" else down(randn(rows, columns), dtype)
            return kind(nd.FullyConnected(data, weight, no_bias=True, num_hidden=units))

    with amp.autocast("bfloat16"):
        assert dense(8, 128, 128) == dense(8, 2048, 2048) == "float32"  # small, and of few rows
        assert dense(64, 128, 128, "bfloat16") == "float32"
        assert dense(512, 512, 128) == "bfloat16"
        assert (convolve(8), convolve(64)) == ("float32", "bfloat16")
    with amp.autocast(policy=UNTUNED):
        assert dense(8, 128, 128) == "bfloat16"
    with amp.autocast("float16"):
        assert dense(8, 128, 128) == "float16"


VIEWS = {
    "none": lambda h: h, "slice": lambda h: h[0:128], "reshape": lambda h: h.reshape((128, -1)),
    "five axes": lambda h: h.reshape((2, 4, 4, 4, -1)), "index": lambda h: h[3:4][0],
    "detached": lambda h: h[0:128].as_np_ndarray().as_nd_ndarray().detach(),
}  # fmt: skip


def hidden(view, is_np=False):
    """A layer's weight, and a view of its output, which is in bfloat16 under the policy above."""
    weight = leaf(randn(64, 64, seed=1))
    with amp.autocast(policy=UNTUNED), autograd.record():
        output = nd.FullyConnected(randn(512, 64), weight, no_bias=True, num_hidden=64)
        return weight, VIEWS[view](output.as_np_ndarray() if is_np else output)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("use", [
    lambda h: nd.concat(*[h.reshape((-1, 2))] * 2, dim=1), lambda h: nd.Flatten(h),
    lambda h: nd.expand_dims(h, 0), lambda h: nd.Reshape(h, shape=(-1,)), lambda h: h + h,
    lambda h: nd.BlockGrad(h) + h, arrays.copy,
    lambda h: h.as_np_ndarray().copy().as_nd_ndarray(),
    lambda h: h.as_np_ndarray().as_in_ctx(mx.cpu(1)).as_nd_ndarray().as_in_context(mx.cpu()),
])  # fmt: skip
@pytest.mark.backend
def test_operators_read_views_of_hidden_arrays(view, recording, use):
    weight, h = hidden(view)
    with autograd.record() if recording else autograd.pause(), amp.autocast(policy=UNTUNED):
        out = use(h)
    assert same(out.astype("float32"), use(nd.array(values(h))))
    if recording and view != "detached":
        out.backward()
        assert np.isfinite(values(weight.grad)).all() and values(weight.grad).any()


def test_a_view_stays_a_view_of_its_array():
    with amp.autocast(policy=UNTUNED):
        h = nd.zeros((4, 4), dtype=amp.bfloat16)
        view = h[1:3]
        view[:] = 2
        h[3:4].reshape((2, 2))[0] = h[1, 0:2]
        assert type(view) is nd.NDArray and values(h).sum() == 20


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("way", ["cast", "astype", "numpy"])
def test_gradients_through_casts_of_hidden_arrays_are_rounded(view, way):
    _, h = hidden(view, way == "numpy")
    with amp.autocast(policy=UNTUNED), autograd.record():
        h.attach_grad()
        wide = nd.cast(h, dtype="float32") if way == "cast" else h.astype("float32")
    head = randn(*h.shape, seed=3)
    wide.backward(head.as_np_ndarray() if way == "numpy" else head)
    assert kind(wide) == "float32" and kind(h.grad) == "bfloat16"
    np.testing.assert_array_equal(values(h.grad), values(rounded(head, "bfloat16")))


NUMBERS = np.linspace(-0.9, 1.7, 6, dtype="float32")


@pytest.mark.parametrize("space", [nd, mx.np])
@pytest.mark.parametrize("key, value", [
    (slice(None), 0.3), ((1, 2), np.float64(0.3)), ((Ellipsis, 1), 0.3), ([0, 2], 0.3),
    (slice(None), NUMBERS), (slice(1, 3), NUMBERS), (1, NUMBERS.tolist()), ([0, 2], NUMBERS),
    (slice(None), None), (slice(1, 3), None), (0, None),
])  # fmt: skip
def test_values_written_into_bfloat16_arrays_are_rounded(space, key, value):
    expected = np.zeros((4, 6), "float32")
    expected[key] = NUMBERS if value is None else value
    with amp.autocast("bfloat16"):
        h = space.zeros((4, 6)).astype(amp.bfloat16)
        h[key] = space.array(NUMBERS) if value is None else value
        assert kind(h) == kind(space.array(NUMBERS, dtype=h.dtype)) == "bfloat16"
        with pytest.raises(amp.ArgumentError, match=r"write array\(values\).astype"):
            space.array([0.3], dtype=h.dtype)
        np.testing.assert_array_equal(values(h), values(rounded(nd.array(expected), "bfloat16")))


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("take", [
    lambda F, h: h[0, 0], lambda F, h: F.np.squeeze(h), lambda F, h: F.np.reshape(h, ()),
    lambda F, h: F.npx.reshape(h, ()),
])  # fmt: skip
def test_values_without_axes_are_float32(take, hybridize):
    def forward(F, x):
        h = F.npx.fully_connected(x, x, num_hidden=1, no_bias=True)
        return F.np.expand_dims(take(F, h), 0) * h + take(F, h)

    net, x = nn.HybridLambda(forward), randn(1, 4).as_np_ndarray()
    net.hybridize(hybridize)
    x.attach_grad()
    with mx.util.np_shape(), mx.util.np_array(), amp.autocast(policy=UNTUNED), autograd.record():
        out = net(x)
        out.backward()
    wanted = float((values(rounded(x.as_nd_ndarray(), "bfloat16")) ** 2).sum())
    np.testing.assert_allclose(values(out), [[wanted**2 + wanted]], rtol=0.02)
    np.testing.assert_allclose(x.grad.asnumpy(), x.asnumpy() * (4 * wanted + 2), rtol=0.05)
