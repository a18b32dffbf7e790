"""The patches that mark nodes with the region that they are made in (`policy.regions`).

All generated `mx.sym` functions end in one function of MXNet, which is looked up when it is called.
A block traces its graph afresh: regions around its call are in force when the graph runs, and
those that its code enters belong to the graph.
"""

import functools
from typing import Any, Callable, List

from mxnet.gluon.block import HybridBlock
from mxnet.symbol import register as mx_register

from ..framework.patching import Patch
from ..policy import regions

__all__ = ["patches"]


def patches() -> List[Patch]:
    """Return the patches that mark nodes with the region that they are made in."""
    return [
        Patch(mx_register, "_symbol_creator", _build_creator),
        Patch(HybridBlock, "_get_graph", _build_get_graph),
    ]


def _build_creator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _symbol_creator(
        handle: int, args: Any, kwargs: Any, keys: Any, vals: Any, *rest: Any
    ) -> Any:
        region = regions.current_region()
        if region is not None:
            region.has_nodes = True
            keys, vals = [*keys, regions.REGION], [*vals, region.mark]
        return original(handle, args, kwargs, keys, vals, *rest)

    return _symbol_creator


def _build_get_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_graph(self: HybridBlock, *args: Any) -> Any:
        regions.enter(None)
        try:
            return original(self, *args)
        finally:
            regions.leave()

    return _get_graph
