"""ONNX: MXNet's values in ONNX Runtime, for all that is exported, and errors for the rest."""

import sys
from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn, rnn

import mxamp as amp
import nets
from helpers import ROOT, initialized, randn, run_mxamp, stacked, with_avx512
from mxamp.backends.onednn import cpu
from mxamp.convert.outputs import output_error
from mxamp.framework import machine
from mxamp.tools import onnx_operators
from mxamp.tools.onnx import _VERSIONS, OpenVINO, float32_model

ZOO = gluon.model_zoo.vision
S = mx.sym


@pytest.fixture(scope="module")
def runtime():
    pytest.importorskip("onnx", reason="there is no onnx below 1.18 for Python 3.13")
    return pytest.importorskip("onnxruntime")


@pytest.fixture
def export(runtime, tmp_path):
    """Export a model; return the errors of its outputs, and a function that runs the file."""

    def export(model, *inputs, **options):
        path = tmp_path / "model.onnx"
        errors = amp.export_onnx(model, path, [*inputs] if inputs[1:] else inputs[0], **options)
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return errors, session

    return export


def worst(errors):
    assert all(error.lost == 0 for error in errors)
    return max(error.relative for error in errors)


# ---------------------------------------------------------------------- networks


def small():
    net = stacked(nn.Conv2D(8, 3), nn.BatchNorm(), nn.Activation("relu"), nn.GlobalAvgPool2D())
    net.add(nn.HybridLambda(lambda F, x: x * 0.3 + 1.5), nn.PReLU(in_channels=8), nn.Dense(5))
    return net


class SelfAttention(gluon.HybridBlock):
    """A layer of a transformer, without a mask."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.layer = nets.Attention(8, 2)

    def hybrid_forward(self, F, x):
        ones = F.ones_like(F.batch_dot(x, x, transpose_b=True)).slice_axis(0, 0, 1)
        out = self.layer(x, ones.reshape((-3, 0)))
        return out * 0.5 * (1 + F.erf(F.LeakyReLU(out, act_type="gelu")))


def recurrent():
    return stacked(rnn.LSTM(16, input_size=8), nn.Dense(5, flatten=False))


#: A net, its data, and data of other sizes.
NETS = {
    "small": (small, randn(2, 3, 12, 12), randn(1, 3, 9, 14)),
    "attention": (SelfAttention, randn(2, 7, 8), randn(3, 5, 8)),
    "lstm": (recurrent, randn(6, 2, 8), randn(6, 2, 8)),
    "resnet18": (ZOO.resnet18_v1, randn(2, 3, 32, 32), randn(1, 3, 64, 32)),
    "mobilenet_v2": (ZOO.mobilenet_v2_0_25, randn(2, 3, 32, 32), randn(1, 3, 64, 32)),
}
CONVERSIONS = {
    "float32": None,
    "float16": {"target_dtype": "float16", "cast_optional_params": True, "keep_io_types": False},
    "bfloat16": {"target_dtype": "bfloat16", "cast_optional_params": True},
    "fused": {"target_dtype": "bfloat16", "fuse": True},
    "fused float32": {"target_dtype": "float32", "fuse": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "conversion",
    [pytest.param(name, marks=[with_avx512] * (name == "fused")) for name in CONVERSIONS],
)
@pytest.mark.parametrize("name", NETS)
def test_networks_of_any_precision_compute_the_same_in_float32(name, conversion, export):
    mx.random.seed(1)
    make, data, other = NETS[name]
    net = initialized(make(), init=mx.init.MSRAPrelu("in", slope=0))
    original, *_ = float32_model(net, [data])
    options = CONVERSIONS[conversion]
    model = original if options is None else amp.convert_model(*original, **options)
    errors, session = export(model, {"data": data}, {"data": other})
    assert len(errors) == 2
    assert worst(errors) < 1e-5
    (given,), (written,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type) == ("data", "tensor(float)")
    outputs = (session.run(None, {"data": x.asnumpy()})[0] for x in (data, other))
    for one, arrays in ((given, (data, other)), (written, outputs)):
        wanted = [a if a == b else None for a, b in zip(*(array.shape for array in arrays))]
        assert [size if isinstance(size, int) else None for size in one.shape] == wanted


@pytest.mark.parametrize("name", ["small", "resnet18", "lstm", "attention"])
def test_openvino_serves_blocks(name, runtime):
    pytest.importorskip("openvino")
    make, data, other = NETS[name]
    net = initialized(make(), init=mx.init.Xavier())
    net(data)
    served = OpenVINO(net, [(data,), (other,)], "bfloat16")
    assert served.precision == ("bfloat16" if cpu.computes_bfloat16() else "float32") or (
        "avx512" in machine.cpu_features()  # where OpenVINO may emulate bfloat16
    )
    errors = [output_error(name, net(x).asnumpy(), served(x)[0].asnumpy()) for x in (data, other)]
    assert worst(errors) < (1e-5 if served.precision == "float32" else 0.05)


def cross_attention(F, queries, pairs, sizes):
    """Sockeye's attention of a decoder to an encoder, on sequences of `sizes`."""
    scores = F.contrib.interleaved_matmul_encdec_qk(queries, pairs, heads=2)
    sizes = F.broadcast_like(sizes.repeat(2).expand_dims(1), queries, lhs_axes=(-1,), rhs_axes=(0,))
    weights = F.softmax(scores, length=sizes.astype("int32"), use_length=True)
    return F.contrib.interleaved_matmul_encdec_valatt(pairs, weights, heads=2)


