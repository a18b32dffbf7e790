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


def module_of(symbol, shape, label=None, bound=None, **options):
    """Return a module before its optimizer, whose parameters are all one; `bound`: more for `bind`."""
    module = mx.mod.Module(symbol, label_names=label and label[:1], **options)
    module.bind([("data", shape)], label and [label], **(bound or {}))
    module.init_params(mx.init.One())
    return module


def bound_module():
    """A module with an output operator."""
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    return module_of(mx.sym.SoftmaxOutput(net, name="softmax"), (4, 3), ("softmax_label", (4,)))
