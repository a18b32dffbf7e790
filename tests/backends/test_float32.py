"""float32 as a form: faster equivalents where they gain, no casts, and float32's own rounding."""

import pickle

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import backpropagate, initialized, leaf, scaled_trainer
from helpers import substitutions as chosen_names
from mxamp.backends import substitutions
from mxamp.framework.data import own_tables
from mxamp.policy.active import nearest_policy
from mxamp.policy.policy import PLAIN_FLOAT32

TABLES = ("avx2", "avx512")
KEPT = sorted(set(own_tables("float32")["avx2"]) | set(own_tables("float32")["avx512"]))
POLICY = amp.Policy.default("bfloat16", "cpu").in_float32().override(substitutions=KEPT)


class Net(nn.HybridBlock):
    """Every operator that has a faster equivalent in float32."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.grouped = nn.Conv2D(32, 3, groups=8, padding=1, in_channels=32)
            self.norm = nn.BatchNorm(in_channels=32)
            self.rows = nn.LayerNorm(in_channels=128)
            self.rnn = gluon.rnn.LSTM(256, 2, input_size=128)
            self.dense = nn.Dense(8, in_units=256, flatten=False)

    def hybrid_forward(self, F, x):
        x = F.clip(F.relu(self.norm(self.grouped(x))) * 2, 0, 6)
        means = F.contrib.AdaptiveAvgPooling2D(x, output_size=1)
        x = F.broadcast_mul(x, F.sigmoid(means - F.mean(x, axis=(2, 3), keepdims=True) / 2))
        pooled = F.Pooling(x, global_pool=True, pool_type="avg").reshape((-1, 32))
        first, second = F.split(F.tanh(pooled), num_outputs=2, axis=-1)
        rows = F.tile(F.concat(first, second, F.sum(x, axis=(2, 3)), dim=-1), reps=(16, 2))
        return self.dense(self.rnn(self.rows(rows).reshape((16, -1, 128))))


def net_of(dtype="float32"):
    mx.random.seed(1)
    net = initialized(Net(), init=mx.init.Xavier())
    net.cast(dtype)
    net.hybridize()
    return net


def results(dtype, policy=None):
    """Return the output in inference, that in training, and all gradients as one array."""
    net = net_of(dtype)
    x = nd.array(np.random.RandomState(0).randn(4, 32, 112, 112), dtype=dtype)
    with amp.autocast(enabled=policy is not None, policy=policy):
        inference, training = net(x).asnumpy(), backpropagate(lambda: net(x))
    params = [p for p in net.collect_params().values() if p.grad_req != "null"]
    gradients = np.concatenate([p.grad().asnumpy().ravel() for p in params])
    return inference, training.asnumpy(), gradients


def distance(found, exact):
    return np.linalg.norm(found.astype("float64") - exact) / np.linalg.norm(exact)


@pytest.mark.slow
def test_errors_against_float64_are_those_of_float32():
    exact, plain, fast = results("float64"), results("float32"), results("float32", POLICY)
    assert not np.array_equal(plain[2], fast[2])
    for one, other, found in zip(exact, plain, fast):
        assert distance(found, one) <= 1.5 * max(distance(other, one), 1e-7)


FULL = {"global_pool": True, "pool_type": "avg", "kernel": (1, 1)}
CELL = {"state_size": 256, "num_layers": 1, "mode": "lstm"}
#: Faster equivalents, in functions of arrays of these shapes. `merged_groups` and `padded_channels`
#: are convolutions as any other, and `sgd` gives MXNet's bits.
EQUIVALENTS = [
    ("sigmoid", lambda F, x: F.sigmoid(x), [(64, 512)]),
    ("tanh", lambda F, x: F.tanh(x), [(64, 512)]),
    ("relu6", lambda F, x, w: F.FullyConnected(
        F.clip(x, 0, 6), w, num_hidden=8, no_bias=True), [(64, 512), (8, 512)]),
    ("split", lambda F, x: F.concat(*F.split(x, num_outputs=4, axis=-1), dim=0), [(64, 512)]),
    ("mean", lambda F, x: F.mean(x, axis=(2, 3)), [(4, 32, 28, 28)]),
    ("mean", lambda F, x: F.mean(x, axis=-1), [(64, 1024)]),
    ("sum", lambda F, x: F.sum(x, axis=1), [(16, 128, 32)]),
    ("pool_in_parts", lambda F, x: F.Pooling(x, **FULL), [(4, 64, 30, 30)]),
    ("pool_in_parts", lambda F, x: F.Pooling(x, **FULL), [(4, 32, 113, 113)]),
    # With a scale of one, the gradient of the data is that of the output, centered.
    ("layer_norm", lambda F, x, g: F.LayerNorm(x, F.ones_like(g), g), [(64, 512), (512,)]),
    ("layer_norm", lambda F, x, g: F.LayerNorm(x, F.ones_like(g), g), [(8, 16, 768), (768,)]),
    ("layer_norm", lambda F, x, g, b: F.LayerNorm(x, g, b), [(64, 512), (512,), (512,)]),
    ("broadcast", lambda F, x, y: F.broadcast_add(x, y), [(512, 128), (128,)]),
    ("broadcast", lambda F, x, y: F.broadcast_sub(y, x), [(512, 128), (128,)]),
    ("broadcast", lambda F, x, y: F.broadcast_mul(x, y), [(8, 32, 28, 28), (8, 32, 1, 1)]),
    ("broadcast", lambda F, x, y: F.broadcast_div(x, y), [(8, 32, 28, 28), (1, 32, 1, 1)]),
    ("rnn_layers", lambda F, x, i, h, b, s: F.RNN(
        x, F._internal._rnn_param_concat(F.reshape(i, (-1,)), F.reshape(h, (-1,)), b, b, dim=0), s,
        s, **CELL), [(5, 8, 256), (1024, 256), (1024, 256), (1024,), (1, 8, 256)]),
]  # fmt: skip
#: A shift and a scale of the data, and of the gradient of the output.
HOSTILE = {
    "normal": (0, 1, 0, 1), "shifted data": (100, 1, 0, 1), "shifted gradient": (0, 1, 100, 1),
    "both": (-1e4, 1, -1e4, 1), "large": (0, 1e3, 0, 1e9), "tiny": (0, 1e-6, 0, 1e-9), "zeros": (0, 0, 0, 0),
}  # fmt: skip


def output_and_gradients(function, arrays, head, dtype, policy=None):
    """Return the output of a hybridized function in training, and the gradients of its inputs."""
    net = initialized(nn.HybridLambda(function), hybridize=True)
    inputs = [leaf(nd.array(array, dtype=dtype)) for array in arrays]
    with amp.autocast(enabled=policy is not None, policy=policy):
        with autograd.record():
            out = net(*inputs)
        out.backward(nd.array(np.resize(head, out.shape), dtype=dtype))
        reasons = [node.reason for node in amp.explain(net, mode="training") if policy]
    return [one.asnumpy() for one in (out, *(x.grad for x in inputs))], reasons


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("number", range(len(EQUIVALENTS)))
def test_equivalents_round_as_float32_does_on_hostile_values(number, kind):
    """Sums get some ulps of their terms' magnitudes: BLAS adds in order, and MXNet compensates."""
    name, function, shapes = EQUIVALENTS[number]
    policy = POLICY.override(substitutions=[name])
    shift, scale, head_shift, head_scale = HOSTILE[kind]
    random = np.random.RandomState(number)
    arrays = [random.randn(*shape) for shape in shapes]
    arrays = [np.float32(arrays[0] * scale + shift), *map(np.float32, arrays[1:])]
    head = np.float32(random.randn(2**19) * head_scale + head_shift)
    exact, _ = output_and_gradients(function, arrays, head, "float64")
    least, _ = output_and_gradients(function, [*map(abs, arrays)], abs(head), "float64")
    plain, _ = output_and_gradients(function, arrays, head, "float32")
    found, reasons = output_and_gradients(function, arrays, head, "float32", policy)
    assert any("stands in for" in reason for reason in reasons)
    for one, magnitude, other, fast in zip(exact, least, plain, found):
        floor = 3 * np.finfo("float32").eps * np.linalg.norm(magnitude)
        assert np.linalg.norm(fast - one) <= 1.5 * np.linalg.norm(other - one) + floor


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name, symbol, least", [
    ("tanh", mx.sym.tanh(mx.sym.var("x")), 2**11),
    ("sum", mx.sym.sum(mx.sym.var("x"), axis=1), 2**13),
])  # fmt: skip
def test_small_operators_stay_as_they_are(name, symbol, least, training):
    policy = amp.Policy.default("float32", "cpu")
    least *= 2 if training else 1
    for rows, made in ((least // 64, {name}), (least // 64 - 1, set())):
        shapes = {"x": (rows, 64)}
        assert chosen_names(symbol, policy, shapes=shapes, training=training) == made


#: `relu` makes NaN zero, and is in no table.
OF_NAN = [*EQUIVALENTS, ("relu", lambda F, x: F.relu(x), [(64, 512)])]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("number", range(len(OF_NAN)))
def test_nan_stays_nan_where_plain_mxnet_has_it(number, training):
    _, function, shapes = OF_NAN[number]
    arrays = [np.random.RandomState(0).randn(*shape) for shape in shapes]
    arrays[0].flat[1000] = np.nan
    found = []
    for policy in (None, POLICY):
        net = initialized(nn.HybridLambda(function), hybridize=True)
        with amp.autocast(enabled=policy is not None, policy=policy):
            with autograd.record() if training else autograd.pause():
                found.append(np.isnan(net(*map(nd.array, arrays)).asnumpy()))
    assert found[0].any() and np.array_equal(*found)


@pytest.mark.parametrize("table", TABLES)
def test_tables_name_substitutions_with_a_measured_gain(table):
    gains = own_tables("float32")[table]
    assert gains.keys() <= substitutions()
    assert all(float(text.split()[-1]) >= 1.05 for text in gains.values())


def test_the_policy_lowers_nothing_and_is_a_value(tmp_path):
    policy = amp.Policy.default("float32", "cpu")
    assert policy.target_dtype == "float32" and not policy.lowers and policy.substitutions
    assert policy.operators("low") == [] and not any(r.no_kernel for r in policy.rules.values())
    assert pickle.loads(pickle.dumps(policy)) is policy  # noqa: S301
    policy.override(fp32_layers=["a"]).save(tmp_path / "policy.toml")
    assert amp.Policy.load(tmp_path / "policy.toml") == policy.override(fp32_layers=["a"])


@pytest.mark.parametrize("target", ["float32", np.float32])
def test_init_and_convert_name_the_same_thing(target):
    amp.init(target)
    assert amp.current_policy() is amp.Policy.default("float32")
    net = net_of()
    x = nd.ones((4, 32, 8, 8))
    net(x)
    converted = amp.convert_hybrid_block(net, target)
    assert {node.precision for node in amp.explain(converted)} <= {"float32", "as is"}
    trainer = scaled_trainer(net.collect_params())
    assert trainer.amp_loss_scale == 1
    assert amp.GradScaler().scale(nd.ones(1)).asscalar() == 1


def test_untuned_it_is_plain_mxnet_bit_for_bit():
    plain = results("float32")
    amp.init("float32", tuned=False)
    assert nearest_policy() is PLAIN_FLOAT32 and not amp.is_enabled()
    assert all(map(np.array_equal, plain, results("float32")))


def test_regions_of_a_model_may_be_float32():
    class Part(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            with amp.autocast("float32"):
                return F.relu(F.dot(x, x))

    part = initialized(Part(), hybridize=True)
    with amp.autocast("bfloat16"):
        part(nd.ones((4, 4)))
        plan = amp.explain(part)
    assert {node.precision for node in plan.filter(operator="dot")} == {"float32"}
    assert all("autocast('float32')" in node.reason for node in plan.filter(operator="dot"))


#: Operators with equivalents, and operators that refuse arrays of two dtypes.
OF_HALVES = [
    lambda F, x: F.sum(x, axis=1), lambda F, x: F.mean(x, axis=1),
    lambda F, x: F.sigmoid(x), lambda F, x: F.clip(x, 0, 6),
    lambda F, x: F.concat(*F.split(x, num_outputs=2, axis=-1), dim=0),
    lambda F, x: F.broadcast_mul(x, F.slice_axis(x, axis=0, begin=0, end=1)),
    lambda F, x, y: F.elemwise_add(x, y), lambda F, x, y: F.broadcast_add(x, y),
    lambda F, x, y: F.concat(x, y, dim=0), lambda F, x, y: F.where(x > 0, x, y),
    lambda F, x, y: F.dot(x, y, transpose_b=True), lambda F, x: F.exp(x),
]  # fmt: skip


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("number", range(len(OF_HALVES)))
def test_arrays_in_float16_are_computed_as_in_plain_mxnet(number, hybrid):
    """With the same bits, or with an error of the same operator."""
    arrays = [np.random.RandomState(k).randn(64, 512) for k in range(2)]
    found = []
    for enabled in (False, True):
        net = nn.HybridLambda(OF_HALVES[number], prefix="same_")
        net.hybridize(hybrid)
        x, y = (nd.array(one, dtype=d) for one, d in zip(arrays, ("float16", "float32")))
        inputs = [leaf(x), y][: OF_HALVES[number].__code__.co_argcount - 1]
        try:
            with amp.autocast("float32", enabled=enabled), mx.name.NameManager():
                out = backpropagate(lambda: net(*inputs))  # noqa: B023
                found.append([out.asnumpy().tobytes(), x.grad.asnumpy().tobytes(), out.dtype])
        except mx.MXNetError as error:
            found.append(str(error).split("[")[0])
    assert found[0] == found[1]


def test_a_dtype_named_by_the_caller_is_announced_as_such(on_machine, caplog):
    on_machine(features=("avx512", "avx512_bf16"))
    caplog.set_level("INFO")
    net = initialized(nn.Dense(2, in_units=3))
    amp.initialize(net, gluon.Trainer(net.collect_params(), "sgd"), dtype="float32")
    assert caplog.messages == ["mixed precision is on: float32 on cpu"]
    policy = amp.Policy.default("float32").override(low=["dot"])
    assert not policy.lowers and not amp.is_enabled()
