"""Models whose attributes other languages wrote, and Python 2: as MXNet reads them."""

import re

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

import mxamp as amp
from helpers import values, with_avx512

S = mx.sym
X = S.var("data")
SHAPE = (2, 3, 16, 16)
LISTS = re.compile(r'("(?:kernel|pad|stride|dilate|pad_width|axis|output_size)": ")([^"]*)"')

SPELLINGS = {
    "Python 2": lambda text: re.sub(r"(\d+)", r"\1L", text),
    "brackets": lambda text: text.replace("(", "[").replace(")", "]"),
    "no blanks": lambda text: text.replace(" ", ""),
}


def net():
    options = {"pad": (1, 1), "stride": (1, 1), "dilate": (1, 1)}
    out = S.Convolution(X, kernel=(3, 3), num_filter=24, **options)
    out = S.Pooling(S.relu(S.BatchNorm(out, fix_gamma=False)), kernel=(2, 2), stride=(2, 2))
    out = S.pad(S.BatchNorm(out), mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 1, 1))
    out = S.Convolution(S.clip(out, a_min=0, a_max=6), kernel=(1, 1), num_filter=32)
    pooled = S.contrib.AdaptiveAvgPooling2D(out, output_size=(1, 1))
    rows = S.mean(out, axis=(2, 3)) + S.Flatten(pooled)
    return S.FullyConnected(rows, num_hidden=7)


@pytest.fixture(params=SPELLINGS)
def model(request):
    text = net().tojson()
    other = LISTS.sub(lambda found: f'{found[1]}{SPELLINGS[request.param](found[2])}"', text)
    assert other != text
    symbol = S.load_json(other)
    random = np.random.RandomState(0)
    shapes, _, aux = symbol.infer_shape(data=SHAPE)
    args = {n: nd.array(random.randn(*s) / 3) for n, s in zip(symbol.list_arguments(), shapes)}
    states = zip(symbol.list_auxiliary_states(), aux)
    return symbol, args, {name: nd.array(random.rand(*size) + 0.5) for name, size in states}


def run(symbol, args, auxs, data):
    args = {name: args.get(name, data) for name in symbol.list_arguments()}
    return values(symbol.bind(mx.cpu(), args, aux_states=auxs).forward()[0])


@pytest.mark.parametrize(
    "options",
    [
        {"target_dtype": "float16"},
        pytest.param({"target_dtype": "bfloat16", "cast_optional_params": True}, marks=with_avx512),
        pytest.param({"target_dtype": "bfloat16", "fuse": True}, marks=with_avx512),
    ],
)
def test_converted(model, options):
    symbol, args, auxs = model
    data = args.pop("data")
    exact = run(symbol, args, auxs, data)
    low = run(*amp.convert_model(symbol, args, auxs, **options), data)
    assert abs(low - exact).max() < 0.02 * abs(exact).max()


@with_avx512
def test_run_under_init(model):
    symbol, args, auxs = model
    data = args.pop("data")
    exact = run(symbol, args, auxs, data)
    amp.init("bfloat16")
    low = run(symbol, args, auxs, data)
    assert abs(low - exact).max() < 0.02 * abs(exact).max()
    assert abs(low - exact).max() > 0
    assert "Convolution" in str(amp.explain(symbol, "bfloat16"))
