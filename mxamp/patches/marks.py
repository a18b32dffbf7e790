"""The patches that mark nodes with the region that they are made in (`policy.regions`).

All generated `mx.sym` functions end in one function of MXNet, which is looked up when it is called.
A block traces its graph afresh: regions around its call are in force when the graph runs, and
those that its code enters belong to the graph.
"""

import functools
import logging
from typing import Any, Callable, FrozenSet, List

from mxnet.gluon.block import HybridBlock
from mxnet.ndarray import CachedOp
from mxnet.symbol import register as mx_register

from ..framework.operators import WRITTEN_BY_USERS, handle_of
from ..framework.patching import Patch
from ..graph.casts.insert import own_marks
from ..policy import regions
from ..policy.active import current_policy
from ..policy.rules import registered_classes
from .cached_op import follow

__all__ = ["patches"]

logger = logging.getLogger("mxamp")

NOT_REACHED = (
    "autocast(enabled=False) around the custom operator %r holds in eager calls alone: MXNet "
    "passes the attributes of a node to the operator's constructor, so the node can't be marked. "
    "In graphs it computes in half precision, as it was registered"
)


def patches() -> List[Patch]:
    """Return the patches that mark nodes with the region that they are made in."""
    return [
        Patch(mx_register, "_symbol_creator", _build_creator),
        Patch(HybridBlock, "_get_graph", _build_get_graph),
        Patch(HybridBlock, "__setattr__", _build_setattr),
    ]


def _build_creator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _symbol_creator(
        handle: int, args: Any, kwargs: Any, keys: Any, vals: Any, *rest: Any
    ) -> Any:
        region = regions.current_region()
        if region is not None and handle in _unmarked():
            # MXNet passes every attribute of such a node to the operator's constructor.
            op_type = dict(zip(keys, vals)).get("op_type", "")
            if region.is_off and dict(registered_classes()).get(op_type) == "low":
                logger.warning(NOT_REACHED, op_type)
        elif region is not None:
            region.has_nodes = True
            keys, vals = [*keys, regions.REGION], [*vals, region.mark]
        return original(handle, args, kwargs, keys, vals, *rest)

    return _symbol_creator


@functools.lru_cache(maxsize=None)
def _unmarked() -> FrozenSet[int]:
    return frozenset(handle_of(name) for name in WRITTEN_BY_USERS)


def _build_get_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_graph(self: HybridBlock, *args: Any) -> Any:
        regions.enter(None)
        try:
            return original(self, *args)
        finally:
            regions.leave()

    return _get_graph


def _build_setattr(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __setattr__(self: HybridBlock, name: str, value: Any) -> None:  # noqa: N807
        original(self, name, value)
        # A block whose code enters regions follows them where mixed precision is off around it too:
        # also in the call that traces it, which has passed the patch of calls before.
        made = name == "_cached_op" and isinstance(value, CachedOp) and not current_policy()
        if made and vars(self).get("_source") is None and own_marks(self._cached_graph[1]):
            follow(self, ())

    return __setattr__
