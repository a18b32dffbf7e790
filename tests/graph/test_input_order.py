"""Graphs with their inputs reversed: the same results, and gradients in half precision freed."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import mxamp as amp
from mxamp.graph.casts.insert import with_reversed_inputs
from mxamp.graph.ir import Graph


def layers(count=4, width=8):
    """Dense layers, the first of which also reads the input's own copy."""
    data = mx.sym.var("data")
    out = data
    for i in range(count):
        out = mx.sym.FullyConnected(out, mx.sym.var(f"w{i}"), mx.sym.var(f"b{i}"), num_hidden=width)
    return out + data


@pytest.mark.parametrize("symbol", [layers(), layers(0), mx.sym.Group([layers(2), layers(1)])])
def test_the_symbol_lists_its_inputs_in_reverse(symbol):
    reversed_ = with_reversed_inputs(Graph.from_symbol(symbol)).to_symbol()
    assert reversed_.list_inputs() == symbol.list_inputs()[::-1]
    assert reversed_.list_outputs() == symbol.list_outputs()


def test_only_inputs_lose_their_attributes():
    with mx.AttrScope(__kept__="yes"):
        symbol = mx.sym.FullyConnected(mx.sym.var("x", shape=(2, 3)), num_hidden=1)
    reversed_ = with_reversed_inputs(Graph.from_symbol(symbol))
    attrs = [node.attrs for node in reversed_.nodes]
    assert attrs == [{}, {}, {}, {"__kept__": "yes", "num_hidden": "1"}]


def test_the_graph_given_is_left_alone():
    graph = Graph.from_symbol(layers())
    before = graph.to_json()
    with_reversed_inputs(graph)
    assert graph.to_json() == before


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_outputs_and_gradients_are_those_of_eager_calls(static, dtype):
    mx.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(8, 3, use_bias=False),
        gluon.nn.BatchNorm(),
        gluon.nn.Activation("relu"),
        gluon.nn.Dense(3),
    )
    net.initialize(mx.init.Xavier())
    data = mx.nd.random.normal(shape=(4, 3, 8, 8))
    data.attach_grad()
    net(data)
    found = []
    for hybrid in (False, True):
        if hybrid:
            net.hybridize(static_alloc=static, static_shape=static)
        for param in net.collect_params(".*running.*").values():
            param.set_data(mx.nd.ones(param.shape))
        for _ in range(2):  # static buffers are used again
            with amp.autocast(dtype), autograd.record():
                out = net(data)
            out.backward()
        arrays = [out, data.grad, *(p.data() for p in net.collect_params().values())]
        arrays += [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
        found.append([array.astype("float32").asnumpy() for array in arrays])
    for eager, hybrid in zip(*found):
        assert np.linalg.norm(eager - hybrid) <= 0.04 * np.linalg.norm(eager) + 1e-6