@pytest.mark.parametrize("function, calls", [
    (lambda F, x: F.slice_like(F.ones((1, 9, 9)), x, axes=(1, 2)), [(nd.ones((1, 3, 4)),)]),
    (cross_attention, [(randn(3, 2, 8), randn(5, 2, 16), nd.array([5, 2])),
                       (randn(1, 1, 8), randn(7, 1, 16), nd.array([4]))]),
])  # fmt: skip
def test_sizes_of_other_inputs_in_both_runtimes(function, calls, export):
    pytest.importorskip("openvino")
    net = nn.HybridLambda(function)
    assert worst(export(net, calls)[0]) < 1e-5
    for call in calls:
        found = OpenVINO(net, [call], "float32")(*call)[0].asnumpy()
        assert output_error("output", net(*call).asnumpy(), found).relative < 1e-5


def test_arguments_keep_their_names_where_one_is_not_used(export):
    net = nn.HybridLambda(lambda F, a, b, c: a - c)
    call = [nd.array([5, 6]), nd.ones(3), nd.array([1, 2])]
    _, (given,), names = float32_model(net, [call])
    assert {name: names.index(name) for name in given} == dict(zip(given, (0, 2)))
    assert worst(export(net, tuple(call))[0]) == 0


def test_without_openvino_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    net = initialized(nn.Dense(2, in_units=3))
    said = " does not run: openvino is not installed: pip install"
    assert said in str(amp.benchmark(net, randn(4, 3), budget=0.01))


# ---------------------------------------------------------------------- operators


@pytest.mark.parametrize("shape", [
    (0, -1), (-1,), (-2,), (0, -3, 0), (-3, -3), (0, -4, 2, -1, -2), (0, -4, -1, 3, 0, 0), (2, 6, -1, 1),
    (0, 0, 4, 5), (-4, 1, 2, -2), "(-1, 0, 0)", "(0, -3, 0)", "(-1, 0)", "(-1, 2, 0, 0)",
])  # fmt: skip
def test_codes_of_reshape_from_the_left_and_as_text_from_the_right(shape, export):
    symbol = S.reshape(S.var("data"), shape=shape, reverse=isinstance(shape, str))
    assert worst(export((symbol, {}, {}), {"data": randn(2, 6, 4, 5)})[0]) == 0


