"""Causes of Inf and NaN: precision, a learning rate, the data, or an operator itself."""

from __future__ import annotations

from contextlib import suppress

from mxnet import MXNetError, autograd, cpu, nd
from mxnet.ndarray.ndarray import NDArray

from ...framework.arrays import as_list, invoke
from ...framework.data import own_tables
from ...framework.operators import handle_of, with_trait
from .observing import Inputs, Observed, Place

#: Weights are compared with their values of at most so many steps before.
_STEPS = 100
#: The growth of a weight in these steps that only a learning rate that is too high explains.
_GROWN = 8
#: No net begins with larger weights; the squares of larger values are infinite in float32.
_LARGE_WEIGHT, _LARGE_VALUE = 1e4, 1e19

_DATA = "scale the data down"
_FAILS = "scale the data or the loss down, lower the learning rate, or correct the model"
_MAY_FAIL = f"train some steps without mixed precision: if they fail too, {_FAILS}"


class Causes:
    """Record of weights, data and operators of a run, to find the cause of Inf and NaN."""

    def __init__(self) -> None:
        #: A step, the largest magnitude of an array with a gradient then, and the array, by name.
        self.weights: dict[str, tuple[int, float, NDArray]] = {}
        #: The last step, and the largest magnitude of the data in any step.
        self._data = (0, 0.0)
        self.has_float16 = False
        #: The cure of an operator of the pass whose output is 0, where its gradient is infinite.
        self.at_zero = ""

    def add_input(self, step: int, name: str, array: NDArray, is_weight: bool) -> None:
        """Record the largest magnitude in an input of an operator: a weight, or data."""
        if not is_weight:
            if self._data[0] < step:
                self._data = step, max(self._data[1], Observed(array).largest)
        elif name not in self.weights or step - self.weights[name][0] >= _STEPS:
            self.weights[name] = step, Observed(array).largest, array

    def add_output(self, site: Place, output: Observed) -> None:
        """Record a float16 output, and a 0 from an operator whose gradient there is infinite."""
        self.has_float16 |= output.dtype == "float16"
        write = own_tables("operators")["infinite_gradient_at_zero"].get(site.operator)
        is_root = write and float(site.attributes.get("scalar", 0)) < 1
        if is_root and autograd.is_training() and (output.values == 0).any():
            self.at_zero = f"{site.operator} in {site.node!r} has no gradient at 0: write {write}"

    def cure(self, site: Place, inputs: Inputs | None, overflows: bool) -> str:
        """Return advice against Inf or NaN other than a higher precision; "" if that is the cure.

        `inputs` are those of an operator in a forward pass, and None in a backward pass.
        """
        if inputs is None:
            # In eager code the site is that of a leaf: the gradient overflowed behind it.
            precision = "" if site.layers else "scale the loss down"
            fails = precision if overflows and self.has_float16 else _FAILS
            return self.at_zero or self._cure_of_values() or fails
        write = own_tables("operators")["infinite_at_zero"].get(site.operator)
        zeros = (one for one in inputs[-1:] if one and (one.values == 0).any())
        if write and any("/" in write or not (one.values < 0).any() for one in zeros):
            return f"write {write}"
        return self._cure_of_values() or _cure_in_float32(site, inputs)

    def _cure_of_values(self) -> str:
        """Return advice if the data or a weight is too large, or a weight has grown; else ""."""
        if self._data[1] > _LARGE_VALUE:
            return _DATA
        for name, (step, first, weight) in self.weights.items():
            now = Observed(weight).largest
            if first > _LARGE_WEIGHT:
                return f"initialize {name} smaller: it holds {first:.3g} in step {step}"
            if now > _GROWN * max(first, 0.3):
                grown = f"{name} grew from {first:.3g} in step {step} to {now:.3g}"
                return f"lower the learning rate: {grown}"
        return ""


def _cure_in_float32(site: Place, inputs: Inputs) -> str:
    """Rerun an operator in float32; return advice if its output is still not finite, else ""."""
    read = [one for one in inputs if one is not None]
    if any(one.largest > _LARGE_VALUE for one in read):
        return _DATA
    if len(read) < len(inputs) or site.operator in with_trait("not_repeatable"):
        return _MAY_FAIL
    options = {key: "float32" if key == "dtype" else text for key, text in site.attributes.items()}
    with suppress(MXNetError), autograd.pause(autograd.is_training()):
        copies = [nd.array(one.values, cpu()) for one in read]
        keys, texts, handle = [*options], [*options.values()], handle_of(site.operator)
        made = as_list(invoke(handle, copies, keys, texts, None, False, False))
        if all((abs(one.asnumpy()) < _LARGE_VALUE).all() for one in made):
            return ""
        return str(own_tables("operators")["not_finite"].get(site.operator, _FAILS))
    return _MAY_FAIL
