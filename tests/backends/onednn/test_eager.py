"""Steps around eager calls on CPUs."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import casting_small_layers, down, initialized, randn, same, up, values, with_avx512
from mxamp.framework import arrays
from mxamp.framework.operators import by_handle, handle_of
from mxamp.patches import eager


class Spied:
    """The calls that an eager call makes: names of operators, and whether in training mode."""

    def __init__(self, fails=False):
        self.names, self.training, self.fails = [], [], fails
        self.invoke = eager.build_invoke(self.record)

    def record(self, handle, *args):
        self.names.append(by_handle()[handle].name)
        self.training.append(autograd.is_training())
        if self.fails:
            raise mx.MXNetError("spied")
        return arrays.invoke(handle, *args)

    def __call__(self, name, inputs, out=None, **attrs):
        attrs = {key: str(value) for key, value in attrs.items()}
        values = list(attrs.values())
        return self.invoke(handle_of(name), inputs, list(attrs), values, out, False, False)


@pytest.mark.parametrize("shape", [(4, 8), (1, 8), (1,)])
@pytest.mark.backend
def test_bfloat16_sums_of_equal_shapes_run_in_onednn(shape):
    special = nd.array([np.nan, np.inf, -np.inf, 3e38, -0.0, 1e-40, 1, 0.3] * 4).reshape(4, 8)
    a, b = down(special, "bfloat16"), down(randn(*shape), "bfloat16")
    spied = Spied()
    with amp.autocast("bfloat16"):
        added = spied("broadcast_add", [a, b])
        expected = down(nd.broadcast_add(up(a), up(b)), "bfloat16")
    assert spied.names == ["elemwise_add" if shape == (4, 8) else "broadcast_add"]
    assert same(added, expected)


COLORED = {"kernel": (3, 3), "num_filter": 16, "pad": (1, 1)}


@with_avx512
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_convolutions_of_color_images_run_as_in_graphs(grad_req):
    net = initialized(nn.Conv2D(16, 3, padding=1, in_channels=3), init=mx.init.Normal())
    net.collect_params().setattr("grad_req", grad_req)
    images, found = randn(2, 3, 8, 8), []
    with amp.autocast(policy=casting_small_layers()):
        for hybridize in (False, True):
            net.hybridize(hybridize)
            net.collect_params().zero_grad()
            for _ in range(2):
                with autograd.record():
                    out = net(images)
                    loss = (out.astype("float32") ** 2).sum()
                loss.backward()
            inferred = net(images)
            gradients = [p.grad().asnumpy() for p in net.collect_params().values()]
            found.append([values(out), values(inferred), *gradients])
    for eagerly, in_graph in zip(*found):
        np.testing.assert_array_equal(eagerly, in_graph)


@with_avx512
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_convolutions_in_inference_leave_the_layout_of_a_cast_weight_alone(stored, fails):
    spied, weight = Spied(fails), randn(16, 4, 3, 3)
    weight = down(weight, stored) if stored == "bfloat16" else weight
    with amp.autocast(policy=casting_small_layers()):
        try:
            spied("Convolution", [randn(2, 4, 8, 8), weight, randn(16)], **COLORED)
        except mx.MXNetError:
            assert fails
        assert not autograd.is_training()
    assert spied.training == [stored == "float32"]
