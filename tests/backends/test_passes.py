"""Every pass against graphs that are made to mislead it, in every way of running."""

import adversary
import mxnet as mx
import numpy as np
import pytest
from adversary import BFLOAT16, FLOAT32, WAYS, Pattern, Run, compared, surroundings
from fusion import attend, heads, joined
from mxnet import nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import leaf, substitutions, with_avx512
from mxamp.backends import backend_of
from mxamp.backends.onednn import fuse
from mxamp.backends.onednn.substitutions import PASSES

S = mx.sym
IMAGES = (3, 16, 6, 6)
#: Two of them are large enough for groups to be merged.
LARGE_IMAGES = (3, 16, 28, 28)
LOW = {"policy": BFLOAT16, "tolerance": 0.03}


def conv(x, p, name="c", kernel=(3, 3), filters=16, **more):
    return S.Convolution(
        x, p(f"{name}_weight"), p(f"{name}_bias"), kernel=kernel, num_filter=filters, name=name, **more
    )  # fmt: skip


def dense(x, p, name="d", units=16, **more):
    return S.FullyConnected(
        x, p(f"{name}_weight"), p(f"{name}_bias"), num_hidden=units, name=name, **more
    )


def with_bias_apart(x, p):
    """What MXNet's eager dense layer leaves out: a bias's gradient beside a frozen weight."""
    product = S.FullyConnected(
        x, p("d_weight"), no_bias=True, flatten=False, num_hidden=16, name="d"
    )
    return S.broadcast_add(product, p("d_bias", shape=(16,)))


def norm(x, p, name="n"):
    return S.BatchNorm(
        x, p(f"{name}_gamma"), p(f"{name}_beta"), p(f"{name}_mean"), p(f"{name}_var"),
        fix_gamma=False, eps=1e-3, name=name,
    )  # fmt: skip


def lstm(x, p):
    shapes = {"read": (1536, 16), "recur": (1536, 384), "read_bias": (1536,), "bias": (1536,)}
    vectors = [S.reshape(p(name, shape=shape), shape=(-1,)) for name, shape in shapes.items()]
    joined = S._internal._rnn_param_concat(*vectors, dim=0, num_args=4)
    return S.RNN(
        x, joined, p("state"), p("cell"), state_size=384, num_layers=1, mode="lstm",
        state_outputs=False, name="rnn",
    )  # fmt: skip


def large_layer(x, p):
    """A GRU large enough to run alone in training, with matrices as Gluon has them."""
    tensors = [p(f"p{width}", shape=(912, width)) for width in (16, 304)]
    tensors += [p(f"b{k}", shape=(912,)) for k in range(2)]
    vectors = [S.reshape(one, shape=(-1,)) for one in tensors]
    joined = S._internal._rnn_param_concat(*vectors, dim=0, num_args=len(vectors))
    return S.RNN(
        x, joined, p("state"), state_size=304, num_layers=1, mode="gru", state_outputs=False,
        name="rnn",
    )  # fmt: skip


def attend_by_two(x, p):
    """Self-attention with two heads."""
    thirds = S.split(dense(x, p, units=48, flatten=False), num_outputs=3, axis=-1)
    two = {"heads": lambda t: heads(t, (0, 0, 2, 8)), "joined": lambda t: joined(t, 2)}
    return attend(thirds, lambda scores: scores / 3, **two)


def attend_interleaved(x, p):
    """The same by MXNet's operators for the heads of one array."""
    heads = dense(x, p, "i", units=48, flatten=False)
    shares = S.softmax(S.contrib.interleaved_matmul_selfatt_qk(heads, heads=2))
    return S.contrib.interleaved_matmul_selfatt_valatt(heads, shares, heads=2)


def softmax_with_lengths(x, p):
    """A softmax of rows with lengths 0, 1, 2, ..."""
    first = S.reshape(S.slice_axis(x, axis=-1, begin=0, end=1), shape=(0, 0))
    return S.softmax(x, S.cast(S.contrib.arange_like(first), dtype="int32"), use_length=True)