@pytest.mark.parametrize("make, shape", [
    (lambda x: S.SoftmaxOutput(x, S.var("label"), name="out"), (4, 3)),
    (lambda x: S.SoftmaxOutput(x, S.var("label"), name="out"), (4, 3, 5)),
    (lambda x: S.SoftmaxOutput(x, S.var("label"), multi_output=True), (4, 3, 5, 2)),
    (lambda x: S.SoftmaxOutput(x, S.var("label"), preserve_shape=True), (4, 3, 5)),
    *((partial(make, label=S.var("label")), (4, 3)) for make in (
        S.LinearRegressionOutput, S.MAERegressionOutput, S.LogisticRegressionOutput, S.SVMOutput)),
    (S.MakeLoss, (4, 3)), (S.make_loss, (4, 3)), (S.BlockGrad, (4, 3)),
    (lambda x: S.SoftmaxActivation(x), (4, 3, 2)),
    (lambda x: S.SoftmaxActivation(x, mode="channel"), (4, 3, 5, 2)),
    *((partial(S.L2Normalization, mode=mode), (4, 3, 5)) for mode in ("instance", "channel", "spatial")),
    (lambda x: S.split_v2(x, (1, 3), axis=-1), (2, 5)), (partial(S.contrib.arange_like, axis=-1), (2, 5)),
    (partial(S.LRN, nsize=3), (2, 4, 5, 5)), (partial(S.Pooling, global_pool=1), (2, 3, 4, 5)),
])  # fmt: skip
def test_softmaxes_norms_flags_and_loss_layers_without_labels(make, shape, export):
    errors, session = export((make(S.var("data")), {}, {}), {"data": randn(*shape)})
    assert worst(errors) < 1e-6
    assert [given.name for given in session.get_inputs()] == ["data"]


@pytest.mark.parametrize("options", [
    {}, {"id_index": 0}, {"id_index": 0, "force_suppress": True}, {"id_index": 0, "background_id": 1},
    {"topk": 7}, {"id_index": 0, "topk": 7, "valid_thresh": 0.3}, {"valid_thresh": 2.0}, {"topk": 100},
])  # fmt: skip
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_box_nms(options, scale, export):
    random = np.random.RandomState(0)
    boxes = []
    for count in (2, 3):
        corners, sides = random.rand(count, 30, 2) * 0.6, random.rand(count, 30, 2) * 0.4
        ids = random.randint(-1, 3, (count, 30, 1))
        scores = random.permutation(count * 30).reshape(count, 30, 1) / (count * 30)
        rows = [ids, scores, corners * scale, (corners + sides) * scale]
        boxes.append({"data": nd.array(np.concatenate(rows, axis=2))})
    nms = S.contrib.box_nms(S.var("data"), overlap_thresh=0.3, **options)
    assert worst(export((nms[0], {}, {}), *boxes)[0]) < 1e-6


def test_several_outputs_keep_their_order_and_names(export):
    a = S.FullyConnected(S.var("data"), num_hidden=3, name="z")
    symbol = S.Group([S.relu(a, name="y"), a, S.sum(a, axis=1, name="b"), S.var("data"), a])
    args = {"z_weight": nd.array(np.eye(3)), "z_bias": nd.zeros(3)}
    errors, session = export((symbol, args, {}), {"data": nd.array([[-1, 2, 3]])})
    assert [error.name for error in errors] == symbol.list_outputs()
    assert worst(errors) < 1e-6 and len(session.get_outputs()) == 5


def test_integers_and_half_precision_are_inputs(export):
    index, mask = S.var("index"), S.var("mask")
    symbol = S.broadcast_mul(S.Embedding(index, input_dim=10, output_dim=4, name="e"), mask)
    inputs = {"mask": randn(1, 2, 4).astype("float16"), "index": nd.array([[1, 9]], dtype="int32")}
    errors, session = export((symbol, {"e_weight": randn(10, 4)}, {}), inputs)
    assert worst(errors) < 1e-6
    found = [(given.name, given.type) for given in session.get_inputs()]
    assert found == [("index", "tensor(int32)"), ("mask", "tensor(float)")]


