"""Patches that track each gradient's loss scale through backward passes and trainer steps."""

from __future__ import annotations

import gc
import logging
from contextlib import ContextDecorator
from typing import Any, Callable, Mapping, Sequence

from mxnet import autograd, gluon
from mxnet.base import _LIB, MXNetError, check_call
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.operator import CustomOpProp

from ..errors import ArgumentError, StateError
from ..framework.arrays import dtype_of, map_arrays
from ..framework.patching import FrontEnd, Original, Patch, locked, patches_of_function, wrapping
from ..framework.wording import shown
from . import float16_optimizers, loss_outputs, running, tape
from .ledger import ledger
from .running import BackwardPass

logger = logging.getLogger("mxamp")

NO_LOSS = "a loss must be an NDArray, or lists, tuples and dicts of NDArrays, not {}"
RECORDED_BEFORE = (
    "after shutdown() a loss is scaled again, and its functions or custom operators were recorded "
    "before: in this step they are given scaled gradients. Call init_trainer(trainer) before record"
)
FOREIGN = (
    "this trainer's gradients carry a loss scale, and nothing takes it out: step by the GradScaler "
    "that scaled the loss, or call init_trainer for this trainer too"
)
SCALED_CLIP = "clip_global_norm was given gradients that carry a loss scale of %g: unscale first"
NESTED_SUM = (
    "a backward pass inside an operator in Python adds to a gradient that the pass around it adds "
    'to too: use grad_req="write", or compute the shared parameter outside the operator'
)
NOT_RECORDED = "the loss depends on no parameter: compute it inside `with autograd.record():`"
SEVERAL_SCALES = "losses were scaled apart, or not all: scale them together or run backward on each"


class _Recorded(ContextDecorator, autograd._RecordingStateScope):
    """`autograd.record()` as a decorator, so that Ctrl-C can't leave recording switched on."""

    def _recreate_cm(self) -> _Recorded:
        return _Recorded(True, autograd.is_training())


_map_recorded = _Recorded(True, None)(map_arrays)


def scale_losses(loss: object, scale: float) -> Any:
    """Return losses, alone or in containers, multiplied by a loss scale.

    Raises `StateError` if a loss is scaled already.
    """
    if scale != 1:
        if not scaling_patches.is_open and running.has_python_operators():
            logger.warning(RECORDED_BEFORE)
        scaling_patches.open()
    elif not scaling_patches.is_open and isinstance(loss, NDArray):
        return loss
    arrays: list[NDArray] = []

    def scaled_in_float32(array: NDArray) -> NDArray:
        if tape.marks_behind(array):
            raise StateError("this loss has been scaled already: scale each loss once")
        arrays.append(array)
        if scale == 1:
            return array
        if dtype_of(array) not in ("float32", "float64"):
            array = array.astype("float32")  # 65504 is float16's largest number
        return tape.scaled(array, scale)

    mapped = _map_recorded(loss, scaled_in_float32, _raise_no_loss)
    if not arrays:
        _raise_no_loss(loss)
    return mapped


def _check_recorded(heads: Sequence[NDArray], status: int) -> None:
    """Raise if a backward pass failed, with advice if its loss was scaled outside `record`."""
    try:
        check_call(status)
    except MXNetError as error:
        if "There are no inputs" in str(error) and any(map(tape.marks_behind, heads)):
            raise StateError(NOT_RECORDED) from None
        raise


def _raise_no_loss(value: object) -> object:
    raise ArgumentError(NO_LOSS.format(shown(value)))


