"""ONNX: what MXNet's exporter is given, and the same values in ONNX Runtime."""

import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn, rnn

import mxamp as amp
from mxamp.graph.inspect import tensors_of
from mxamp.graph.ir import Graph
from mxamp.tools.onnx import exportable


def model_of(net, data):
    """A net as symbol and parameters."""
    # Outputs of a size that float16 holds, in deep nets too.
    net.initialize(mx.init.MSRAPrelu("in", slope=0))
    net.hybridize()
    net(data)
    symbol = net(mx.sym.var("data"))
    params = {p.name: p.data() for p in net.collect_params().values()}
    auxs = symbol.list_auxiliary_states()
    return (
        symbol,
        {name: params[name] for name in symbol.list_arguments() if name in params},
        {name: params[name] for name in auxs},
    )


def small():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3), nn.BatchNorm(), nn.Activation("relu"), nn.GlobalAvgPool2D())
    net.add(nn.HybridLambda(lambda F, x: x * 0.3 + 1.5), nn.Dense(5))
    return net


def images(side=12):
    return nd.array(np.random.RandomState(0).randn(2, 3, side, side))


def float16(model, device="cpu", **options):
    policy = amp.Policy.default("float16", device=device)
    return amp.convert_model(*model, policy=policy, **options)


# ---------------------------------------------------------------------- the graph, without onnx


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_graph_has_casts_that_the_exporter_knows(device):
    data = images()
    symbol, args, auxs = float16(model_of(small(), data), device)
    shapes = {"data": data.shape, **{n: a.shape for n, a in {**args, **auxs}.items()}}
    dtypes = {name: "float32" for name in shapes}
    graph = Graph.from_symbol(symbol)
    ready = exportable(graph, tensors_of(graph, dtypes, shapes), symbol.list_outputs())
    assert "amp_cast" in graph.operators
    assert "amp_cast" not in ready.operators
    assert [ready.nodes[i].name for i, _ in ready.heads] == symbol.list_outputs()
    tensors = tensors_of(ready, dtypes, shapes)
    norm = next(node for node in ready.nodes if node.op == "BatchNorm")
    assert {tensors[entry].dtype for entry in norm.inputs} == {"float32"}
    assert any(tensor.dtype == "float16" for tensor in tensors.values())


def test_it_computes_what_the_converted_model_computes():
    data = images()
    symbol, args, auxs = low = float16(model_of(small(), data))
    dtypes = {"data": "float32", **{n: a.dtype.__name__ for n, a in {**args, **auxs}.items()}}
    shapes = {"data": data.shape, **{n: a.shape for n, a in {**args, **auxs}.items()}}
    graph = Graph.from_symbol(symbol)
    ready = exportable(graph, tensors_of(graph, dtypes, shapes), symbol.list_outputs())
    (error,) = amp.compare_models(low, (ready.to_symbol(), args, auxs), {"data": data})
    assert error.relative < 1e-3


# ---------------------------------------------------------------------- bad input


def test_without_onnx_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(amp.InstallError, match="pip install"):
        amp.export_onnx((mx.sym.var("data"), {}, {}), tmp_path / "x.onnx", {"data": nd.ones(2)})
    assert not list(tmp_path.iterdir())


def test_without_its_runtime_it_says_what_to_install(monkeypatch, tmp_path):
    pytest.importorskip("onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(amp.InstallError, match="check=False"):
        amp.export_onnx((mx.sym.var("data"), {}, {}), tmp_path / "x.onnx", {"data": nd.ones(2)})


# ---------------------------------------------------------------------- in ONNX Runtime


class Attention(gluon.HybridBlock):
    """A layer of BERT, of which the heads are split as MXNet's exporter knows it."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self._heads, self._width = heads, width
        with self.name_scope():
            self.query, self.key, self.value, self.out = [
                nn.Dense(width, flatten=False, in_units=width) for _ in range(4)
            ]
            self.norm = nn.LayerNorm(in_channels=width)
            self.wide = nn.Dense(4 * width, flatten=False, in_units=width)
            self.narrow = nn.Dense(width, flatten=False, in_units=4 * width)

    def hybrid_forward(self, F, x):
        query, key, value = (
            layer(x).reshape((0, 0, self._heads, -1)).transpose((0, 2, 1, 3)).reshape((-1, 0, 0), reverse=True)
            for layer in (self.query, self.key, self.value)
        )  # fmt: skip
        scores = F.batch_dot(query, key, transpose_b=True) * (self._width / self._heads) ** -0.5
        read = F.batch_dot(F.softmax(scores), value)
        read = read.reshape((-1, self._heads, 0, 0), reverse=True).transpose((0, 2, 1, 3))
        x = self.norm(x + self.out(read.reshape((0, 0, -1))))
        return x + self.narrow(F.LeakyReLU(self.wide(x), act_type="gelu"))


def bert():
    net = nn.HybridSequential()
    net.add(nn.Embedding(50, 32), Attention(), Attention(), nn.Dense(5, in_units=32, flatten=False))
    return net


class Recurrent(gluon.HybridBlock):
    """An LSTM over time, and a dense layer."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.lstm = rnn.LSTM(16, input_size=8)
            self.out = nn.Dense(5, flatten=False, in_units=16)

    def hybrid_forward(self, F, x):
        return self.out(self.lstm(x))


ZOO = gluon.model_zoo.vision
NETS = {
    "small": (small, images),
    "bert": (bert, lambda: nd.array(np.random.RandomState(0).randint(0, 50, (2, 7)))),
    "lstm": (Recurrent, lambda: nd.array(np.random.RandomState(0).randn(6, 2, 8))),
    "resnet18": (ZOO.resnet18_v1, lambda: images(32)),
    "mobilenet_v2": (ZOO.mobilenet_v2_0_25, lambda: images(32)),
}
LARGE = ("resnet18", "mobilenet_v2")


@pytest.fixture
def runtime():
    pytest.importorskip("onnx", reason="needs mxamp[onnx]")
    return pytest.importorskip("onnxruntime", reason="needs mxamp[onnx]")


@pytest.mark.slow
@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_converted_models_compute_the_same_in_onnx_runtime(name, offline, runtime, tmp_path):
    mx.random.seed(1)
    make, given = NETS[name]
    data, path = given(), tmp_path / "model.onnx"
    original = model_of(make(), data)
    low = float16(original, cast_optional_params=offline)
    (error,) = amp.export_onnx(low, path, {"data": data})
    assert error.lost == 0
    assert error.relative < 6e-3
    (rounding,) = amp.compare_models(original, low, {"data": data})
    assert 0 < rounding.relative < 0.02
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {"data": data.asnumpy()})
    assert [given.name for given in session.get_inputs()] == ["data"]
    assert session.get_outputs()[0].name == low[0].list_outputs()[0]
    assert output.dtype == np.float32
    assert output.shape == error.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NETS if name not in LARGE])
