"""Traced models: a net, its inputs, symbol, parameters and outputs."""

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
