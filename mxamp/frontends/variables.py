"""The arrays that autograd writes gradients of, whoever has asked for them.

MXNet does not list its variables, and its arrays take no weak references. So `attach_grad` and
`mark_variables` are watched, and an array is dropped when nobody else holds it any more.
"""

import functools
import sys
from typing import Any, Callable, Dict, Iterable, List, NamedTuple

import mxnet as mx
from mxnet import autograd
from mxnet.contrib import autograd as contrib_autograd
from mxnet.ndarray.ndarray import NDArray

from ..framework.patching import Patch

__all__ = ["Variable", "Variables"]

# References to an array that only `Variables` holds: its entry's, and that of the call that counts.
_OURS = 2


class Variable(NamedTuple):
    """An array that autograd writes a gradient of, and whether gradients are added up in it."""

    array: NDArray
    adds: bool

    @property
    def gradient(self) -> NDArray:
        """The array's gradient."""
        return self.array.grad


class Variables:
    """The variables there are, in order of their marking."""

    def __init__(self) -> None:
        self._variables: Dict[int, Variable] = {}

    def patches(self) -> List[Patch]:
        """Return the patches that watch for variables."""
        return [
            Patch(autograd, "mark_variables", self._build_mark),
            Patch(NDArray, "attach_grad", self._build_attach),
            Patch(mx.np.ndarray, "attach_grad", self._build_attach),
            Patch(contrib_autograd, "mark_variables", self._build_mark),
        ]

    def add(self, arrays: Iterable[NDArray], grad_req: str) -> None:
        """Take note of arrays that autograd was told to write gradients of."""
        for array in arrays:
            self._variables.pop(id(array), None)
            if grad_req != "null":
                self._variables[id(array)] = Variable(array, grad_req == "add")

    def clear(self) -> None:
        """Forget them all."""
        self._variables.clear()

    def all(self) -> List[Variable]:
        """Return the variables that there were after the last `prune`, and those marked since."""
        return list(self._variables.values())

    def prune(self) -> None:
        """Forget the variables that nobody else holds."""
        for key in [key for key, v in self._variables.items() if _only_ours(v)]:
            del self._variables[key]

    def _build_mark(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def mark_variables(variables: Any, gradients: Any, grad_reqs: Any = "write") -> None:
            original(variables, gradients, grad_reqs)
            listed = [variables] if isinstance(variables, NDArray) else list(variables)
            reqs = [grad_reqs] * len(listed) if isinstance(grad_reqs, str) else grad_reqs
            for array, grad_req in zip(listed, reqs):
                self.add([array], grad_req)

        return mark_variables

    def _build_attach(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def attach_grad(array: NDArray, grad_req: str = "write", *args: Any, **kwargs: Any) -> None:
            original(array, grad_req, *args, **kwargs)
            self.add([array], grad_req)

        return attach_grad


def _only_ours(variable: Variable) -> bool:
    return sys.getrefcount(variable.array) <= _OURS
