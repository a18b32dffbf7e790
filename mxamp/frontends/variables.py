"""Registry of autograd's variables: the arrays for which it computes gradients.

MXNet does not list them. The garbage collector finds the variables marked before the patches;
patches of `attach_grad` and `mark_variables` see later ones. A variable that Python does not hold
is forgotten when a pass frees its tape, or many others came after it.
"""

import gc
import sys
from typing import AbstractSet, Any, Dict, Iterable, List, NamedTuple, Sequence, Tuple, Union

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Parameter
from mxnet.ndarray.ndarray import NDArray

from ..framework.arrays import address, shallow_copy
from ..framework.patching import Original, Patch, patches_of_function, wrapping
from ..scaling.tape import name_of

# The number of variables that are kept for a tape alone, the last ones.
_UNHELD = 64
# References to an array that only `Variables` holds: by its entry, and the argument of getrefcount.
_OURS = 2

Arrays = Union[NDArray, Sequence[NDArray]]


class Variable(NamedTuple):
    """An array with a gradient, and whether backward passes add to it (`grad_req="add"`)."""

    array: NDArray
    adds: bool


class Variables(Dict[str, Variable]):
    """All arrays with a gradient, keyed by their names on autograd's tape, in creation order."""

    def patches(self) -> List[Patch]:
        """Return the monkey patches that record each array to which a gradient is attached."""
        return [
            *patches_of_function(autograd, "mark_variables", wrapping(self._patched_mark)),
            Patch(NDArray, "attach_grad", wrapping(self._patched_attach)),
            Patch(mx.np.ndarray, "attach_grad", wrapping(self._patched_attach)),
        ]

    def add_existing(self) -> None:
        """Record arrays that had a gradient before the patches, by scanning Python's heap."""
        objects = gc.get_objects()
        # Only parameters know their `grad_req`. For other arrays "add" is the safe guess: the old
        # gradient is scaled too, and a write replaces it.
        for array in objects:
            if issubclass(type(array), NDArray) and array.handle and array.grad is not None:
                self.add([array], "add")
        for param in objects:
            if issubclass(type(param), Parameter) and param._grad is not None:
                self.add(param._data, param.grad_req)

    def add(self, arrays: Iterable[NDArray], grad_req: str) -> None:
        """Record arrays as autograd's variables, unless `grad_req` is "null"."""
        for array in arrays if grad_req != "null" else ():
            self[name_of(array)] = Variable(array, grad_req == "add")

    def behind(self, names: Iterable[str]) -> List[Variable]:
        """Return the recorded variables with these names on autograd's tape."""
        return [self[name] for name in names if name in self]

    def prune(self, freed: AbstractSet[str]) -> None:
        """Forget arrays that only this registry references, if their tape is freed (`freed`).

        Of those whose tape may live, the newest `_UNHELD` stay.
        """
        unheld = [name for name, one in list(self.items()) if sys.getrefcount(one.array) <= _OURS]
        for i, name in enumerate(reversed(unheld)):
            if name in freed or i >= _UNHELD:
                self.pop(name, None)

    def _patched_mark(
        self, original: Original, variables: Arrays, gradients: object, grad_reqs: Any = "write"
    ) -> None:
        """Call `autograd.mark_variables`, and record its arrays as variables."""
        listed = [variables] if isinstance(variables, NDArray) else list(variables)
        for array in listed:
            self._keep_gradient(array)
        original(variables, gradients, grad_reqs)
        reqs = [grad_reqs] * len(listed) if isinstance(grad_reqs, str) else grad_reqs
        for array, grad_req in zip(listed, reqs):
            self.add([array], grad_req)

    def _patched_attach(
        self, original: Original, array: NDArray, grad_req: str = "write", *args: Any, **kwargs: Any
    ) -> None:
        """Call `NDArray.attach_grad`, and record the array as a variable."""
        self._keep_gradient(array)
        original(array, grad_req, *args, **kwargs)
        self.add([array], grad_req)

    def _keep_gradient(self, array: NDArray) -> None:
        """Keep an array's old gradient when it gets a new one: the tape may write to the old."""
        name = name_of(array)
        before = self.get(name)
        if before is not None:
            # To autograd the copy is the array as it was before.
            self[name] = Variable(shallow_copy(array), before.adds)


def by_gradient(variables: Iterable[Variable]) -> List[List[Variable]]:
    """Group arrays by gradient buffer, since several arrays may share one."""
    groups: Dict[Tuple[int, int], List[Variable]] = {}
    for variable in variables:
        gradient, key = variable.array.grad, (-id(variable), 0)
        if gradient.stype == "default":  # sparse arrays know no size
            key = (address(gradient) or key[0], gradient.size)
        groups.setdefault(key, []).append(variable)
    return list(groups.values())
