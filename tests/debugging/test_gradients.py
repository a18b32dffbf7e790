"""Gradients counted by exponent, exactly as float16 rounds them, and the scale that follows."""

import json
import math

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import digits
import mxamp as amp
from helpers import BF16, check_picture_for_dark_mode, randn
from mxamp.tools.debugging.gradients import MARGIN, GradientHistogram
from nets import NETS, made, masked, perceptron
from training import batches, setup

histogram_of = amp.debugging.gradient_histogram
with mx.util.np_shape(True):
    EMPTY = nd.zeros((0, 4))
FLOATS = {"float32": 32, "float64": 64, "float16": 16}
#: 2**-24 and 65504 and what lies next to them round in all ways there are.
EDGES = [2.0**-25, 2.0**-24, 2.0**-14, 2.0**-149, 65504.0, 65519.0, 65520.0, 65536.0, 1.0, 0.0]


def counted(values, scale=1.0):
    histogram = GradientHistogram()
    histogram.count(values, scale)
    return histogram


def square(output, _label):
    return (output * output).sum()


@settings(max_examples=100)
@given(
    values=st.sampled_from(sorted(FLOATS)).flatmap(
        lambda kind: hnp.arrays(
            kind,
            st.integers(1, 30),
            elements=st.one_of(
                st.floats(width=FLOATS[kind]),
                st.sampled_from([np.dtype(kind).type(e).item() for e in EDGES[:3] + EDGES[8:]]),
            ),
        )
    ),
    power=st.integers(-30, 40),
)
def test_shares_are_what_float16_makes_of_gradients(values, power):
    histogram = counted(values)
    scale = 2.0**power
    finite = values[np.isfinite(values)].astype("float64")
    used = finite[finite != 0]
    # float32 and float16 values times a power of two are exact in float64; float64's are rounded
    # once more only below what float16 knows.
    with np.errstate(all="ignore"):
        scaled = used * scale
        half = scaled.astype("float16")
    share = len(used) or 1
    assert histogram.share_vanishing(scale) == (half == 0).sum() / share
    assert histogram.share_overflowing(scale) == np.isinf(half).sum() / share
    below = (abs(scaled) < 2.0**-14) & (half != 0)
    assert histogram.share_subnormal(scale) == pytest.approx(below.sum() / share)
    assert histogram.zero == (finite == 0).sum()
    assert histogram.nonfinite == len(values) - len(finite)
    assert histogram.size == len(values)
    assert dict(zip(histogram.exponents, histogram.counts)) == {
        e: sum(math.frexp(v)[1] - 1 == e for v in used) for e in histogram.exponents
    }


@pytest.mark.parametrize("power", [-3, 0, 10])
def test_the_ends_of_the_range(power):
    values = np.array([s * e * (1 + d) for s in (1, -1) for e in EDGES for d in (-1e-3, 0, 1e-3)])
    values = values.astype("float32")
    histogram, scale = counted(values), 2.0**power
    with np.errstate(over="ignore"):
        half = np.float16(values * np.float32(scale))
    nonzero = (values != 0).sum()
    assert histogram.share_vanishing(scale) == ((half == 0) & (values != 0)).sum() / nonzero
    assert histogram.share_overflowing(scale) == np.isinf(half).sum() / nonzero


def test_large_arrays_are_counted_in_parts():
    values = 2.0 ** np.random.RandomState(0).randint(-9, 9, 150_000)
    for kind in sorted(FLOATS):
        assert counted(values.astype(kind)).counts == counted(values).counts
    assert counted(values).size == 150_000
    assert counted(values).share_vanishing(2.0**-25) == (values <= 1).mean()


def test_a_scale_that_the_gradients_carry_is_taken_out():
    values = np.array([2.0**-20, 3.0], "float32")
    for scale in (1024.0, 1000.0):
        scaled = counted((values * np.float32(scale)).astype("float32"), scale)
        assert scaled.exponents == counted(values).exponents
    histogram = counted(values)
    # Between powers of two, values are taken to be spread out.
    shares = [histogram.share_vanishing(s) for s in (2.0**-5, 2.0**-5.5, 2.0**-6)]
    assert shares == sorted(shares)


def test_the_recommended_scale():
    values = np.full(10_000, 2.0**-30, "float32")
    values[:9] = 2.0**-40
    assert counted(values).recommended_scale() == 2.0**6  # 2**-25 would still be zero
    assert counted(values).recommended_scale(keep=1) == 2.0**16
    values[9] = 1
    assert counted(values).recommended_scale(keep=1) == 2.0**12  # 65504 / 8 is above 2**12
    assert counted(np.array([1e9], "float32")).recommended_scale() * 1e9 * MARGIN <= 65504
    for keep in (0, 1.5, "all"):
        with pytest.raises(amp.ArgumentError, match="keep"):
            counted(values).recommended_scale(keep)
    with pytest.raises(amp.StateError, match="zero"):
        counted(np.zeros(3, "float32")).recommended_scale()


