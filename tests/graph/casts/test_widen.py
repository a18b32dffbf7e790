"""Models in half precision, cast by hand: a float32 model out of them, and any other from there."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd

import mxamp as amp
import nets
from helpers import initialized, randn, same, with_avx512
from mxamp.graph.ir import Graph

S = mx.sym
NETS = [
    nets.convolutional, nets.separable, nets.attention, nets.perceptron, nets.embedded,
    nets.decoder, nets.unrolled, nets.masked,
]  # fmt: skip


def operators(symbol):
    """The operators of a graph, without inserted casts and copies."""
    inserted = ("amp_cast", "_copy", "null")
    return [(n.op, n.name) for n in Graph.from_symbol(symbol).nodes if n.op not in inserted]


def casts(symbol):
    return [node for node in Graph.from_symbol(symbol).nodes if node.op == "Cast"]


def half_dtypes(symbol, *params):
    text = symbol.tojson(remove_amp_cast=False)
    found = {dtype for dtype in ("float16", "bfloat16") if dtype in text}
    asked = {node.attrs.get("__dtype__") for node in Graph.from_symbol(symbol).variables}
    found |= asked & {"2", "12"}
    return found | {str(a.dtype) for held in params for a in held.values() if a.dtype.itemsize == 2}


def pair(make):
    """A net in float32 and its copy that was cast to float16, both with parameters of float16."""
    net, inputs = nets.made(make)
    net.hybridize()
    for param in net.collect_params().values():
        param.set_data(param.data().astype("float16").astype("float32"))
    expected = net(*inputs)
    model = as_model(net)
    net.cast("float16")
    return model, net, inputs, expected


def as_model(net):
    symbol = net._cached_graph[1]
    values = {param.name: param.data() for param in net.collect_params().values()}
    auxs = {name: values.pop(name) for name in symbol.list_auxiliary_states()}
    return symbol, {n: v for n, v in values.items() if n in symbol.list_arguments()}, auxs


def cast_inputs(inputs):
    return [x.astype("float16") if x.dtype == np.float32 else x for x in inputs]


@pytest.mark.parametrize("make", NETS, ids=lambda make: make.__name__)
def test_blocks_that_were_cast(make):
    model, net, inputs, expected = pair(make)
    wide = amp.convert_hybrid_block(net, "float32", example_inputs=cast_inputs(inputs))
    outputs, reference = wide(*inputs), expected
    if not isinstance(reference, (list, tuple)):
        outputs, reference = [outputs], [reference]
    for output, wanted in zip(outputs, reference):
        assert output.dtype == np.float32
        assert output.asnumpy() == pytest.approx(wanted.asnumpy(), rel=1e-4, abs=1e-5)
    assert not half_dtypes(wide._cached_graph[1], as_model(wide)[1], as_model(wide)[2])
    assert operators(wide._cached_graph[1]) == operators(model[0])


@with_avx512
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("make", NETS[:4], ids=lambda make: make.__name__)
def test_from_there_to_any_precision(make, fuse):
    model, net, inputs, expected = pair(make)
    example = cast_inputs(inputs)
    direct = amp.convert_model(*model, target_dtype="bfloat16", fuse=fuse)
    fast = amp.convert_hybrid_block(net, "bfloat16", fuse=fuse, example_inputs=example)
    assert operators(fast._cached_graph[1]) == operators(direct[0])
    output = fast(*example)
    assert output.dtype == np.float16
    error = np.linalg.norm(output.astype("float32").asnumpy() - expected.asnumpy())
    assert error < 0.05 * np.linalg.norm(expected.asnumpy())


def by_hand(low="float16"):
    """A symbol as MXNet's examples write it: cast at the start and before the loss."""
    data = S.Cast(S.var("data"), dtype=low, name="down")
    net = S.FullyConnected(data, num_hidden=8, name="a")
    net = S.LeakyReLU(net, S.var("slope"), act_type="prelu", name="p")
    net = S.L2Normalization(S.FullyConnected(net, num_hidden=4, name="b"), name="n")
    net = S.broadcast_mul(net, S.ones((1, 1), dtype=low))
    return S.softmax(S.Cast(net, dtype="float32", name="up"), name="s")


def params_of(symbol, dtype, **shapes):
    found, _, _ = symbol.infer_shape(**shapes)
    return {
        name: randn(*shape, seed=i, scale=0.3).astype(dtype)
        for i, (name, shape) in enumerate(zip(symbol.list_arguments(), found))
        if name not in shapes
    }


def test_symbols_with_casts():
    symbol = by_hand()
    half = params_of(symbol, "float16", data=(2, 6))
    params = {name: value.astype("float32") for name, value in half.items()}
    wide, args, _ = amp.convert_model(symbol, half, {}, "float32")
    assert not half_dtypes(wide, args)
    assert "Cast" not in dict(operators(wide))
    assert args.keys() == params.keys() and all(same(args[name], params[name]) for name in args)
    plain = by_hand("float32")
    (error,) = amp.compare_models((plain, params, {}), (wide, args, {}), {"data": randn(2, 6)})
    assert error.relative < 1e-6


