"""The table of the monkey patches of MXNet that cast operators' inputs.

Those for loss scaling are in `scaling.backward_passes`.

`init` and each `autocast` region install the whole table or nothing; the last user removes it.
Comments say why MXNet's own attributes are not enough.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Callable, Iterator

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon.data import DataLoader, dataloader
from mxnet.kvstore import KVStore
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.numpy import _api_internal
from mxnet.symbol import Symbol

from ..backends import DEVICES, backend_of
from ..framework.arrays import cast, dtype_of
from ..framework.contrib_amp import check_contrib_is_off, refusals
from ..framework.distributed import PARAMETER_SERVER, is_distributed
from ..framework.interrupts import ending
from ..framework.patching import Original, Patch, PatchSet, locked, wrapping
from ..graph.ir import HALVES
from ..policy.active import current_policy, in_force, suspended
from ..scaling import distributed, finite, loss_outputs, trainer
from . import cached_op, eager, symbolic

# ---------------------------------------------------------------------- small replacements


def _patched_call(original: Original, self: autograd.Function, *inputs: object) -> object:
    """Call an `autograd.Function` on float32 inputs; run its backward under the same policy."""
    policy, backward = current_policy(), self.backward
    if policy is not None:
        # As Custom operators do: what a user writes by hand seldom takes mixed dtypes.
        inputs = tuple(map(_wide, inputs))

    @wraps(backward)
    def backward_of_forward(*gradients: object) -> object:
        user = object()
        with ending(casting_patches.release, user):
            casting_patches.acquire(user)
            with in_force(policy):
                return backward(*gradients)

    self.backward = backward_of_forward
    return original(self, *inputs)


def _wide(value: object) -> object:
    """Return a float16 or bfloat16 array cast to float32, and any other value unchanged."""
    if not isinstance(value, NDArray) or dtype_of(value) not in HALVES:
        return value
    return cast(value, "float32", isinstance(value, mx.np.ndarray))


def _patched_iter(original: Original, self: DataLoader) -> Iterator[Any]:
    """Yield a data loader's batches, with mixed precision off while it makes each batch."""
    batches, end = original(self), object()
    while True:
        # Suspend only the loader: the code that runs during the yield is the script's.
        with suspended():
            batch = next(batches, end)
        if batch is end:
            return
        yield batch


def _patched_thread_worker(original: Original, *args: object, **kwargs: object) -> object:
    """Run the worker function of a `DataLoader`'s thread with mixed precision off."""
    with suspended():
        return original(*args, **kwargs)


def _patched_store_call(
    original: Original, self: KVStore, key: object, value: object, *args: object, **kwargs: object
) -> object:
    """Call a `KVStore` method; raise if parameter servers can't take the dtype of an array."""
    if is_distributed(self):
        PARAMETER_SERVER.check_arrays(f"the array of key {key!r}", value)
    return original(self, key, value, *args, **kwargs)


# ---------------------------------------------------------------------- the table


#: The owner, the attribute and the function that builds its replacement, in the order in which the
#: patches are installed.
TABLE: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    # All eager calls end in this function, but for `tensordot`: cast their inputs.
    *((module, "_imperative_invoke", eager.build_invoke) for module in eager.INVOKE_MODULES),
    (_api_internal, "tensordot", wrapping(eager.patched_tensordot)),
    # The casts of a weight that is used several times share memory while autograd records.
    (autograd._RecordingStateScope, "__enter__", wrapping(eager.patched_scope_enter)),
    (autograd._RecordingStateScope, "__exit__", eager.build_scope_exit),
    # MXNet reads and writes bfloat16 arrays as raw bits, and `mx.np` makes no such arrays.
    (NDArray, "asnumpy", wrapping(eager.patched_asnumpy)),
    (mx.np.multiarray, "_new_alloc_handle", lambda _: mx.nd.ndarray._new_alloc_handle),
    *((kind, "__setitem__", wrapping(eager.patched_setitem)) for kind in (NDArray, mx.np.ndarray)),
    # Graphs are rewritten when they are about to run.
    (Symbol, "bind", wrapping(symbolic.patched_bind)),
    (Symbol, "simple_bind", wrapping(symbolic.patched_simple_bind)),
    (gluon.HybridBlock, "_call_cached_op", cached_op.build_call_cached_op),
    # `autocast` regions inside `hybrid_forward` hold in the graph.
    (mx.symbol.register, "_symbol_creator", wrapping(symbolic.patched_symbol_creator)),
    (gluon.HybridBlock, "_get_graph", wrapping(cached_op.patched_get_graph)),
    (gluon.HybridBlock, "__setattr__", wrapping(cached_op.patched_setattr)),
    # MXNet runs backward later, outside the `autocast` region around forward.
    (autograd.Function, "__call__", wrapping(_patched_call)),
    # Transforms, in threads too, are not part of the net, and OpenCV has no half precision.
    (DataLoader, "__iter__", wrapping(_patched_iter)),
    (dataloader, "_thread_worker_fn", wrapping(_patched_thread_worker)),
    # Arrays of other dtypes crash the parameter servers, and the workers hang.
    *((KVStore, name, wrapping(_patched_store_call))
      for name in ("init", "broadcast", "push", "pushpull")),
    # What kernels of a kind of device need.
    *(row for device in DEVICES for row in backend_of(device).patches()),
    # BatchNorm's running statistics of the first pass would be lost with static_shape.
    (gluon.Trainer, "_init_params", wrapping(distributed.patched_init_params)),
    # A trainer in float16 without a scaler is told of.
    (gluon.Trainer, "_update", wrapping(trainer.patched_update)),
    # The square of a norm overflows half precision.
    (gluon.utils, "clip_global_norm", wrapping(finite.patched_clip_global_norm)),
    # Custom operators that ignore the head gradient return gradients without the loss scale.
    (mx.operator.CustomOpProp, "__init__", wrapping(loss_outputs.patched_prop_init)),
)  # fmt: skip


#: The user of the patches that stands for graphs with regions in them.
GRAPHS = "graphs"


class _CastingPatches(PatchSet):
    """Reference-counted patches of `TABLE`: installed while `init` or an `autocast` needs them."""

    def __init__(self) -> None:
        super().__init__()
        self._users: set[Any] = set()

    def patches(self) -> list[Patch]:
        """Return the casting patches, and patches that make `mxnet.contrib.amp` functions raise."""
        # However they were imported, they would cast or scale a second time.
        return [*(Patch(*row) for row in TABLE), *refusals()]

    @locked
    def acquire(self, user: object) -> None:
        """Register a user of the casting patches; install them for the first user."""
        check_contrib_is_off()
        self._users.add(user)
        self.open()

    @locked
    def release(self, user: object) -> None:
        """Unregister a user of the casting patches; undo them after the last user."""
        self._users.discard(user)
        if not self._users:
            self.close()


#: Global, as MXNet's functions are: `init` and every region share the patches.
casting_patches = _CastingPatches()