#: A pattern for each substitution. A new one fails `test_every_pass_has_a_pattern` without it.
SUBSTITUTED = {
    "relu": Pattern(lambda x, p: S.relu(x), IMAGES, hides_nan=True),
    "sigmoid": Pattern(lambda x, p: S.sigmoid(x), IMAGES),
    "tanh": Pattern(lambda x, p: S.tanh(x), IMAGES),
    "broadcast": Pattern(
        lambda x, p: S.broadcast_mul(x, p("w", shape=(1, 16, 1, 1))), (3, 16, 32, 32),
        modes=("training",),
    ),
    "batch_dot": Pattern(
        lambda x, p: S.batch_dot(x, S.cos(x), transpose_a=True), (3, 256, 192), modes=("training",),
        keeps_shape=False, **LOW,
    ),
    "relu6": Pattern(lambda x, p: S.clip(x * 8, 0, 6), IMAGES),
    "layer_norm": Pattern(
        lambda x, p: S.LayerNorm(x, p("gamma"), p("beta")), (3, 80, 16), modes=("training",)
    ),
    "mean": Pattern(lambda x, p: S.mean(x, axis=(2, 3)), IMAGES, keeps_shape=False),
    "sum": Pattern(lambda x, p: S.sum(x, axis=1, keepdims=True), IMAGES, keeps_shape=False),
    "pool_in_parts": Pattern(
        lambda x, p: S.Pooling(x, kernel=(1, 1), global_pool=True, pool_type="avg"), IMAGES,
        modes=("training",), keeps_shape=False,
    ),
    "image_convolution": Pattern(
        lambda x, p: conv(x, p, pad=(1, 1)), (3, 3, 8, 8), keeps_shape=False, **LOW
    ),
    "merged_groups": Pattern(
        # As a graph output, the convolution itself has to have a plain layout.
        lambda x, p: S.reshape(
            conv(x, p, kernel=(7, 7), pad=(3, 3), num_group=4), shape=(0, 0, 0, 0)
        ),
        LARGE_IMAGES, spreads=True,
    ),
    "rnn": Pattern(lstm, (3, 16, 16), modes=("inference",), keeps_shape=False, **LOW),
    "rnn_layers": Pattern(large_layer, (3, 2, 16), keeps_shape=False),
    "masked_softmax": Pattern(softmax_with_lengths, (3, 4, 16), modes=("inference",)),
    "split": Pattern(lambda x, p: list(S.split(x, num_outputs=2, axis=2)), (3, 4, 16), keeps_shape=False),
}  # fmt: skip

#: A pattern for each pass of fusion, by its function.
FUSED = {
    "_drop_no_ops": Pattern(
        lambda x, p: S.Dropout(S.identity(S.Dropout(x, p=0.5)), p=0.5), IMAGES
    ),
    "_arrange_parameters": Pattern(
        lambda x, p: S.FullyConnected(
            x,
            S.reshape(S.concat(*(p(name, shape=(8, 16)) for name in "ab"), dim=0), shape=(-1, 16)),
            p("bias"),
            num_hidden=16,
            flatten=False,
        ),
        (3, 4, 16), **LOW,
    ),
    "_rename_activations": Pattern(lambda x, p: S.relu(conv(x, p, pad=(1, 1))), IMAGES),
    "fold_into_producers": Pattern(lambda x, p: norm(conv(x, p, pad=(1, 1)), p), IMAGES),
    "pad_channels": Pattern(
        lambda x, p: conv(S.relu(conv(x, p, pad=(1, 1), filters=24)), p, "e", (1, 1)), IMAGES
    ),
    "_add_fourth_channels": SUBSTITUTED["image_convolution"],
    "_merge_groups": SUBSTITUTED["merged_groups"],
    "fuse_attention": Pattern(
        lambda x, p: attend_interleaved(attend_by_two(x, p), p), (3, 4, 16), **LOW
    ),
    "make_dense_convolutions": Pattern(
        lambda x, p: dense(S.relu(dense(x, p)), p, "e"), (3, 16), **LOW
    ),
}  # fmt: skip

#: Passes that make gradients right, and the orders of inputs: no policy switches them off.
ALWAYS = {
    "prelu": Pattern(lambda x, p: S.LeakyReLU(x, p("slope"), act_type="prelu"), IMAGES),
    "bias beside a frozen weight": Pattern(
        lambda x, p: dense(x, p, flatten=False), (3, 4, 16), plain=with_bias_apart
    ),
    "scale input": Pattern(
        lambda x, p: S.LinearRegressionOutput(x, S.BlockGrad(S.sin(x))),
        (3, 4, 16),
        keeps_shape=False,
    ),
    "sum of a repeated array": Pattern(
        lambda x, p: S.broadcast_add(S.broadcast_add(p("w", shape=(1, 16, 1, 1)), x), x),
        (3, 16, 32, 32),
    ),
    "input order": Pattern(lambda x, p: norm(conv(x, p, pad=(1, 1)), p), IMAGES),
}
PATTERNS = {**SUBSTITUTED, **ALWAYS}


def marks(pattern):
    """Return the marks of a pattern's tests: those in bfloat16 need its kernels."""
    return with_avx512 if pattern.policy is BFLOAT16 else ()


NAMES = [pytest.param(name, marks=marks(pattern)) for name, pattern in PATTERNS.items()]


def test_every_pass_has_a_pattern():
    assert set(SUBSTITUTED) == set(PASSES.by_name)
    assert backend_of("cpu").substitutions == set(BFLOAT16.substitutions)
    assert set(FUSED) == {one.apply.__name__ for one in fuse.PASSES}


@pytest.mark.parametrize("name", NAMES[: len(SUBSTITUTED)])
def test_each_pattern_is_one_that_its_pass_finds(name):
    pattern = SUBSTITUTED[name]
    symbol = surroundings(pattern)["alone"]()
    shapes = dict(zip(symbol.list_arguments(), symbol.infer_shape(data=pattern.shape)[0]))
    usage = {"shapes": shapes, "training": pattern.modes[-1] == "training"}
    assert name in substitutions(symbol, pattern.policy, **usage)


