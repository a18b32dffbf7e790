"""The patches that any policy needs, put in place and taken off by those who need them."""

from contextlib import contextmanager
from typing import Iterator, List, Optional, Sequence

from ..framework.patching import Patch, PatchSet
from ..policy.active import enter_region, leave_region
from ..policy.policy import Policy
from ..scaling.finite import clip_patch
from ..scaling.loss_outputs import custom_op_patch
from . import (
    cached_op,
    data_loading,
    eager,
    functions,
    horovod,
    kvstores,
    marks,
    optimizers,
    symbolic,
)

__all__ = ["casting"]


class _CastingPatches(PatchSet):
    """The patches that any policy needs, in place while somebody needs them."""

    def __init__(self) -> None:
        super().__init__()
        self._users = 0
        self._is_held = False

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        calls: List[Patch] = [*eager.patches(), *symbolic.patches(), *cached_op.patches()]
        calls += [*marks.patches(), *functions.patches(self.under), *data_loading.patches()]
        calls += [*kvstores.patches(), *horovod.patches()]
        return [*calls, *optimizers.patches(), clip_patch(), custom_op_patch()]

    def acquire(self) -> None:
        """Put them in place for one more user."""
        with self._lock:
            self.open()
            self._users += 1

    def release(self) -> None:
        """Take them off with the last user."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self.close()

    def hold(self, wanted: bool) -> None:
        """Keep them until `shutdown`, for graphs that enter regions themselves; or no longer."""
        with self._lock:
            if wanted is not self._is_held:
                self._is_held = wanted
                (self.acquire if wanted else self.release)()

    @contextmanager
    def under(self, policy: Optional[Policy]) -> Iterator[None]:
        """Have a policy in force inside, or none."""
        self.acquire()
        enter_region(policy)
        try:
            yield
        finally:
            leave_region()
            self.release()


#: One a process: `init` and every `autocast` region use the same patches.
casting = _CastingPatches()
