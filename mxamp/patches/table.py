"""Every patch that mixed precision installs, in one table.

`init` and each `autocast` region install the whole table or nothing; the last user removes it.
Each row names the attribute of MXNet that is replaced, the function that builds its replacement
from the original, and why MXNet's own attribute is not enough.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Callable, Iterator, NamedTuple

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon.data import DataLoader, dataloader
from mxnet.kvstore import KVStore
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.numpy import _api_internal
from mxnet.symbol import Symbol

from ..framework.arrays import cast, dtype_of, leaf_casts
from ..framework.contrib_amp import check_contrib_is_off, refusals
from ..framework.distributed import PARAMETER_SERVER, is_distributed
from ..framework.patching import Original, Patch, PatchSet, wrapping
from ..graph.casts.builder import HALVES
from ..policy.active import current_policy, pop_region, push_policy, suspended
from ..policy.policy import Policy
from ..scaling import finite, loss_outputs, trainer
from . import cached_op, eager, optimizers, symbolic

# ---------------------------------------------------------------------- small replacements


def _patched_call(original: Original, self: autograd.Function, *inputs: Any) -> Any:
    """Call a function on float32 inputs; its backward runs under forward's policy."""
    policy, backward = current_policy(), self.backward
    if policy is not None:
        # As Custom operators do: what a user writes by hand seldom takes mixed dtypes.
        inputs = tuple(map(_wide, inputs))

    @wraps(backward)
    def backward_of_forward(*gradients: Any) -> Any:
        with casting.under(policy):
            return backward(*gradients)

    self.backward = backward_of_forward
    return original(self, *inputs)


def _wide(value: Any) -> Any:
    """Return a half-precision array in float32, and anything else as it is."""
    is_half = isinstance(value, NDArray) and dtype_of(value) in HALVES
    return cast(value, "float32", isinstance(value, mx.np.ndarray)) if is_half else value


def _patched_iter(original: Original, self: DataLoader) -> Iterator[Any]:
    """Make batches without mixed precision."""
    batches = original(self)
    while True:
        # Suspend only the loader: the code that runs during the yield is the script's.
        with suspended():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def _patched_thread_worker(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run a data loader's worker without mixed precision."""
    with suspended():
        return original(*args, **kwargs)


def _patched_store_call(
    original: Original, self: KVStore, key: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call a `KVStore` method; raise on arrays that parameter servers can't take."""
    if is_distributed(self):
        PARAMETER_SERVER.check_arrays(f"the array of key {key!r}", value)
    return original(self, key, value, *args, **kwargs)


# ---------------------------------------------------------------------- the table


class Row(NamedTuple):
    """One patch."""

    owner: Any
    attribute: str
    build: Callable[[Any], Any]
    reason: str


_EAGER = "casts the inputs of eager calls, which all end in this function"
_LEAVES = "the casts of a weight that is used several times share memory while autograd records"
_VIEWS = "operators that can't read views of bfloat16 arrays read copies of them"
_BITS = "MXNet writes numbers into bfloat16 arrays as raw bits, and mx.np makes no such arrays"
_GRAPHS = "rewrites graphs that are about to run"
_MARKS = "autocast regions inside hybrid_forward hold in the graph"
_SERVERS = "arrays of other dtypes crash the parameter servers, and the workers hang"

#: In the order in which they are installed.
ALL = (
    *(Row(module, "_imperative_invoke", eager.build_invoke, _EAGER)
      for module in eager.INVOKE_MODULES),
    *(Row(autograd._RecordingStateScope, name, partial(eager.build_scope, change), _LEAVES)
      for name, change in (("__enter__", leaf_casts.begin), ("__exit__", leaf_casts.end))),
    Row(_api_internal, "tensordot", wrapping(eager.patched_tensordot), "it bypasses that function"),
    Row(NDArray, "asnumpy", wrapping(eager.patched_asnumpy), "MXNet returns bfloat16's raw bits"),
    *(Row(owner, name, wrapping(eager.patched_view), _VIEWS) for owner, names in (
        (NDArray, ("_at", "_slice", "reshape", "detach", "as_np_ndarray")),
        (mx.np.ndarray, ("reshape_view", "detach", "as_nd_ndarray"))) for name in names),
    Row(mx.np.multiarray, "_new_alloc_handle", lambda _: mx.nd.ndarray._new_alloc_handle, _BITS),
    *(Row(owner, "__setitem__", wrapping(eager.patched_setitem), _BITS)
      for owner in (NDArray, mx.np.ndarray)),
    Row(Symbol, "bind", wrapping(symbolic.patched_bind), _GRAPHS),
    Row(Symbol, "simple_bind", wrapping(symbolic.patched_simple_bind), _GRAPHS),
    Row(gluon.HybridBlock, "_call_cached_op", cached_op.build_call_cached_op, _GRAPHS),
    Row(mx.symbol.register, "_symbol_creator", wrapping(symbolic.patched_symbol_creator), _MARKS),
    Row(gluon.HybridBlock, "_get_graph", wrapping(cached_op.patched_get_graph), _MARKS),
    Row(gluon.HybridBlock, "__setattr__", wrapping(cached_op.patched_setattr), _MARKS),
    Row(autograd.Function, "__call__", wrapping(_patched_call),
        "MXNet runs backward later, outside the autocast region around forward"),
    Row(DataLoader, "__iter__", wrapping(_patched_iter),
        "transforms are not part of the net, and OpenCV has no half precision"),
    Row(dataloader, "_thread_worker_fn", wrapping(_patched_thread_worker), "the same in threads"),
    *(Row(KVStore, name, wrapping(_patched_store_call), _SERVERS)
      for name in ("init", "broadcast", "push", "pushpull")),
    Row(mx.optimizer.SGD, "_update_impl", wrapping(optimizers.patched_update_impl),
        "on few cores NumPy updates weights several times as fast, to the same bits"),
    Row(gluon.Trainer, "_update", wrapping(trainer.patched_update), "it tells of a missing scaler"),
    Row(gluon.utils, "clip_global_norm", finite.build_clip_global_norm,
        "the square of a norm overflows half precision"),
    Row(mx.operator.CustomOpProp, "__init__", loss_outputs.build_custom_op_init,
        "custom operators that ignore the head gradient return gradients without the loss scale"),
)  # fmt: skip


class _CastingPatches(PatchSet):
    """The reference-counted patches of `ALL`: installed while they have a user."""

    def __init__(self) -> None:
        super().__init__()
        self._users = 0
        self._is_held = False

    def patches(self) -> list[Patch]:
        """Return new patches for the rows of `ALL`, and those that refuse contrib's functions."""
        # However they were imported, they would cast or scale a second time.
        return [*(Patch(row.owner, row.attribute, row.build) for row in ALL), *refusals()]

    def acquire(self) -> None:
        """Add a user of the patches, and install them for the first."""
        check_contrib_is_off()
        with self._lock:
            self.open()
            self._users += 1

    def release(self) -> None:
        """Remove a user of the patches, and undo them after the last."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self.close()

    def hold_for_graphs(self, is_held: bool) -> None:
        """Add graphs that contain regions as one user of the patches, or remove that user."""
        with self._lock:
            if is_held is not self._is_held:
                self._is_held = is_held
                (self.acquire if is_held else self.release)()

    @contextmanager
    def under(self, policy: Policy | None) -> Iterator[None]:
        """Context in which `policy` is in force, with the patches installed; None is float32."""
        self.acquire()
        push_policy(policy)
        try:
            yield
        finally:
            pop_region()
            self.release()


#: Global, as MXNet's functions are: `init` and every region share the patches.
casting = _CastingPatches()
