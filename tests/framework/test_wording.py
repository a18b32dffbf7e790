import re

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import BF16
from mxamp.framework.wording import counted, one_of, shortened, shown


def test_counts_and_lists_of_names():
    assert [counted(n, "step") for n in (1, 1234)] == ["1 step", "1,234 steps"]
    assert [shortened(list(names)) for names in ("", "a", "abcd")] == [
        "",
        "a",
        "a, b, c and 1 other",
    ]
    assert [one_of(allowed) for allowed in (["a"], ["a", "b", 1])] == ["'a'", "'a', 'b' or 1"]


@pytest.mark.parametrize("value, text", [
    ("int8", "'int8'"), ([1, "a"], "[1, 'a']"), (BF16, "bfloat16"), (np.float16, "float16"), (int, "the class int"),
    (np, "the module numpy"), (len, "the function len"), (object(), "an object"),
    (mx.cpu(), "cpu(0)"), (amp.Policy.default("float16", "cpu"), "a Policy"), ([0] * 100, "a list"),
    (mx.nd.zeros((2, 3), dtype="float16"), "an NDArray of shape (2, 3) in float16"),
])  # fmt: skip
def test_values(value, text):
    assert shown(value) == text


def trainer():
    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    return mx.gluon.Trainer(net.collect_params(), "sgd")


@pytest.mark.parametrize("make, words", [
    (lambda: amp.LossScaler(init_scale="a"), "init_scale must be a positive finite number, not 'a'"),
    (lambda: amp.LossScaler().load_state_dict(BF16), "the state must be what state_dict of a LossScaler gives, with .*, not bfloat16"),
    (lambda: amp.init_trainer(dict), "the trainer must be a gluon.Trainer, not the class dict"),
    (lambda: amp.unscale(mx.nd.zeros(2)), "the trainer must be a gluon.Trainer, not an NDArray of shape .2,. in float32"),
    (lambda: amp.GradScaler().step(3, 1), "the trainer must be a gluon.Trainer, not 3"),
    (lambda: amp.GradScaler().scale(BF16), "a loss must be an NDArray, .*, not bfloat16"),
    (lambda: amp.convert_model(mx.sym.var('x') * 2, {}, {}, fuse="no"), "fuse must be True or False, not 'no'"),
    (lambda: amp.half_function(3), "the decorator takes a function, not 3"),
    (lambda: amp.register_half_function("m", "f"), "the first argument must be a module, not 'm'"),
    (lambda: amp.register_float_function(re, "serch"), "the module re 'serch'; the closest .*'search'"),
    (lambda: amp.register_custom_operator("a", np.float16), "kind must be .* or 'promote', not float16"),
    (lambda: amp.autocast(test_values), "must be a dtype, not the function test_values; write @amp.autocast"),
    (lambda: amp.GradScaler("cuda:0"), "init_scale must be .*, not 'cuda:0'"),
    (lambda: amp.init("float32"), "not 'float32'; for float32 call no init"),
    (lambda: amp.autocast(enabled="no"), "enabled must be True or False, not 'no'"),
    (lambda: amp.init_trainer(trainer(), "dynamic"), "loss_scaler must be .*, not 'dynamic'"),
    (lambda: amp.init(mx.nd.zeros(2)), "'float16', 'bfloat16' or 'auto', not an NDArray of shape .2,. in float32"),
])  # fmt: skip
def test_bad_input_is_shown_as_readers_know_it(make, words):
    with pytest.raises(amp.ArgumentError, match=words):
        make()
