"""Patches of everything that runs: eager calls, mxamp's own casts, graphs and executors."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Iterator, Sequence

from mxnet.executor import Executor
from mxnet.gluon.block import HybridBlock
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.numpy import _api_internal

from ...framework.operators import handle_of
from ...framework.patching import Patch, PatchSet, wrapping
from ...patches.cached_op import PolicyCachedOp, install_policy_op, restore_cached_op
from ...patches.eager import INVOKE_MODULES
from ...policy.active import current_policy

_TENSORDOT = handle_of("_npi_tensordot")
#: A function that a patch has replaced.
Original = Callable[..., Any]


class Observer(PatchSet):
    """Observes what runs between `open` and `close`, in all threads of the process.

    A subclass overrides the `on_` methods that it needs. Each takes the original function and its
    arguments, and returns its result. `patches` lists the places that the subclass observes.
    """

    def __init__(self) -> None:
        super().__init__()
        # Blocks whose cached op was replaced by a `PolicyCachedOp` for the observation only.
        self._followed: weakref.WeakSet[HybridBlock] = weakref.WeakSet()

    def eager_patches(self) -> Sequence[Patch]:
        """Return the patches of eager calls."""
        return [
            *(patch_over(module, "_imperative_invoke", self.on_call) for module in INVOKE_MODULES),
            patch_over(_api_internal, "tensordot", self._tensordot),
        ]

    def graph_patches(self) -> Sequence[Patch]:
        """Return the patch by which every hybridized block runs a `PolicyCachedOp`."""
        return [patch_over(HybridBlock, "_call_cached_op", self._call_block)]

    def close(self) -> None:
        """Remove the patches, and restore the blocks' cached ops."""
        super().close()
        for block in list(self._followed):
            restore_cached_op(block)
        self._followed.clear()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Context in which calls are observed."""
        self.open()
        try:
            yield
        finally:
            self.close()

    def on_call(
        self, original: Original, handle: int, inputs: Sequence[NDArray], *rest: Any
    ) -> Any:
        """Observe an eager call of the program; `rest` are keys, values and out, and more."""
        return original(handle, inputs, *rest)

    def _tensordot(self, original: Original, a: NDArray, b: NDArray, axes: Any) -> Any:
        """Call `mx.np.tensordot`, which MXNet invokes on its own path, through `on_call`."""
        return self.on_call(
            lambda _, given, *rest: original(*given, axes), _TENSORDOT, [a, b], (), (), None
        )

    def _call_block(self, original: Original, block: HybridBlock, *args: Any) -> Any:
        """Call a hybridized block with a `PolicyCachedOp`, also where mixed precision is off."""
        if current_policy() is None and not isinstance(block._cached_op, PolicyCachedOp):
            install_policy_op(block, args)
            self._followed.add(block)
        return original(block, *args)


def patch_over(owner: Any, name: str, function: Callable[..., Any]) -> Patch:
    """Return a patch over all others whose `function` gets the original as first argument."""
    return Patch(owner, name, wrapping(function), on_top=True)


def bound_inputs(executor: Executor, names: Sequence[str]) -> Sequence[NDArray]:
    """Return the arrays that an executor reads, in the order of `names`."""
    held = {**executor.arg_dict, **executor.aux_dict}
    return [held[name] for name in names]