def test_models_for_gpus_compute_the_same_but_for_rounding(name, runtime, tmp_path):
    """They can't run in MXNet on a CPU, so ONNX Runtime's values are those to compare."""
    mx.random.seed(1)
    make, given = NETS[name]
    data = given()
    original = model_of(make(), data)
    outputs = []
    for device in ("cpu", "gpu"):
        path = tmp_path / f"{device}.onnx"
        amp.export_onnx(float16(original, device), path, {"data": data}, check=device == "cpu")
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {"data": data.asnumpy()})[0])
    cpu, gpu = outputs
    assert np.linalg.norm(gpu - cpu) < 5e-3 * np.linalg.norm(cpu)


def test_float32_models_and_several_outputs_keep_their_order(runtime, tmp_path):
    a = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="z")
    symbol = mx.sym.Group([mx.sym.relu(a, name="y"), a, mx.sym.sum(a, axis=1, name="b")])
    args = {"z_weight": nd.array(np.eye(3)), "z_bias": nd.zeros(3)}
    data = nd.array([[-1, 2, 3]])
    errors = amp.export_onnx((symbol, args, {}), tmp_path / "m.onnx", {"data": data})
    assert [error.name for error in errors] == symbol.list_outputs()
    assert max(error.relative for error in errors) < 1e-6
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"))
    y, z, total = session.run(None, {"data": data.asnumpy()})
    assert (y == [[0, 2, 3]]).all()
    assert (z == [[-1, 2, 3]]).all()
    assert total == 4


def test_gamma_that_is_not_read_is_written_as_ones(runtime, tmp_path):
    data = mx.sym.var("data")
    symbol = mx.sym.BatchNorm(data, fix_gamma=True, name="norm")
    args = {"norm_gamma": nd.full((3,), 7), "norm_beta": nd.zeros(3)}
    auxs = {"norm_moving_mean": nd.zeros(3), "norm_moving_var": nd.ones(3)}
    (error,) = amp.export_onnx((symbol, args, auxs), tmp_path / "m.onnx", {"data": images()})
    assert error.relative < 1e-5
    assert args["norm_gamma"].asnumpy()[0] == 7


def test_bfloat16_is_refused(runtime, tmp_path):
    low = amp.convert_model(
        *model_of(small(), images()), target_dtype="bfloat16", cast_optional_params=True
    )
    with pytest.raises(amp.ArgumentError, match="convert the model to float16"):
        amp.export_onnx(low, tmp_path / "m.onnx", {"data": images()})


@pytest.mark.parametrize(
    "inputs, words",
    [
        ({}, "inputs without a value: data"),
        ([1], "must map the names"),
        ({"dta": nd.ones(2)}, "the closest is 'data'"),
    ],
)
def test_bad_inputs_are_one_clear_sentence(inputs, words, runtime, tmp_path):
    symbol = mx.sym.relu(mx.sym.var("data"))
    with pytest.raises(amp.ArgumentError, match=words):
        amp.export_onnx((symbol, {}, {}), tmp_path / "m.onnx", inputs)


def test_what_the_exporter_lacks_is_named(runtime, tmp_path):
    symbol = mx.sym.contrib.fft(mx.sym.var("data"))
    with pytest.raises(amp.ArgumentError, match="exporter can't write"):
        amp.export_onnx((symbol, {}, {}), tmp_path / "m.onnx", {"data": nd.ones((2, 4))})
    assert not list(tmp_path.iterdir())


def test_wrong_values_are_not_written(runtime, tmp_path, monkeypatch):
    """Say an operator that MXNet's exporter writes wrongly."""
    from mxamp.tools import onnx as to_onnx

    monkeypatch.setattr(to_onnx, "_run", lambda *_: [np.zeros((2, 2), np.float32)])
    symbol = mx.sym.relu(mx.sym.var("data"))
    with pytest.raises(amp.StateError, match="check=False"):
        amp.export_onnx((symbol, {}, {}), tmp_path / "m.onnx", {"data": nd.ones((2, 2))})
    assert not list(tmp_path.iterdir())
