"""Converted symbols, models and bucketing modules, and what their functions refuse."""

from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

import mxamp as amp
from helpers import check_python, initialized, kind, randn, same, untuned
from models import GPU, model
from nets import convolutional, decoder, perceptron

pytestmark = pytest.mark.usefixtures("unfused")


def evaluate(symbol, args, auxs, names, data):
    inputs = dict(zip(names, data))
    return symbol.bind(mx.cpu(), {**args, **inputs}, aux_states=auxs).forward()[0]


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("make", [convolutional, perceptron, decoder])
def test_a_converted_model_computes_what_autocast_does(dtype, make, offline):
    net, data, triple, plain, names = model(make)
    converted = amp.convert_model(*triple, policy=untuned(dtype), cast_optional_params=offline)
    # A model may be trained after it was converted: transposed convolutions whose weight is cast
    # are then computed as they are where gradients are recorded.
    recording = autograd.pause() if offline else autograd.record(train_mode=False)
    with amp.autocast(policy=untuned(dtype)), recording:
        expected = net(*data)
    out = evaluate(*converted, names, data)
    assert kind(out) == "float32"
    assert same(out, expected)
    assert not same(out, plain)


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("value, words", [
    (float("nan"), "parameter 'fc_weight' of the model holds 2 values of NaN or infinity, among 2000"),
    (65519.0, None),
    (65520.0, "in float16, values of fc_weight become infinity or too inexact: name 'fc' in"),
    (1e-9, None),
])  # fmt: skip
def test_values_that_are_not_finite_are_named(value, words, offline, caplog):
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, no_bias=True, name="fc")
    weight = np.ones((4, 500), "float32")
    weight[:2, 0] = value
    params = {"fc_weight": nd.array(weight)}
    amp.convert_model(net, params, {}, policy=GPU, cast_optional_params=offline)
    assert len(caplog.records) == bool(words)
    assert (words or "") in caplog.text
    caplog.clear()
    kept = amp.convert_model(net, params, {}, policy=GPU, excluded_sym_names=["fc"])
    assert ("fc_weight" in caplog.text) == bool(np.isnan(value))
    assert kind(kept[1]["fc_weight"]) == "float32"


@pytest.mark.parametrize("scale, lossy", [(1e-9, 1), (1e-7, 1), (1e-3, 0), (1e6, 1)])
def test_one_line_names_the_parameters_that_lose_values(scale, lossy, caplog):
    """Values that become 0 beside larger ones lose nothing."""
    net, params = mx.sym.var("data"), {}
    for name in "abc":
        net = mx.sym.FullyConnected(net, num_hidden=4, no_bias=True, name=name)
        weight = np.random.RandomState(0).randn(4, 4) * (scale if name != "b" else 1)
        weight[0] = 1e-9
        params[f"{name}_weight"] = nd.array(weight)
    amp.convert_model(net, params, {}, policy=GPU, cast_optional_params=True)
    assert len(caplog.records) == lossy
    if lossy:
        assert "values of a_weight, c_weight become" in caplog.text
        assert "name 'a', 'c' in" in caplog.text


@pytest.mark.backend
def test_a_float32_model_converted_to_float32_is_said_to_stay_as_it_is(caplog):
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, no_bias=True, name="fc")
    params = {"fc_weight": randn(4, 4)}
    amp.convert_model(net, params, {}, target_dtype="float32")
    assert caplog.text.count("is in float32 already, and stays as it is: `fuse=True`") == 1
    caplog.clear()
    low = amp.convert_model(net, params, {}, policy=GPU)
    amp.convert_model(*low, target_dtype="float32")
    amp.convert_model(net, params, {}, target_dtype="float32", fuse=True)
    assert "float32 already" not in caplog.text


@pytest.mark.parametrize("shape", [(2, 5), (5,), (1, 1, 5)])
def test_example_inputs_that_do_not_fit(shape):
    net = initialized(mx.gluon.nn.Dense(4, in_units=3))
    with pytest.raises(amp.ArgumentError) as found:
        amp.convert_hybrid_block(net, policy=GPU, example_inputs=nd.ones(shape))
    assert f"{{'data': {shape}}} do not fit the model" in str(found.value)


def test_a_parameter_that_is_an_output_too_keeps_its_dtype():
    layer = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, no_bias=True, name="fc")
    both = mx.sym.Group([layer, layer.get_internals()["fc_weight"]])
    for net, stored in ((layer, "float16"), (both, "float32")):
        params = {"fc_weight": randn(4, 4)}
        _, held, _ = amp.convert_model(net, params, {}, policy=GPU, cast_optional_params=True)
        assert kind(held["fc_weight"]) == stored


