"""Pooling with every way to write it that MXNet takes: oneDNN takes some."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import mxamp as amp
from helpers import randn, values

LAYOUTS = {1: "NCW", 2: "NCHW", 3: "NCDHW"}
GLOBAL = {
    "no kernel": {},
    "an empty kernel": {"kernel": ()},
    "a kernel": {"kernel": 2},
    "channels last": {"kernel": 2, "layout": True},
}
WINDOWS = {
    "a window": {"kernel": 2},
    "full": {"kernel": 2, "stride": 2, "pooling_convention": "full"},
    "borders": {"kernel": 2, "pad": 1, "count_include_pad": False},
    "window, channels last": {"kernel": 2, "layout": True},
}


class Pooled(gluon.HybridBlock):
    def __init__(self, axes, **options):
        super().__init__()
        self.options = options
        convolution = {1: gluon.nn.Conv1D, 2: gluon.nn.Conv2D, 3: gluon.nn.Conv3D}[axes]
        self.product = convolution(16, 1, in_channels=16, weight_initializer=mx.init.Uniform(1))
        self.initialize()

    def hybrid_forward(self, F, x):  # noqa: N803
        return F.Pooling(self.product(x), **self.options)


def options_of(given, axes):
    options = {k: (v,) * axes if v in (1, 2) and v is not True else v for k, v in given.items()}
    if options.pop("layout", False):
        options["layout"] = LAYOUTS[axes].replace("C", "") + "C"
    return options


def run(block, data):
    x = data.copy()
    x.attach_grad()
    inference = values(block(x))
    with autograd.record():
        out = block(x)
        total = out.sum()
    total.backward()
    return inference, values(out), x.grad.asnumpy()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["max", "avg", "sum", "lp"])
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("name", [*GLOBAL, *WINDOWS])
def test_pooling_is_right_however_it_is_written(dtype, name, axes, kind):
    options = {"pool_type": kind, **options_of({**GLOBAL, **WINDOWS}[name], axes)}
    options.update({"global_pool": True} if name in GLOBAL else {})
    options.update({"p_value": 2} if kind == "lp" else {})
    data = randn(2, 16, *(6,) * axes)
    # One of two values that are nearly equal may be another's maximum, which moves its gradient.
    limits = 0.02, 0.02, 0.5 if kind == "max" else 0.02
    block = Pooled(axes, **options)
    wanted = run(block, data)
    for hybridized in (False, True):
        block.hybridize(hybridized)
        with amp.autocast(dtype):
            found = run(block, data)
        for got, value, limit in zip(found, wanted, limits):
            error = np.linalg.norm(got - value) / np.linalg.norm(value)
            assert error < limit, error