class _ScalingPatches(FrontEnd):
    """Patches of backward passes and trainers that track each gradient's loss scale."""

    def __init__(self) -> None:
        super().__init__()
        #: The open patches of `frontends.backward`, which scale and unscale inside a pass the
        #: losses that the script does not scale; None if they are not open.
        self.automatic: Any = None
        self._is_ending = False  #: whether `close` was called; scaled gradients may delay the end

    def patches(self) -> Sequence[Patch]:
        """Return the patches that track the loss scale of gradients.

        They are on backward passes, `Trainer`, norm clipping, and operators in Python.
        """
        return [
            Patch(_LIB, "MXAutogradBackwardEx", wrapping(self._patched_backward)),
            Patch(_LIB, "MXAutogradBackward", wrapping(self._patched_backward)),
            *patches_of_function(gluon.utils, "clip_global_norm", wrapping(_patched_clip)),
            Patch(Trainer, "__init__", wrapping(self._patched_init)),
            Patch(Trainer, "allreduce_grads", wrapping(_patched_allreduce)),
            *(Patch(Trainer, name, wrapping(self._patched_step)) for name in ("step", "update")),
            Patch(autograd.Function, "__call__", wrapping(loss_outputs.patched_function_call)),
            Patch(CustomOpProp, "__init__", wrapping(loss_outputs.patched_prop_init)),
        ]

    @locked
    def open(self) -> None:
        """Install the patches, for existing trainers and custom operators too."""
        self._is_ending = False
        if not self.is_open:
            super().open()
            for one in gc.get_objects():
                if issubclass(type(one), Trainer):
                    ledger.add(one)
                elif issubclass(type(one), CustomOpProp):
                    loss_outputs.scale_operators(one)

    def close(self) -> None:
        """Undo the patches, now or after the step that uses the last scaled gradients."""
        self._is_ending = True
        self.end()

    def end(self) -> None:
        """Undo the patches if `close` was called and no backward pass or step still needs them."""
        if not self._is_ending or running.is_any_running():
            return
        if not any(map(ledger.has_scaled, ledger.known())):
            super().close()
            ledger.clear()
            tape.end_scaling()

    def _patched_backward(
        self, original: Original, count: int, heads: Any, head_grads: Any, *others: Any
    ) -> int:
        """Run a backward pass of MXNet's C API, and record the loss scale of its gradients.

        `autograd.backward`, `NDArray.backward` and `autograd.grad` end here, also where a script
        holds one of them from before the patches.
        """
        arrays = tape.arrays_of(heads)
        head_gradients = tape.arrays_of(head_grads) if head_grads else None
        # MXAutogradBackwardEx also takes the number of the variables of `grad`, their handles, and
        # create_graph.
        variables, _, retain, create = others[:4] if others[3:] else (0, None, others[0], None)
        is_grad = variables > 0
        automatic = None if is_grad else self.automatic
        this_pass = BackwardPass(arrays, head_gradients)
        this_pass.frees = not retain.value

        def compute(gradients: Any = head_gradients) -> None:
            starts, handles = heads, head_grads
            if is_grad and create.value:  # a gradient that may be differentiated again
                losses, gradients = tape.unscaled_heads(arrays, gradients)
                starts = tape.handles_of(losses)
            if gradients is not head_gradients:
                handles = tape.handles_of(gradients)
            loss_outputs.set_scales(this_pass)
            _check_recorded(arrays, original(count, starts, handles, *others))

        outer = running.current()
        if outer is not None:
            this_pass.scale, this_pass.outer = outer.scale, outer.backward_pass
            if is_grad or outer.given_scale is None:
                compute()
            else:
                _run_nested(compute, this_pass, this_pass.outer, automatic)
            return 0
        marks = [tape.marks_behind(head) for head in arrays]
        this_pass.scale = _common_scale(marks)
        if is_grad:
            running.run(this_pass, compute)
        elif automatic is not None and not any(marks):  # the script has scaled no loss itself
            automatic.run(compute, this_pass)
        else:
            with ledger.recording(this_pass, this_pass.scale):
                running.run(this_pass, compute)
            # Passes inside this one have left gradients at scales of their own.
            ledger.rescale(ledger.behind(this_pass.inner), this_pass.scale)
        if this_pass.frees:
            tape.forget(name for found in marks for name in found)
            # `set_scales` has cached the names if there are output operators.
            loss_outputs.forget(vars(this_pass).get("names", ()))
        return 0

    def _patched_init(
        self, original: Original, trainer: Trainer, *args: object, **named: object
    ) -> None:
        """Call `Trainer.__init__`, and track the loss scales of the trainer's gradients."""
        original(trainer, *args, **named)
        ledger.add(trainer)

    def _patched_step(
        self, original: Original, trainer: Trainer, *args: object, **named: object
    ) -> None:
        """Call `Trainer.step`; raise if its gradients are scaled and nothing unscales them."""
        ledger.add(trainer)  # a copied trainer has run no constructor
        state = getattr(trainer, "_amp_loss_scaler", None)
        is_ours = hasattr(state, "note_scaled")  # a `State`, not a scaler of contrib's
        if not is_ours and ledger.has_scaled(trainer):
            raise StateError(FOREIGN)
        try:
            original(trainer, *args, **named)
        finally:
            float16_optimizers.divide_updates(trainer._optimizer, 1.0)
        ledger.end_step(trainer)
        self.end()


def _common_scale(marks: Sequence[Mapping[str, float]]) -> float:
    """Return the one loss scale of a backward pass's losses; raise if they have several."""
    scales = {scale for found in marks for scale in found.values()}
    if len(scales) > 1 or (scales and not all(marks)):
        raise StateError(SEVERAL_SCALES)
    return scales.pop() if scales else 1.0


def _run_nested(
    compute: Callable[[], None], this_pass: BackwardPass, outer: BackwardPass, automatic: Any
) -> None:
    """Run a backward pass that starts inside the backward of a custom operator or Function.

    It has the scale of the gradients that the operator was given, and `outer` is the pass that the
    operator belongs to. Raises `StateError` if both passes add to one gradient, with different
    scales.
    """
    if automatic is not None and this_pass.scale != outer.scale:
        automatic.run_scaled(compute, this_pass, outer.scale / this_pass.scale)
        return
    both = ledger.behind(this_pass.names & outer.names)
    if this_pass.scale != outer.scale and any(entry.adds for entry in both):
        raise StateError(NESTED_SUM)
    with ledger.recording(this_pass, this_pass.scale):
        compute()
    outer.inner |= this_pass.names


def _patched_clip(original: Original, arrays: Any, *args: object, **named: object) -> object:
    """Call `gluon.utils.clip_global_norm`; warn if a gradient is still multiplied by a scale."""
    scale = ledger.largest_scale(arrays)
    if scale != 1:
        logger.warning(SCALED_CLIP, scale)
    return original(arrays, *args, **named)


def _patched_allreduce(original: Original, trainer: Trainer) -> None:
    """Call `Trainer.allreduce_grads`, and record it so that the next step does not sum again."""
    ledger.equalize(trainer)
    original(trainer)
    ledger.note_sum(trainer)


#: Global: the functions that it patches are.
scaling_patches = _ScalingPatches()
