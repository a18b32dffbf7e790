"""The arrays that autograd writes gradients of, whoever has asked for them.

MXNet does not list its variables. So the garbage collector finds those marked before the patches,
and `attach_grad` and `mark_variables` are watched from then on. A variable is forgotten when nobody
else holds it or its gradient: a graph may still write that gradient.
"""

import functools
import gc
import sys
from types import ModuleType
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.contrib import autograd as contrib_autograd
from mxnet.gluon import Parameter
from mxnet.ndarray.ndarray import NDArray

from ..framework.arrays import address, holders, shallow_copy
from ..framework.patching import Patch, original

__all__ = ["Variable", "Variables", "by_gradient", "imported", "parameters_without_gradients"]

# References to an array that only `Variables` holds: its entry's, and that of the call that counts.
_OURS = 2
# Holders of an array's memory, and of its gradient's, where nobody else has them: autograd, and the
# Python object that asks.
_OUR_HOLDERS = 2


class Variable(NamedTuple):
    """An array that autograd writes a gradient of, and whether gradients are added up in it.

    `marked_again`: the array has another gradient since; graphs from before still write this one.
    """

    array: NDArray
    adds: bool
    marked_again: bool = False

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
            *imported(autograd, "mark_variables", self._build_mark),
            *imported(contrib_autograd, "mark_variables", self._build_mark),
            Patch(NDArray, "attach_grad", self._build_attach),
            Patch(mx.np.ndarray, "attach_grad", self._build_attach),
        ]

    def find(self) -> None:
        """Add the variables that there are already, as far as Python holds them."""
        gc.collect()  # arrays that are gone get no gradients
        objects = gc.get_objects()
        # Only parameters know their `grad_req`. Where it is unknown, "add" is the safe guess: what
        # an array held before is scaled with it, and then overwritten or not.
        for array in objects:
            if issubclass(type(array), NDArray) and array.handle and array.grad is not None:
                self.add([array], "add")
        for param in objects:
            if issubclass(type(param), Parameter) and param._grad is not None:
                self.add(param._data, param.grad_req)

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
            listed = [variables] if isinstance(variables, NDArray) else list(variables)
            for array in listed:
                self._keep_gradient(array)
            original(variables, gradients, grad_reqs)
            reqs = [grad_reqs] * len(listed) if isinstance(grad_reqs, str) else grad_reqs
            for array, grad_req in zip(listed, reqs):
                self.add([array], grad_req)

        return mark_variables

    def _build_attach(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def attach_grad(array: NDArray, grad_req: str = "write", *args: Any, **kwargs: Any) -> None:
            self._keep_gradient(array)
            original(array, grad_req, *args, **kwargs)
            self.add([array], grad_req)

        return attach_grad

    def _keep_gradient(self, array: NDArray) -> None:
        """Keep an array as a variable of its own with the gradient that it is about to lose."""
        before = self._variables.get(id(array))
        if before is not None and holders(before.gradient) > _OUR_HOLDERS:
            copy = shallow_copy(array)
            self._variables[id(copy)] = Variable(copy, before.adds, marked_again=True)


def _only_ours(variable: Variable) -> bool:
    return (
        sys.getrefcount(variable.array) <= _OURS
        and (variable.marked_again or holders(variable.array) <= _OUR_HOLDERS)
        and holders(variable.gradient) <= _OUR_HOLDERS
    )


def by_gradient(variables: Iterable[Variable]) -> List[List[Variable]]:
    """Group variables that share the memory of one gradient."""
    groups: Dict[Tuple[int, int], List[Variable]] = {}
    for variable in variables:
        gradient = variable.gradient
        groups.setdefault((address(gradient) or -id(variable), gradient.size), []).append(variable)
    return list(groups.values())


def parameters_without_gradients() -> List[NDArray]:
    """Return the arrays of all such parameters: BatchNorm's running statistics among them."""
    params = [param for param in gc.get_objects() if issubclass(type(param), Parameter)]
    frozen = (p for p in params if p.grad_req == "null" and p._data is not None)
    return [array for param in frozen for array in param._data]


def imported(owner: Any, name: str, build: Callable[..., Any]) -> List[Patch]:
    """Return the patches of a function, and of its name in modules that have imported it."""
    functions = original(owner, name), getattr(owner, name)
    modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    holding = [
        m for m in modules if m is not owner and any(vars(m).get(name) is one for one in functions)
    ]
    return [Patch(module, name, build) for module in (owner, *holding)]