# ---------------------------------------------------------------------- errors


RELU = S.relu(S.var("data")), {}, {}


@pytest.mark.parametrize("name", ["onnx", "onnxruntime"])
def test_without_its_packages_it_says_what_to_install(name, monkeypatch, tmp_path):
    pytest.importorskip("onnx")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(amp.InstallError, match=f"{name} is not installed: pip install"):
        amp.export_onnx(RELU, tmp_path / "x.onnx", {"data": nd.ones(2)})
    assert not list(tmp_path.iterdir())


def test_the_versions_to_install_are_those_of_the_extra():
    extra = (ROOT / "setup.cfg").read_text().partition("\nopenvino =\n")[2].partition("\npaper")[0]
    assert extra.split() == [f"{name}{version}" for name, version in _VERSIONS.items()]


@pytest.mark.parametrize("inputs, words", [
    ({}, "inputs without a value: data"), ([], "must be arrays"), ([1], "must be arrays"),
    ({"dta": nd.ones(2)}, "the closest is 'data'"), ({"data": nd.array([np.nan])}, "give finite values"),
    ([{"data": nd.ones(2)}, {}], "inputs without a value: data"),
])  # fmt: skip
def test_bad_inputs_are_one_clear_sentence(inputs, words, runtime, tmp_path):
    with pytest.raises(amp.ArgumentError, match=words):
        amp.export_onnx(RELU, tmp_path / "m.onnx", inputs)


CONVOLUTION = S.Convolution(S.var("data"), kernel=(3, 3), num_filter=2, no_bias=True, name="conv")


@pytest.mark.parametrize("shape, dtype", [
    ((3, 8, 8), "float32"), ((1, 1, 3, 8, 8), "float32"), ((1, 4, 8, 8), "float32"), ((1, 3, 8, 8), "int64"),
])  # fmt: skip
@pytest.mark.parametrize("first", [True, False])
def test_inputs_that_do_not_fit_are_named(shape, dtype, first, runtime, tmp_path):
    calls = [{"data": nd.ones(shape, dtype=dtype)}, {"data": nd.ones((1, 3, 8, 8))}]
    with pytest.raises(amp.ArgumentError) as found:
        model = CONVOLUTION, {"conv_weight": nd.ones((2, 3, 3, 3))}, {}
        amp.export_onnx(model, tmp_path / "m.onnx", calls if first else calls[::-1])
    assert "'data'" in str(found.value) and str(shape) in str(found.value)
    assert not list(tmp_path.iterdir())


def test_all_operators_that_cannot_be_exported_are_named(runtime, tmp_path):
    x = S.contrib.fft(S.sum(S.var("data"), axis=0, exclude=True, keepdims=True))
    x = S.contrib.fft(S.contrib.AdaptiveAvgPooling2D(x, output_size=3))
    x = S.reshape(x, shape=(-2, -1, 1, -4), reverse=True)
    ones = {"data": nd.ones((2, 4, 5, 6)), "g": nd.ones(6), "b": nd.ones(6)}
    given = S.var("data"), S.var("g"), S.var("b")
    resized = S.contrib.BilinearResize2D(given[0], height=2, width=2, align_corners=False)
    boxes = S.contrib.box_nms(given[0], in_format="center")[0]
    x = S.Group([x, boxes, resized, S.LayerNorm(*given, output_mean_var=True)[1] + 1])
    with pytest.raises(amp.ArgumentError) as found:
        amp.export_onnx((x, {}, {}), tmp_path / "m.onnx", ones)
    text = str(found.value)
    assert text.count("_contrib_fft (") == 1
    reasons = "AdaptiveAvgPooling2D (", "Reshape (shape=", "box_nms (", "2D (align_corners=False)"
    for name in ("sum (exclude)", "LayerNorm (its output 1, counted from 0)", *reasons):
        assert name in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "make", [rnn.LSTM, rnn.GRU, rnn.RNN, lambda *a, **o: rnn.RNN(*a, "tanh", **o)]
)
@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
def test_recurrent_layers(make, layers, sides, export):
    net = make(6, layers, bidirectional=sides > 1, input_size=5)
    initialized(net, init=mx.init.Normal(0.5))
    sequences = randn(7, 2, 5), randn(4, 3, 5)
    calls = [(x, [state + 0.5 for state in net.begin_state(x.shape[1])]) for x in sequences]
    assert worst(export(net, calls)[0]) < 1e-5
    assert worst(export(net, randn(7, 2, 5))[0]) < 1e-5  # states of zeros


