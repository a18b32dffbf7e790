"""Nodes whose output reaches weighted products alone, and never a graph's boundary."""

from typing import FrozenSet

from ..ir import Graph

__all__ = ["feeding_products"]

#: Where an infinite gradient comes in, that of the weight is not finite either.
_PRODUCTS = frozenset({"Convolution", "Deconvolution", "FullyConnected"})
#: Their data's gradient is finite where the one that comes in is, and the data are.
_STEADY = frozenset({
    "BatchNorm", "Pooling", "_contrib_AdaptiveAvgPooling2D", "Activation", "relu", "clip",
    "Dropout", "Concat", "elemwise_mul", "broadcast_mul", "_mul_scalar", "_div_scalar",
    "_plus_scalar", "mean", "sum",
})  # fmt: skip

#: Their gradients are their output's.
_PASSING = frozenset({
    "Reshape", "Flatten", "expand_dims", "squeeze", "reshape_like", "_np_reshape", "_npx_reshape",
    "_np_squeeze", "_copy", "_np_copy", "_identity_with_attr_like_rhs", "Cast", "amp_cast",
    "amp_multicast", "elemwise_add", "elemwise_sub", "broadcast_add", "broadcast_sub", "_npi_add",
    "_npi_subtract", "_grad_add", "add_n",
})  # fmt: skip


def feeding_products(graph: Graph) -> FrozenSet[int]:
    """Return the nodes that nothing but weighted products read in the end."""
    feeding = set(range(len(graph.nodes))) - {i for i, _ in graph.heads}
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        passes = node.operator in _PASSING or node.operator in _STEADY
        if node.is_variable or node.operator in _PRODUCTS or (passes and i in feeding):
            continue
        feeding.difference_update(source for source, _ in node.inputs)
    return frozenset(feeding)