def test_casts_from_and_to_integers_and_float64_stay():
    data = S.var("data")
    half = S.Cast(data, dtype="float16")
    net = S.Group([
        S.Cast(S.Cast(half * 3, dtype="int32"), dtype="float16") * 2,
        S.Cast(S.sqrt(half), dtype="float64"),
        S.Cast(S.Cast(half, dtype="bool"), dtype="float32"),
    ])  # fmt: skip
    wide = amp.convert_symbol(net, "float32")
    dtypes = [node.attrs["dtype"] for node in casts(wide)]
    assert dtypes == ["int32", "float32", "float64", "bool", "float32"]
    outputs = wide.bind(mx.cpu(), {"data": nd.array([0.0, 1.5])}).forward()
    assert [one.asnumpy().tolist() for one in outputs[::2]] == [[0, 8], [0, 1]]
    assert outputs[1].dtype == np.float64


@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_casts_that_round_on_purpose_stay(target):
    data = S.var("data")
    rounded = S.Cast(S.Cast(data, dtype="float16", name="q"), dtype="float32", name="dq")
    net = S.FullyConnected(rounded, num_hidden=2, no_bias=True, name="fc")
    converted = amp.convert_symbol(net, target)
    assert [node.name for node in casts(converted)] == ["q", "dq"]
    assert amp.explain(net, "bfloat16")["q"].precision == "as is"
    # Not where an operator computes in between.
    net = S.Cast(S.sqrt(S.Cast(data, dtype="float16", name="q")), dtype="float32", name="dq")
    assert not casts(amp.convert_symbol(net, target))


def test_inputs_and_outputs_keep_half_precision_on_demand():
    net = S.relu(S.FullyConnected(S.var("data"), S.var("w"), no_bias=True, num_hidden=2, name="fc"))
    half = {"w": randn(2, 3).astype("float16")}
    kept, args, _ = amp.convert_model(net, half, {}, "float32", keep_io_types=True)
    assert kept.infer_type(data="float16")[1] == [np.float16]
    wide, args, _ = amp.convert_model(net, half, {}, "float32")
    assert wide.infer_type(data="float32")[1] == [np.float32]
    assert args["w"].dtype == np.float32
    assert half["w"].dtype == np.float16


def test_unread_parameters_and_embeddings_become_float32():
    net = S.Embedding(S.var("data"), input_dim=9, output_dim=5, dtype="float16", name="e")
    half = {"e_weight": randn(9, 5).astype("float16"), "more": randn(2).astype("float16")}
    wide, args, _ = amp.convert_model(net, half, {}, "float32")
    assert "float16" not in wide.tojson()
    assert {value.dtype for value in args.values()} == {np.float32}


@pytest.mark.backend
def test_a_fused_model_does_not_become_float16():
    model, *_ = pair(nets.convolutional)
    fused = amp.convert_model(*model, target_dtype="float32", fuse=True)
    with pytest.raises(amp.ArgumentError, match="fused model can't become float16"):
        amp.convert_model(*fused, target_dtype="float16")


@with_avx512
def test_a_fused_model_keeps_its_precision_or_becomes_float32():
    model, _, inputs, expected = pair(nets.convolutional)
    fused = amp.convert_model(*model, target_dtype="bfloat16", fuse=True)
    again = amp.convert_model(*fused, target_dtype="bfloat16")
    assert operators(again[0]) == operators(fused[0])
    assert "bfloat16" in again[0].tojson()
    wide, args, auxs = amp.convert_model(*fused, target_dtype="float32")
    assert not half_dtypes(wide, args, auxs)
    (error,) = amp.compare_models(model, (wide, args, auxs), {"data": inputs[0]})
    assert error.relative < 0.02


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"enabled": False}])
def test_regions_lower_nothing_in_float32_models(options):
    class Net(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.dense = gluon.nn.Dense(4, in_units=3)

        def hybrid_forward(self, F, x):
            with amp.autocast(**options):
                return F.Cast(self.dense(F.relu(x)), dtype="float32")

    net, data = initialized(Net(), init=mx.init.Normal(1)), randn(2, 3)
    net.dense.weight.set_data(net.dense.weight.data().astype("float16").astype("float32"))
    expected = net.dense(nd.relu(data)).asnumpy()
    net.cast("float16")
    wide = amp.convert_hybrid_block(net, "float32", example_inputs=data.astype("float16"))
    assert not half_dtypes(wide._cached_graph[1])
    assert Graph.from_symbol(wide._cached_graph[1]).marks <= {"off"}
    np.testing.assert_allclose(wide(data).asnumpy(), expected, rtol=1e-5, atol=1e-6)
