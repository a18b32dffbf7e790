"""A symbol's graph, read and written, and the dtypes that MXNet infers for it."""

import gc
import json

import mxnet as mx
import pytest
from mxnet.symbol import var

from mxamp.graph.ir import Graph, collector_paused
from nets import NETS, Control, made


def test_json_round_trips():
    symbol = mx.sym.BatchNorm(mx.sym.Convolution(var("x"), num_filter=4, kernel=(3, 3)), name="bn")
    graph = Graph.from_symbol(symbol)
    assert Graph.from_json(json.loads(graph.to_symbol().tojson())) == graph


@pytest.mark.parametrize("make", [*NETS, "foreach", "cond", "while_loop"])
def test_inputs_are_in_mxnets_order(make):
    net, data = (Control(make), ["data"]) if isinstance(make, str) else made(make)
    names = ["data"] if len(data) == 1 else [f"data{i}" for i in range(len(data))]
    symbol = net(*map(var, names))
    graph = Graph.from_symbol(symbol)
    assert graph.input_names == symbol.list_inputs()
    assert graph.to_symbol().list_inputs() == symbol.list_inputs()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with collector_paused():
        pass
    was_on = gc.isenabled()
    gc.enable()
    assert not was_on
