"""Models of one symbol, before and after a pass of fusion."""

import mxnet as mx
import numpy as np
from mxnet import nd

from mxamp.graph.ir import Graph
from mxamp.graph.speed.fuse import apply_pass


def model(symbol, shape, seed=0, scale=1.0):
    """Return random parameters for a symbol, and data of this shape."""
    random = np.random.RandomState(seed)
    shapes, _, aux = symbol.infer_shape(data=shape)
    names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    params = {
        name: nd.array((random.rand(*size) + 0.5 if "var" in name else random.randn(*size)) * scale)
        for name, size in zip(names, [*shapes, *aux])
    }
    return params, params.pop("data")


def run(symbol, params, data):
    """Return the outputs of a symbol as NumPy arrays."""
    args = {name: data if name == "data" else params[name] for name in symbol.list_arguments()}
    auxs = {name: params[name] for name in symbol.list_auxiliary_states()}
    return [out.asnumpy() for out in symbol.bind(mx.cpu(), args, aux_states=auxs).forward()]


def after(one, symbol, params, policy):
    """Return the symbol and the parameters that a pass makes of a model."""
    graph, new = apply_pass(one, Graph.from_symbol(symbol), params, policy)
    return graph.to_symbol(), new