def test_current_gradients_of_trainers_and_blocks():
    net, trainer = setup(scaler=amp.LossScaler(init_scale=1024))
    with pytest.raises(amp.StateError, match="after backward"):
        histogram_of(trainer)
    x = nd.array(batches(1)[0])
    with autograd.record():
        loss = square(net(x), None)
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    histogram = histogram_of(trainer)
    assert histogram.scale == 1024
    alone = histogram_of(net, (x, None), square, loss_scale=1024)
    assert histogram.to_dict() == alone.to_dict()
    # A block does not know of the scale.
    assert histogram_of(net).largest == 1024 * alone.largest
    assert histogram_of(net, loss_scale=1024).to_dict() == alone.to_dict()
    amp.unscale(trainer)
    assert histogram_of(trainer).to_dict() == alone.to_dict()
    trainer.step(1)
    with pytest.raises(amp.StateError, match="before trainer.step"):
        histogram_of(trainer)


@pytest.mark.parametrize("make", NETS, ids=lambda make: make.__name__)
def test_eager_and_hybrid_nets_count_alike_with_activations(make):
    net, data = made(make)
    eager = histogram_of(net, (*data, None), square, activations=True)
    net.hybridize()
    net(*data)
    hybrid = histogram_of(net, (*data, None), square, activations=True)
    assert eager.to_dict() == hybrid.to_dict()
    assert eager.by_activation.keys() == hybrid.by_activation.keys()
    trained = [p.name for p in net.collect_params().values() if p.grad_req != "null"]
    assert sorted(eager.by_parameter) == sorted(trained)


def test_gradients_of_activations():
    class Two(gluon.Block):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.first, self.second = nn.Dense(1, in_units=1), nn.Dense(1, in_units=1)

        def forward(self, x):
            return self.second(self.first(x) * float(x.shape[1]))

    class Traced(nn.HybridBlock):
        def __init__(self, two):
            super().__init__()
            self.first, self.second = two.first, two.second

        def hybrid_forward(self, F, x):
            return self.second(self.first(x))

    two = Two()
    two.initialize(mx.init.Constant(2.0**-8))
    for net in (two, Traced(two)):
        batch = (nd.ones((1, 1)), None)
        found = histogram_of(net, batch, lambda o, _: o * 2.0**-3, activations=True)
        # Of the last layer's output 2**-3, and of what comes before that times its weight.
        assert {one.exponents for one in found.by_activation.values()} == {(-3,), (-11,)}
        assert sum(one.size for one in found.by_activation.values()) == found.size - 4


def test_batches_add_up():
    net, data = made(perceptron)
    other = randn(4, 8, seed=1)
    both = histogram_of(net, [(*data, None), (other, None)], square)
    histogram = histogram_of(net, (*data, None), square)
    kept = histogram
    histogram += histogram_of(net, (other, None), square)
    assert histogram.to_dict() == both.to_dict()
    assert histogram.batches == both.batches == 2
    assert kept.size * 2 == both.size


def test_sparse_gradients_and_parameters_that_are_not_used():
    class Odd(gluon.Block):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.embedding = nn.Embedding(6, 2, sparse_grad=True)
                self.unused = nn.Dense(1, in_units=1)

        def forward(self, x):
            return self.embedding(x)

    net = Odd()
    net.initialize()
    histogram = histogram_of(net, (nd.array([1, 1, 3]), None), square)
    assert histogram.by_parameter[net.embedding.weight.name].size == 4
    assert histogram.by_parameter[net.unused.weight.name].zero == 1


def test_sparse_gradients_of_nets_that_are_traced():
    net = nn.HybridSequential()
    net.add(nn.Embedding(6, 2, sparse_grad=True), nn.Dense(2, in_units=4))
    net.initialize(mx.init.Normal(1))
    histogram = histogram_of(net, (nd.array([[1, 1], [3, 3]]), None), square, activations=True)
    assert histogram.by_parameter[net[0].weight.name].size == 4


def test_a_net_without_trained_parameters_has_no_gradients():
    net, data = made(perceptron)
    net.collect_params().setattr("grad_req", "null")
    assert histogram_of(net, (*data, None), square).size == 0


def test_activations_whose_shapes_depend_on_values():
    net, data = made(masked)
    net.hybridize()
    histogram = histogram_of(net, (*data, None), square, activations=True)
    sizes = {name: one.size for name, one in histogram.by_activation.items()}
    assert sorted(sizes.values()) == [12, 24, 24, 24, 32]


