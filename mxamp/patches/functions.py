"""The patch of `autograd.Function`: its backward runs under the policy of its forward.

MXNet calls `backward` later, outside of any `autocast` region around the forward pass, and in a
thread of its own.
"""

import functools
from typing import Any, Callable, List

from mxnet import autograd

from ..framework.patching import Patch
from ..policy.active import current_policy

__all__ = ["patches"]


def patches(region: Callable[[Any], Any]) -> List[Patch]:
    """Return the patch; `region` makes the context that a policy, or None, is in force in."""
    return [Patch(autograd.Function, "__call__", functools.partial(_build_call, region))]


def _build_call(region: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(self: autograd.Function, *inputs: Any) -> Any:  # noqa: N807
        policy, backward = current_policy(), self.backward

        @functools.wraps(backward)
        def backward_of_forward(*gradients: Any) -> Any:
            with region(policy):
                return backward(*gradients)

        self.backward = backward_of_forward
        return original(self, *inputs)

    return __call__