@pytest.mark.slow
def test_saved_models_run_in_plain_mxnet(tmp_path):
    _, data, triple, _, names = model()
    nd.save(str(tmp_path / "data"), data)
    for dtype in ("float16", "bfloat16"):
        for offline in (False, True):
            options = {"policy": untuned(dtype), "cast_optional_params": offline}
            converted = amp.convert_model(*triple, **options)
            prefix = f"{tmp_path}/{dtype}-{offline}"
            mx.model.save_checkpoint(prefix, 0, *converted)
            assert "amp_cast" in Path(f"{prefix}-symbol.json").read_text()
            np.save(f"{prefix}.npy", evaluate(*converted, names, data).asnumpy())
    plain = np.__version__ < "1.24"
    check_python(
        f"""
        import sys
        if {plain}:
            sys.modules["mxamp"] = None
        else:
            import mxamp  # only to make mxnet importable on this NumPy
        import mxnet as mx, numpy as np
        data = mx.nd.load({str(tmp_path / "data")!r})[0]
        for dtype, rtol in (("bfloat16", 1e-2), ("float16", 2e-3)):
            for offline in (False, True):
                prefix = f"{tmp_path}/{{dtype}}-{{offline}}"
                expected = np.load(prefix + ".npy")
                files = prefix + "-symbol.json", prefix + "-0000.params"
                net = mx.gluon.SymbolBlock.imports(files[0], ["data"], files[1])
                module = mx.mod.Module.load(prefix, 0, label_names=None)
                module.bind([("data", data.shape)], for_training=False)
                module.forward(mx.io.DataBatch([data]), is_train=False)
                for out in (net(data), module.get_outputs()[0]):
                    assert out.dtype == np.float32, prefix
                    np.testing.assert_allclose(
                        out.asnumpy(), expected, rtol=rtol, err_msg=prefix)
        """
    )


def test_saving_never_strips_casts(tmp_path):
    _, _, triple, _, _ = model(perceptron)
    symbol = amp.convert_symbol(triple[0], policy=GPU)
    symbol.save(str(tmp_path / "a.json"), remove_amp_cast=True)
    symbol.save(str(tmp_path / "b.json"))
    for name in ("a.json", "b.json"):
        assert "amp_cast" in (tmp_path / name).read_text()


@pytest.mark.parametrize("offline", [False, True])
def test_bucketing_modules(dtype, offline):
    def generate(length):
        data, weight = mx.sym.var("data"), mx.sym.var("fc_weight")
        out = mx.sym.FullyConnected(data, weight, num_hidden=4, flatten=False, name="fc")
        if length == 3:  # one bucket reads the weight in float32 too
            out = mx.sym.broadcast_add(out, mx.sym.sum(mx.sym.softmax(weight)))
        out = mx.sym.FullyConnected(mx.sym.sum(out, axis=1), num_hidden=2, name="out")
        return mx.sym.SoftmaxOutput(out, name="softmax"), ("data",), ("softmax_label",)

    module = mx.mod.BucketingModule(generate, default_bucket_key=5)
    with pytest.raises(amp.StateError, match="bind bucketing_mod"):
        amp.convert_bucketing_module(module, dtype)
    module.bind([("data", (2, 5, 3))], [("softmax_label", (2,))])
    module.init_params(mx.init.Xavier())
    batches = [
        mx.io.DataBatch(
            [randn(2, key, 3)], [nd.zeros(2)], bucket_key=key,
            provide_data=[("data", (2, key, 3))], provide_label=[("softmax_label", (2,))],
        )
        for key in (5, 3)
    ]  # fmt: skip

    def outputs(module):
        for batch in batches:
            module.forward(batch, is_train=False)
            yield module.get_outputs()[0].asnumpy()

    plain = list(outputs(module))
    options = {"policy": untuned(dtype), "cast_optional_params": offline}
    fast = amp.convert_bucketing_module(module, **options)
    fast.bind([("data", (2, 5, 3))], [("softmax_label", (2,))], for_training=False)
    fast.init_params()
    kinds = {name: kind(array) for name, array in fast.get_params()[0].items()}
    assert kinds["fc_weight"] == "float32"
    assert kinds["out_weight"] == (dtype if offline else "float32")
    for got, wanted in zip(outputs(fast), plain):
        np.testing.assert_allclose(got, wanted, rtol=0.05, atol=0.02)