def test_a_block_is_exported_by_the_arguments_of_calls(export, runtime, tmp_path):
    net = initialized(small())
    one, other = randn(2, 3, 12, 12), randn(1, 3, 9, 14)
    assert worst(export(net, [one, (other,)])[0]) < 1e-5
    with pytest.raises(amp.ArgumentError, match=r"block '.*' \(x\) does not run"):
        export(net, [one, (one, one)])
    net.hybridize()
    net(one)
    assert worst(export(net, {"data": one})[0]) < 1e-5
    with pytest.raises(amp.ArgumentError, match="the closest is 'data'"):
        export(net, {"dta": one})
    assert worst(export(amp.convert_hybrid_block(net, "float16"), one)[0]) < 1e-5
    projected = initialized(rnn.LSTM(6, input_size=5, projection_size=3))
    with pytest.raises(amp.ArgumentError, match="RNN .projection_size: unroll cells"):
        export(projected, randn(7, 2, 5))
    for sizes in ((2, 3, 12, 12), [2, 3, 12, 12], [(2, 3)], {"data": (2, 3, 12, 12)}, None, []):
        with pytest.raises(amp.ArgumentError, match=r"mx\.nd\.zeros\(sizes\)"):
            amp.export_onnx(net, tmp_path / "n.onnx", sizes)


def test_wrong_values_are_not_written(export, tmp_path, monkeypatch):
    monkeypatch.setitem(onnx_operators._CORRECTIONS, "relu", lambda c: c("Abs", *c.names))
    data = nd.array([-1, 2])
    with pytest.raises(amp.CheckError, match="relative error of 0.5") as failed:
        export(RELU, {"data": data})
    assert [error.relative for error in failed.value.errors] == [0.5]
    assert not list(tmp_path.iterdir())
    errors, session = export(RELU, {"data": data}, check=False)
    assert errors == ()
    assert (session.run(None, {"data": data.asnumpy()})[0] == [1, 2]).all()


# ---------------------------------------------------------------------- the command


def run(text, status=0):
    return run_mxamp("export-onnx", *text.split(), status=status).output


def test_the_command(runtime, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    symbol = S.FullyConnected(S.var("data"), num_hidden=3, name="fc", flatten=False)
    args = {"fc_weight": randn(3, 4), "fc_bias": randn(3)}
    mx.model.save_checkpoint("m", 0, *amp.convert_model(symbol, args, {}, "bfloat16"))
    said = run("m --input data:2,4 --also data:3,4 --out m.onnx")
    assert said.count("fc") == 2
    assert "relative error" in said and said.endswith("Wrote m.onnx\n")
    (given,) = runtime.InferenceSession("m.onnx").get_inputs()
    assert isinstance(given.shape[0], str) or given.shape[0] is None
    assert given.shape[1] == 4
    assert "overwrite it with --force" in run("m --input data:2,4 --out m.onnx", 2)
    assert "relative error" not in run("m --input data:2,4 --no-check --out n.onnx")
    np.save("m.npy", args["fc_weight"].asnumpy())
    for out in ("m-symbol.json", "./m.npy"):
        assert " this command reads" in run(f"m --input data:m.npy --out {out} --force", 2)
