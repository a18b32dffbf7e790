"""The errors of one model's outputs against another's, and random inputs."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

import mxamp as amp
from helpers import kind, randn, untuned
from models import model
from mxamp.convert.outputs import Distance

NET = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")


def triple(**changes):
    return NET, {"fc_weight": randn(3, 4), "fc_bias": randn(3), **changes}, {}


def test_a_model_equals_itself():
    (error,) = amp.compare_models(triple(), triple(), {"data": np.ones((2, 4), "float32")})
    assert (error.relative, error.maximum, error.same_argmax, error.lost) == (0, 0, 1, 0)
    assert (error.name, error.shape) == ("fc_output", (2, 3))


@pytest.mark.usefixtures("unfused")
def test_errors_are_those_of_numpy(dtype):
    _, data, original, plain, _ = model()
    converted = amp.convert_model(*original, policy=untuned(dtype))
    (error,) = amp.compare_models(original, converted, {"data": data[0]})
    with amp.autocast(dtype):
        low = amp.compare_models(original, converted, {"data": data[0]})
    assert low == (error,), "mixed precision around it changes nothing"
    symbol, args, auxs = converted
    out = symbol.bind(mx.cpu(), {**args, "data": data[0]}, aux_states=auxs).forward()[0].asnumpy()
    difference = out - plain.asnumpy()
    wanted = np.linalg.norm(difference) / np.linalg.norm(plain.asnumpy())
    assert error.relative == pytest.approx(wanted, rel=1e-5)
    assert error.maximum == pytest.approx(abs(difference).max(), rel=1e-5)


def test_the_worst_pair_is_not_pooled_away():
    distance = Distance()
    distance.add("large", np.full(1000, 1e3), np.full(1000, 1e3))
    distance.add("small", np.ones(2), np.array([1.0, 2.0]))
    assert distance.relative == pytest.approx(1 / np.sqrt(2))
    distance.add("zero", np.zeros(2), np.array([0, 1e-9]))
    assert (distance.relative, distance.maximum) == (1, 1)
    with pytest.raises(amp.ArgumentError, match=r"'other' has shape \(2,\) and \(3,\)"):
        distance.add("other", np.ones(2), np.ones(3))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64"])
def test_random_inputs_of_embeddings_are_indices(dtype):
    words = mx.sym.Embedding(mx.sym.var("words"), input_dim=7, output_dim=2, name="table")
    scores = mx.sym.broadcast_mul(words, mx.sym.var("scores"))
    model = scores, {"table_weight": mx.nd.ones((7, 2))}, {}
    shapes = {"words": (50, 4), "scores": (50, 4, 1)}
    found = amp.random_inputs(model, shapes, {"words": dtype})
    drawn = found["words"].astype("float32").asnumpy()
    assert sorted({*drawn.ravel()}) == [0, 1, 2, 3, 4, 5, 6]
    assert found["scores"].asnumpy().min() < 0


def test_random_lengths_are_within_the_data():
    words, lengths = mx.sym.var("words"), mx.sym.Cast(mx.sym.var("lengths"), dtype="float32")
    masked = mx.sym.SequenceMask(words, lengths, use_sequence_length=True, axis=1)
    found = amp.random_inputs((masked, {}, {}), {"words": (40, 5), "lengths": (40,)})
    assert sorted({*found["lengths"].asnumpy()}) == [1, 2, 3, 4, 5]


def test_random_inputs():
    symbol, args, _ = triple()
    labelled = mx.sym.SoftmaxOutput(symbol, name="softmax"), args, {}
    found = amp.random_inputs(labelled, {"data": (2, 4)})
    assert {k: v.shape for k, v in found.items()} == {"data": (2, 4), "softmax_label": (2,)}
    integers = amp.random_inputs(labelled, {"data": (50, 4)}, {"data": "int64"})["data"]
    assert kind(integers) == "int64"
    assert set(integers.asnumpy().ravel()) == {0, 1}
    assert amp.compare_models(labelled, labelled, {"data": found["data"]})[0].relative == 0


def test_there_must_be_something_to_compare():
    nothing = triple(fc_bias=nd.full(3, np.nan))
    with pytest.raises(amp.ArgumentError, match="only NaN or infinity in output 'fc_output'"):
        amp.compare_models(nothing, nothing, {"data": nd.ones((2, 4))})
    some = triple(fc_bias=nd.array([np.inf, 1, 1]))
    (error,) = amp.compare_models(some, some, {"data": nd.ones((2, 4))})
    assert (error.relative, error.lost) == (0, 0)


def test_a_model_for_gpus_does_not_run_here():
    converted = amp.convert_model(*triple(), policy=amp.Policy.default("float16", "gpu"))
    with pytest.raises(amp.StateError, match="other model does not run here.*GPU.*'data': an ND"):
        amp.compare_models(triple(), converted, {"data": nd.ones((2, 4))})
