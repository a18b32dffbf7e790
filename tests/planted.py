"""Nets with layers that mixed precision breaks, and the names of those."""

import mxnet as mx
import numpy as np
from mxnet.gluon import nn


def rotation(generator, size=8):
    return np.linalg.qr(generator.randn(size, size))[0]


def doubled(matrix, first=0.5, second=0.5):
    """A weight for inputs that are twice the same, whose outputs are too."""
    return np.kron(matrix, [[first, second], [first, second]])


def chain(layers, bad, kind, size=8, seed=0):
    """A chain of dense layers; those at `bad` are planted. Return the net, data and bad names.

    "overflow": float16 can't hold what the layer returns; the layer after it makes it small again.
    "cancellation": the layer adds one input 257 times and takes it off 256 times: bfloat16 has no
    257.
    """
    generator = np.random.RandomState(seed)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for i in range(layers):
            net.add(nn.Dense(2 * size, use_bias=False, in_units=2 * size, prefix=f"layer{i}_"))
    net.initialize()
    for i, layer in enumerate(net):
        weight = doubled(rotation(generator, size))
        if i in bad and kind == "cancellation":
            weight = doubled(rotation(generator, size), 257, -256)
        layer.weight.set_data(mx.nd.array(weight))
    names = {f"net_layer{i}_fwd" for i in bad}
    if kind == "overflow":
        for i in bad:
            net[i].weight.set_data(net[i].weight.data() * 1e6)
            net[i + 1].weight.set_data(net[i + 1].weight.data() * 1e-6)
            names.add(f"net_layer{i + 1}_fwd")
    # Many rows: mxamp keeps dense layers of few rows in float32, for speed.
    data = np.repeat(generator.randn(32, size), 2, axis=1)
    return net, mx.nd.array(data), names
