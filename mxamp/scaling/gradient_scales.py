"""The scales that a trainer's gradients carry, before a backward pass and after it."""

from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Tuple

from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from .finite import multiply

__all__ = ["GradientScales", "MixedGradients", "gradients_of"]


@dataclass(frozen=True)
class GradientScales:
    """The scale of a trainer's fresh gradients, but for some, by `id` of the parameters' arrays."""

    scale: float
    others: Dict[int, float] = field(default_factory=dict)

    def of(self, array: NDArray) -> float:
        """Return the scale of the gradient of a parameter's array."""
        return self.others.get(id(array), self.scale)


class MixedGradients:
    """The gradients of a trainer around a pass that brings another scale than they carry."""

    def __init__(self, trainer: Trainer, scales: GradientScales, scale: float) -> None:
        self.trainer, self._scales, self._scale = trainer, scales, scale
        self._fresh: List[NDArray] = []
        self._added_to: List[Tuple[NDArray, NDArray, NDArray]] = []

    def begin(self) -> None:
        """Clear the flags of fresh gradients; rescale those that the pass may add to."""
        for grad_req, data, gradient in gradients_of(self.trainer):
            if data._fresh_grad:
                self._fresh.append(data)
                data._fresh_grad = False
            if grad_req == "add":  # also to what an earlier step has used
                with autograd.pause():
                    self._added_to.append((data, gradient, gradient.copy()))
                multiply([gradient], self._scale / self._scales.of(data))

    def end(self) -> GradientScales:
        """Set the flags again; return the scales of the gradients that are fresh now."""
        others = {}
        for data, gradient, before in self._added_to:
            if not data._fresh_grad:
                with autograd.pause():
                    before.copyto(gradient)
                others[id(data)] = self._scales.of(data)
        for data in self._fresh:
            if not data._fresh_grad:
                data._fresh_grad = True
                others[id(data)] = self._scales.of(data)
        return GradientScales(
            self._scale, {key: x for key, x in others.items() if x != self._scale}
        )


def gradients_of(trainer: Trainer) -> Iterator[Tuple[str, NDArray, NDArray]]:
    """Yield `grad_req`, array and gradient of a trainer's parameters on each device."""
    for param in trainer._params:
        if param.grad_req != "null" and param._grad is not None:
            for data, gradient in zip(param.list_data(), param.list_grad()):
                yield param.grad_req, data, gradient