def changed_shapes(pattern):
    """Return the pattern's shape, a smaller batch, larger images, and the first again."""
    batch, *rest = pattern.shape
    larger = [rest[0], *(2 * side for side in rest[1:])] if len(rest) == 3 else rest
    return [pattern.shape, (batch - 1, *rest), (batch, *larger), pattern.shape]


def check(pattern, way, surrounding, *what, **more):
    graphs = [surroundings(pattern, plain)[surrounding]() for plain in (False, True)]
    found = compared(way, Run(*graphs, *what, **more), pattern)
    assert not found, "\n".join(found)


def cases(patterns):
    for name, pattern in patterns.items():
        for place in surroundings(pattern):
            yield pytest.param(pattern, place, id=f"{name}, {place}", marks=marks(pattern))


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern, surrounding", cases(PATTERNS))
def test_values_and_gradients_whatever_surrounds_it(pattern, surrounding, way):
    for mode in pattern.modes:
        training = mode == "training"
        check(pattern, WAYS[way], surrounding, changed_shapes(pattern), pattern.policy, training)


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["hybridized", "executor"])
@pytest.mark.parametrize("grad_req", ["add", "null", "one"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_as_they_are_asked_for(name, grad_req, way):
    pattern = PATTERNS[name]
    if "training" not in pattern.modes:
        pytest.skip("made in inference alone")
    symbol = surroundings(pattern)["alone"]()
    params = [name for name in symbol.list_arguments() if name != "data"]
    if grad_req != "add":
        grad_req = dict.fromkeys(params[:1] if grad_req == "one" else params, "null")
    check(pattern, WAYS[way], "alone", [pattern.shape], pattern.policy, True, grad_req)


@pytest.mark.matrix
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["data", "head gradient"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_stays_where_it_is(name, where, poison):
    pattern = PATTERNS[name]
    if where == "head gradient" and "training" not in pattern.modes:
        pytest.skip("made in inference alone")
    if np.isnan(poison) and pattern.hides_nan:
        pytest.skip("NaN becomes 0, as in MXNet's own Activation")
    key = "poison" if where == "data" else "head_poison"
    training = "training" in pattern.modes
    what = ("of the input", [pattern.shape], pattern.policy, training)
    check(pattern, WAYS["hybridized"], *what, **{key: poison})


@pytest.mark.matrix
@pytest.mark.parametrize("pattern, surrounding", cases(PATTERNS))
def test_what_is_converted_answers_as_before(pattern, surrounding):
    check(pattern, adversary.converted, surrounding, changed_shapes(pattern), pattern.policy)


@pytest.mark.matrix
@pytest.mark.parametrize("pattern, surrounding", cases({**PATTERNS, **FUSED}))
@pytest.mark.usefixtures("small_weights_too")
def test_what_is_fused_answers_as_before(pattern, surrounding):
    check(pattern, adversary.fused, surrounding, changed_shapes(pattern), pattern.policy)


# ---------------------------------------------------------------------- NumPy's arrays

#: Operators of `mx.np` that passes change: for arrays without elements, without axes, and of few.
NUMPY = {
    "relu": lambda F, x: F.npx.relu(x),
    "sigmoid": lambda F, x: F.npx.sigmoid(x),
    "tanh": lambda F, x: F.np.tanh(x),
    "add": lambda F, x: F.np.sin(x) + F.np.cos(x),
    "multiply": lambda F, x: F.np.sin(x) * F.np.cos(x),
    "clip": lambda F, x: F.np.clip(x, 0, 6),
    "sum": lambda F, x: F.np.sum(x),
    "sum of no axes": lambda F, x: F.np.sum(x, axis=(), keepdims=True),
    "mean of no axes": lambda F, x: F.np.mean(x, axis=(), keepdims=True),
    "sum of a clip": lambda F, x: F.np.sum(F.np.clip(x, 0, 6)),
}
SIZES = [(), (0,), (0, 3), (3, 0), (1,), (2, 5), (40, 40)]


@pytest.mark.matrix
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("policy", [FLOAT32, pytest.param(BFLOAT16, marks=with_avx512)])
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("name", NUMPY)
def test_arrays_of_numpy_of_any_size(name, shape, policy, training):
    if name.endswith("of no axes") and 0 in shape:
        pytest.skip("MXNet fails itself")
    results = []
    with mx.util.np_shape(True), mx.util.np_array(True):
        for hybrid in (False, True):
            block = nn.HybridLambda(lambda F, x: NUMPY[name](mx if F is nd else mx.sym, x))
            block.hybridize(hybrid)
            x = leaf(mx.np.array(np.asarray(np.random.RandomState(3).randn(*shape), "float32")))
            with amp.autocast(policy=policy if hybrid else None, enabled=hybrid):
                with mx.autograd.record(training):
                    out = block(x)
                if training:
                    out.backward()
            results.append((out.asnumpy(), x.grad.asnumpy()))
    tolerance = 1e-5 if policy is FLOAT32 else 0.02
    for theirs, mine in zip(*results):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)
