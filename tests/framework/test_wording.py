import re

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import BF16
from mxamp.framework.wording import counted, one_of, shortened, shown


def test_counts():
    found = " ".join(counted(n, "step") for n in (0, 1, 2, 1234))
    assert found == "0 steps 1 step 2 steps 1,234 steps"
    assert counted(2, "loss", "losses") == "2 losses"


def test_lists_of_names():
    assert [shortened(list(names)) for names in ("", "a", "abcd")] == [
        "",
        "a",
        "a, b, c and 1 other",
    ]
    assert [one_of(allowed) for allowed in (["a"], ["a", "b", 1])] == ["'a'", "'a', 'b' or 1"]


@pytest.mark.parametrize("value, text", [
    ("int8", "'int8'"), (3, "3"), (None, "None"), ([1, "a"], "[1, 'a']"),
    (BF16, "bfloat16"), (np.float16, "float16"), (np.dtype("int8"), "int8"), ([BF16], "[bfloat16]"),
    (int, "the class int"), (mx.nd.NDArray, "the class NDArray"), (np, "the module numpy"),
    (counted, "the function counted"), (len, "the function len"), (object(), "an object"),
    (np.float32(1), "float32(1.0)"), ([np.int64(3)], "[int64(3)]"), (np.ones(()), "an ndarray without axes in float64"),
    (mx.cpu(), "cpu(0)"), (amp.Policy.default("float16", "cpu"), "a Policy"),
])  # fmt: skip
def test_values(value, text):
    assert shown(value) == text


def test_arrays_and_what_is_long():
    array = mx.nd.zeros((2, 3))
    assert shown(array) == "an NDArray of 2x3 in float32"
    assert shown(array.astype("float16")) == "an NDArray of 2x3 in float16"
    assert shown({"a": mx.nd.amp_cast(array, dtype=BF16)}) == "{'a': an NDArray of 2x3 in bfloat16}"
    net = mx.gluon.nn.HybridSequential()
    for _ in range(9):
        net.add(mx.gluon.nn.Dense(3))
    assert shown(net) == "a HybridSequential"
    for value in ("x" * 10_000, list(range(10_000)), {i: i for i in range(10_000)}, b"y" * 10_000):
        assert len(shown(value)) < 100
        assert "\n" not in shown(value)


def trainer():
    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    return mx.gluon.Trainer(net.collect_params(), "sgd")


@pytest.mark.parametrize("make, words", [
    (lambda: amp.LossScaler(init_scale="a"), "init_scale must be a positive finite number, not 'a'"),
    (lambda: amp.LossScaler(init_scale=np.float32), "not float32"),
    (lambda: amp.LossScaler(growth_factor=1), "growth_factor must be more than 1, not 1"),
    (lambda: amp.LossScaler(backoff_factor=1), "backoff_factor must be less than 1, not 1"),
    (lambda: amp.LossScaler(growth_interval=0), "growth_interval must be a whole number of at least 1, not 0"),
    (lambda: amp.LossScaler(init_scale=0.5), "init_scale must be between min_scale and max_scale, 1 and .*, not 0.5"),
    (lambda: amp.LossScaler().load_state_dict(BF16), "the state must be what state_dict of a LossScaler gives, with .*, not bfloat16"),
    (lambda: amp.init_trainer(dict), "init_trainer takes a gluon.Trainer, not the class dict"),
    (lambda: amp.unscale(mx.nd.zeros(2)), "the trainer must be a gluon.Trainer, not an NDArray of 2 in float32"),
    (lambda: amp.GradScaler().step(3, 1), "a GradScaler takes a gluon.Trainer, not 3"),
    (lambda: amp.GradScaler().scale(BF16), "a loss must be an NDArray, .*, not bfloat16"),
    (lambda: amp.convert_files("model", "low", "bfloat16"), "epoch must be a whole number, .* not 'bfloat16'"),
    (lambda: amp.convert_model(mx.sym.var('x') * 2, {}, {}, fuse="no"), "fuse must be True or False, not 'no'"),
    (lambda: amp.convert_model(mx.sym.var('x') * 2, {}, {}, cast_optional_params="no"), "cast_optional_params must be True or False"),
    (lambda: amp.half_function(3), "the decorator takes a function, not 3"),
    (lambda: amp.float_function(BF16), "not bfloat16"),
    (lambda: amp.promote_function(None), "not None"),
    (lambda: amp.register_half_function(3, "f"), "the first argument must be a module, not 3"),
    (lambda: amp.register_half_function("m", "f"), "the first argument must be a module, not 'm'"),
    (lambda: amp.register_float_function(re, "serch"), "the module re 'serch'; the closest .*'search'"),
    (lambda: amp.register_custom_operator("a", np.float16), "kind must be .* or 'promote', not float16"),
    (lambda: amp.autocast(test_counts), "must be a dtype, not the function test_counts; write @amp.autocast"),
    (lambda: amp.GradScaler("cuda:0"), "init_scale must be .*, not 'cuda:0'"),
    (lambda: amp.init("float32"), "not 'float32'; for float32 call no init"),
    (lambda: amp.autocast(enabled="no"), "enabled must be True or False, not 'no'"),
    (lambda: amp.GradScaler(enabled="no"), "enabled must be True or False, not 'no'"),
    (lambda: amp.init_trainer(trainer(), "dynamic"), "such as LossScaler\\(\\) or StaticLossScaler\\(128\\), not 'dynamic'"),
    (lambda: amp.init(mx.nd.zeros(2)), "'float16', 'bfloat16' or 'auto', not an NDArray of 2 in float32"),
])  # fmt: skip
def test_bad_input_is_shown_as_readers_know_it(make, words):
    with pytest.raises(amp.ArgumentError, match=words):
        make()
