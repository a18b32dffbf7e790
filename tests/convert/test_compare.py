"""Two models side by side, and conversion from files to files."""

import warnings

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

import mxamp as amp
from helpers import BF16, kind, randn
from models import model, policy_for


def dense(**attrs):
    return mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc", **attrs)


def parameters(scale=1.0):
    return {"fc_weight": randn(3, 4, scale=scale), "fc_bias": randn(3)}


def test_a_model_equals_itself(dtype):
    triple = (dense(), parameters(), {})
    (error,) = amp.compare_models(triple, triple, {"data": np.ones((2, 4), "float32")})
    assert (error.relative, error.maximum, error.same_argmax, error.lost) == (0, 0, 1, 0)
    assert (error.name, error.shape) == ("fc_output", (2, 3))


@pytest.mark.usefixtures("unfused")
def test_errors_are_those_of_numpy(dtype):
    _, data, triple, plain, _ = model()
    converted = amp.convert_model(*triple, policy=policy_for(dtype))
    (error,) = amp.compare_models(triple, converted, {"data": data[0]})
    with amp.autocast(dtype):
        low = amp.compare_models(triple, converted, {"data": data[0]})
    assert low == (error,), "mixed precision around it changes nothing"
    symbol, args, auxs = converted
    out = symbol.bind(mx.cpu(), {**args, "data": data[0]}, aux_states=auxs).forward()[0].asnumpy()
    difference = out - plain.asnumpy()
    wanted = np.linalg.norm(difference) / np.linalg.norm(plain.asnumpy())
    assert error.relative == pytest.approx(wanted, rel=1e-5)
    assert error.maximum == pytest.approx(abs(difference).max(), rel=1e-5)


def test_elements_that_are_lost_are_counted():
    triple = (dense(), {**parameters(), "fc_weight": nd.full((3, 4), 1e5)}, {})
    converted = amp.convert_model(*triple, policy=policy_for("float16"))
    (error,) = amp.compare_models(triple, converted, {"data": nd.ones((2, 4))})
    assert error.lost == 6


def test_random_inputs():
    triple = (mx.sym.SoftmaxOutput(dense(), name="softmax"), parameters(), {})
    found = amp.random_inputs(triple, {"data": (2, 4)})
    assert {name: array.shape for name, array in found.items()} == {
        "data": (2, 4), "softmax_label": (2,),
    }  # fmt: skip
    integers = amp.random_inputs(triple, {"data": (50, 4)}, {"data": "int64"})["data"]
    assert kind(integers) == "int64"
    assert set(integers.asnumpy().ravel()) == {0, 1}
    assert amp.compare_models(triple, triple, {"data": found["data"]})[0].relative == 0


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda m: amp.random_inputs(m, {"data": (2**31, 4)}), "8,589,934,592 elements"),
        (lambda m: amp.random_inputs(m, {"data": (0, 4)}), "sizes above 0"),
        (lambda m: amp.random_inputs(m, {"dato": (2, 4)}), "unknown input 'dato'"),
        (lambda m: amp.random_inputs(m), "shapes of the inputs data"),
        (lambda m: amp.random_inputs(m, {"data": (2, 5)}), "don't fit"),
        (lambda m: amp.random_inputs(({}, {}), {}), r"must be \(symbol, .*, not \(\{\}, \{\}\)"),
        (lambda m: amp.random_inputs(m[::-1], {}), r"must be \(symbol, arg_params, aux_params\)"),
        (
            lambda m: amp.compare_models(m, m[0], {"data": np.ones((2, 4))}),
            r"must be \(symbol, .*, not a Symbol",
        ),
        (lambda m: amp.compare_models(m, m, {}), "inputs without a value: data"),
    ],
)
def test_what_is_missing_is_named(call, words):
    with pytest.raises(amp.ArgumentError, match=words):
        call((dense(), parameters(), {}))


@pytest.mark.parametrize(
    "value, words",
    [
        (np.full((2, 4), np.nan), "NaN, infinity or beyond float32 in 8 elements"),
        (nd.amp_cast(nd.array([[1, np.inf, 1, 1]]), dtype=BF16), "in 1 element:"),
        (np.full((2, 4), 1e300), "beyond float32"),
        (np.ones((2, 4), "complex64"), "2x4 in complex64"),
        (np.full((2, 4), "a"), "booleans, integers or floats"),
        ([["a"]], "booleans, integers or floats"),
        (nd.ones((2, 5)), "the original does not run on these inputs"),
    ],
)
def test_inputs_are_finite_numbers(value, words):
    triple = (dense(), parameters(), {})
    with pytest.raises(amp.ArgumentError, match=words):
        amp.compare_models(triple, triple, {"data": value})


