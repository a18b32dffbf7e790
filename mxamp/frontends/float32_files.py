"""The files of nets whose parameters are float16: they hold float32, as those of any other net."""

import functools
from contextlib import contextmanager
from typing import Any, Dict, Iterator

from mxnet.gluon import Block, HybridBlock, Parameter
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..framework.machine import DTYPE_CODES, dtype_name
from ..graph.ir import Graph

__all__ = ["save_in_float32"]

_LOADS = ("ctx", "allow_missing", "ignore_extra", "cast_dtype")


def save_in_float32(net: Block) -> None:
    """Let `save_parameters` and `export` write float32, and `load_parameters` read it."""
    # Not functions made here: a copy of the net gets ones that are its own.
    net.save_parameters = functools.partial(_save_parameters, net)
    net.load_parameters = functools.partial(_load_parameters, net)
    if isinstance(net, HybridBlock):
        net.export = functools.partial(_export, net)


def _save_parameters(net: Block, *args: Any, **kwargs: Any) -> None:
    with _widened(net):
        type(net).save_parameters(net, *args, **kwargs)


def _load_parameters(net: Block, filename: str, *args: Any, **kwargs: Any) -> None:
    options = {"cast_dtype": True, **dict(zip(_LOADS, args)), **kwargs}
    type(net).load_parameters(net, filename, **options)


def _export(net: HybridBlock, *args: Any, **kwargs: Any) -> Any:
    traced = net._cached_graph
    with _widened(net) as params:
        if traced:
            inputs, symbol = traced
            net._cached_graph = inputs, _of_float32(symbol, params)
        try:
            return type(net).export(net, *args, **kwargs)
        finally:
            net._cached_graph = traced


@contextmanager
def _widened(net: Block) -> Iterator[Dict[str, Parameter]]:
    """Let the float16 parameters of a net give their values in float32; yield them by name."""
    params = net.collect_params().items()
    halves = {name: param for name, param in params if dtype_name(param.dtype) == "float16"}
    for param in halves.values():
        param._reduce = functools.partial(_reduced, param)
    try:
        yield halves
    finally:
        for param in halves.values():
            del param._reduce


def _reduced(param: Parameter) -> NDArray:
    return type(param)._reduce(param).astype("float32")


def _of_float32(symbol: Symbol, params: Dict[str, Parameter]) -> Symbol:
    """Return a symbol whose variables `params`, which record that they are float16, are float32."""
    graph = Graph.from_symbol(symbol)
    for node in graph.variables:
        if node.name in params and "__dtype__" in node.attrs:
            node.attrs = {**node.attrs, "__dtype__": str(DTYPE_CODES["float32"])}
    return graph.to_symbol(type(symbol))
