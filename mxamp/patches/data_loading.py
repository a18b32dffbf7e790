"""The patches of data loaders: what prepares data computes as without mxamp.

Transforms are no part of the net: rounding images there gains nothing, and OpenCV's operators know
no half precision. Workers in processes of their own are not patched at all.
"""

import functools
from typing import Any, Callable, Iterator, List

from mxnet.gluon.data import DataLoader, dataloader

from ..framework.patching import Patch
from ..policy.active import suspended

__all__ = ["patches"]


def patches() -> List[Patch]:
    """Return the patches: of loaders without workers, and of workers that are threads."""
    return [
        Patch(DataLoader, "__iter__", _build_iter),
        Patch(dataloader, "_thread_worker_fn", _build_worker),
    ]


def _build_iter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __iter__(self: DataLoader) -> Iterator[Any]:  # noqa: N807
        batches = original(self)
        while True:
            # Not around the yield: the code that asks for batches is the script's.
            with suspended():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    return __iter__


def _build_worker(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _thread_worker_fn(*args: Any, **kwargs: Any) -> Any:
        with suspended():
            return original(*args, **kwargs)

    return _thread_worker_fn