class Tiny(nn.HybridBlock):
    """Gradients around 2**-30, and activations' gradients too."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first, self.second = nn.Dense(16, in_units=8), nn.Dense(1, in_units=16)

    def hybrid_forward(self, F, x):
        return self.second(F.relu(self.first(x)))


def trained(net, trainer, steps, loss_of):
    for data, label in steps:
        with autograd.record():
            loss = loss_of(net(data), label)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        yield histogram_of(trainer)
        trainer.step(1)


@pytest.mark.parametrize("name", ["tiny", "digits"])
def test_training_from_a_calibrated_scale(name):
    if name == "digits":
        net, steps = digits.network(), list(digits.batches())[:8]
        loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    else:
        net, steps = Tiny(), [(randn(4, 8, seed=i), None) for i in range(8)]
        net.initialize()

        def loss_of(output, _):
            return (output * 2.0**-30).sum()

    net.hybridize()
    wanted = histogram_of(net, steps[:2], loss_of, activations=True)
    if name == "tiny":
        assert wanted.largest < 2.0**-24
        assert wanted.share_vanishing(1) == 1
    scale = wanted.recommended_scale()
    scaler = amp.LossScaler(scale, max_scale=max(scale, 2.0**24))
    assert wanted.share_vanishing(scaler.loss_scale) <= 0.001
    assert scaler.loss_scale * wanted.largest * MARGIN <= 65504
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.001})
    amp.init_trainer(trainer, scaler)
    with amp.autocast("float16"):
        zeros = [h.zero / h.size for h in trained(net, trainer, steps, loss_of)]
    assert trainer.amp_skips <= 1
    plain = histogram_of(net, steps[:2], loss_of)
    assert max(zeros[:2]) <= plain.zero / plain.size + 0.05


def test_results_show_as_tables_and_as_json():
    net, data = made(perceptron)
    histogram = histogram_of(net, (*data, None), square, loss_scale=2.0**10)
    told = json.loads(histogram.to_json())
    assert told["scale"] == 1024 and told["dtype"] == "float16"
    assert len(told["exponents"]) == len(told["share"])
    assert sum(told["share"]) + told["zero"] == pytest.approx(1)
    assert told["recommended_scale"] == histogram.recommended_scale()
    assert "recommended scale" in str(histogram) and "dense" in str(histogram)
    assert "<table>" in histogram._repr_html_()
    assert "vanish" in repr(histogram)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda net, _, batch: histogram_of(3), "a Block or a gluon.Trainer"),
        (lambda net, _, batch: histogram_of(net, None, square), "both data and a loss"),
        (lambda net, _, batch: histogram_of(net, activations=True), "both data and a loss"),
        (lambda net, _, batch: histogram_of(net, batch), "both data and a loss"),
        (lambda net, _, batch: histogram_of(net, batch, 3), "both data and a loss"),
        (lambda net, _, batch: histogram_of(net, batch, lambda o, y: None), "return .* not None"),
        (lambda net, _, batch: histogram_of(net, batch, lambda o, y: 0.5), "return .* not 0.5"),
        (lambda net, _, batch: histogram_of(net, batch, lambda o, y: nd.ones(1)), "must return"),
        (lambda net, _, batch: histogram_of(net, (EMPTY, None), square), "holds no elements"),
        (lambda net, _, batch: histogram_of(net, batch, square, loss_scale=-1), "loss_scale"),
        (lambda _, trainer, batch: histogram_of(trainer, batch, square), "does not know its net"),
    ],
)
def test_arguments_that_make_no_sense(call, message):
    net, trainer = setup()
    with pytest.raises(amp.ArgumentError, match=message):
        call(net, trainer, (nd.ones((2, 4)), None))


def test_without_a_backward_pass_there_are_no_gradients():
    with pytest.raises(amp.StateError, match="there are no gradients"):
        histogram_of(setup()[0])


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    net, data = made(perceptron)
    histogram = histogram_of(net, (*data, None), square, loss_scale=256)
    figure = histogram.plot(tmp_path / "gradients.png")
    assert (tmp_path / "gradients.png").read_bytes()[1:4] == b"PNG"
    (axes,) = figure.axes
    assert "exponent" in axes.get_xlabel() and "share" in axes.get_ylabel()
    heights = [bar.get_height() for bar in axes.patches if hasattr(bar, "get_height")]
    assert sum(heights[: len(histogram.counts)]) == pytest.approx(1 - histogram.to_dict()["zero"])
    assert "<img" in histogram._repr_html_()
    check_picture_for_dark_mode(histogram, tmp_path)
    assert counted(np.zeros(3, "float32")).plot() is not figure


def test_half_precision_parameters():
    net, _ = setup()
    net.cast(BF16)
    x = nd.ones((2, 4)).astype(BF16)
    with autograd.record():
        loss = (net(x).astype("float32") ** 2).sum()
    loss.backward()
    assert histogram_of(net).size == sum(p.data().size for p in net.collect_params().values())


@pytest.mark.parametrize("given, scale", [(None, 1.0), (1.0, 1.0), (4.0, 4.0)])
def test_the_scale_in_use_is_1_by_default(given, scale):
    net, (data,) = made(perceptron)
    batch = [(data, nd.zeros(len(data)))]
    assert histogram_of(net, batch, square, loss_scale=given).scale == scale