def test_there_must_be_something_to_compare():
    triple = (dense(), {**parameters(), "fc_bias": nd.full(3, np.nan)}, {})
    with pytest.raises(amp.ArgumentError, match="only NaN or infinity in output 'fc_output'"):
        amp.compare_models(triple, triple, {"data": nd.ones((2, 4))})
    triple[1]["fc_bias"] = nd.array([np.inf, 1, 1])
    (error,) = amp.compare_models(triple, triple, {"data": nd.ones((2, 4))})
    assert (error.relative, error.lost) == (0, 0)


def test_a_model_for_gpus_does_not_run_here():
    triple = (dense(), parameters(), {})
    converted = amp.convert_model(*triple, policy=amp.Policy.default("float16", "gpu"))
    with pytest.raises(amp.StateError, match="the converted model does not run here"):
        amp.compare_models(triple, converted, {"data": nd.ones((2, 4))})


# ---------------------------------------------------------------------- files


@pytest.fixture
def saved(tmp_path):
    mx.model.save_checkpoint(str(tmp_path / "net"), 3, dense(), parameters(), {})
    return tmp_path


def test_files(saved, dtype):
    done = amp.convert_files(
        saved / "net", saved / "low", 3, policy=policy_for(dtype), cast_optional_params=True,
        check_inputs={"data": nd.ones((2, 4))},
    )  # fmt: skip
    assert (done.symbol.name, done.params.name) == ("low-symbol.json", "low-0003.params")
    assert done.bytes_before > 0
    assert 0 < done.errors[0].relative < 0.02
    _, args, _ = mx.model.load_checkpoint(str(saved / "low"), 3)
    assert {kind(array) for array in args.values()} == {dtype}
    assert len(list(saved.iterdir())) == 4


@pytest.mark.parametrize(
    "change, words",
    [
        ({"prefix": "other"}, "no file"),
        ({"epoch": 0}, "no file"),
        ({"out": "none/low"}, "no folder"),
        ({"excluded_sym_names": ["f"]}, "'f'"),
        ({"input_dtypes": {"x": "int32"}}, "'x'"),
        ({"check_inputs": {}}, "without a value"),
    ],
)
def test_failures_write_nothing(saved, change, words):
    options = {"prefix": "net", "out": "low", "epoch": 3, "target_dtype": "bfloat16", **change}
    for name in ("prefix", "out"):
        options[name] = saved / options[name]
    with pytest.raises(amp.ArgumentError, match=words):
        amp.convert_files(**options)
    assert sorted(p.name for p in saved.iterdir()) == ["net-0003.params", "net-symbol.json"]


def test_a_model_that_overflows_is_not_written(tmp_path):
    args = {**parameters(), "fc_weight": nd.full((3, 4), 1e5)}
    mx.model.save_checkpoint(str(tmp_path / "net"), 0, dense(), args, {})
    with pytest.raises(amp.StateError, match="6 elements of output 'fc_output'"):
        amp.convert_files(
            tmp_path / "net", tmp_path / "low", policy=policy_for("float16"),
            check_inputs={"data": nd.ones((2, 4))},
        )  # fmt: skip
    assert not list(tmp_path.glob("low*"))


@pytest.mark.parametrize("cast", [False, True])
def test_models_of_numpy_semantics(tmp_path, dtype, cast):
    class Net(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.dense = mx.gluon.nn.Dense(4, in_units=4)

        def hybrid_forward(self, F, x):
            return F.np.sum(F.np.tanh(self.dense(x)))

    mx.npx.set_np()
    net, x = Net(), mx.np.ones((2, 4))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    plain = net(x)
    net.export(str(tmp_path / "net"))
    again = amp.convert_hybrid_block(net, policy=policy_for(dtype), cast_optional_params=cast)(x)
    mx.npx.reset_np()
    options = {"policy": policy_for(dtype), "cast_optional_params": cast}
    if cast and dtype == "bfloat16":
        with pytest.raises(amp.ArgumentError, match="NumPy semantics"):
            amp.convert_files(tmp_path / "net", tmp_path / "low", **options)
        assert not list(tmp_path.glob("low*"))
        return
    done = amp.convert_files(
        tmp_path / "net", tmp_path / "low", check_inputs={"data": x}, **options
    )
    assert done.errors[0].shape == ()
    assert done.errors[0].relative < 0.05
    mx.npx.set_np()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        low = mx.gluon.SymbolBlock.imports(str(done.symbol), ["data"], str(done.params))
    assert low(x).asnumpy() == again.asnumpy()
    np.testing.assert_allclose(low(x).asnumpy(), plain.asnumpy(), rtol=0.05)
