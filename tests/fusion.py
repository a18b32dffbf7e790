"""Models of one symbol, before and after a pass of fusion."""

import mxnet as mx
import numpy as np
from mxnet import nd

from helpers import same
from mxamp.backends.onednn.fuse import apply_pass
from mxamp.graph.ir import Graph

S = mx.sym
HEADS = 3


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


def same_after(one, symbol, params, policy, *batches, tolerance=1e-4):
    """Return what a pass makes of a model: it answers the same, and leaves the model as it was."""
    before = {name: array.copy() for name, array in params.items()}
    new, new_params = after(one, symbol, params, policy)
    for data in batches:
        for plain, found in zip(run(symbol, params, data), run(new, new_params, data)):
            assert found.shape == plain.shape
            np.testing.assert_allclose(found, plain, rtol=tolerance, atol=tolerance)
    assert all(same(params[name], before[name]) for name in before)
    return new, new_params


# ---------------------------------------------------------------------- self-attention


def heads(data, shape=(0, 0, HEADS, -1), axes=(0, 2, 1, 3), merged=(-3, 0, 0), **more):
    split = S.transpose(S.reshape(data, shape=shape), axes=axes)
    return S.reshape(split, shape=merged, **more)


def joined(mixed, count=HEADS):
    split = S.transpose(S.reshape(mixed, shape=(-4, -1, count, 0, 0)), axes=(0, 2, 1, 3))
    return S.reshape(split, shape=(0, 0, -3))


def attend(projections, scores=lambda x: x * 0.3, shares=S.softmax, heads=heads, joined=joined):
    q, k, v = (heads(one) for one in projections)
    return joined(S.batch_dot(shares(scores(S.batch_dot(q, k, transpose_b=True))), v))
