"""Graphs with their inputs reversed: the same results, and gradients in half precision freed."""

import mxnet as mx
import pytest

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
