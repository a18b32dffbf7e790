"""Traced models: a net, its inputs, symbol, parameters and outputs."""

import mxnet as mx

import mxamp as amp
from nets import convolutional, made

GPU = amp.Policy.default("float16", device="gpu")


def model(make=convolutional):
    net, data = made(make)
    net.hybridize()
    expected = net(*data)
    inputs, symbol = net._cached_graph
    arrays = {p.name: p.data() for p in net.collect_params().values()}
    args = {n: arrays[n] for n in symbol.list_arguments() if n in arrays}
    auxs = {n: arrays[n] for n in symbol.list_auxiliary_states()}
    return net, data, (symbol, args, auxs), expected, [i.name for i in inputs]


def bound_module():
    """A module with an output operator, before its optimizer."""
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"))
    module.bind([("data", (4, 3))], [("softmax_label", (4,))])
    module.init_params()
    return module
