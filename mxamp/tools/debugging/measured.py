"""What measurements of a net share: a deep copy, equal random numbers, a loss and its gradients."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.gluon import Block
from mxnet.gluon.parameter import DeferredInitializationError
from mxnet.ndarray.ndarray import NDArray

from ...convert.outputs import error_reason
from ...errors import AmpError, ArgumentError, StateError
from ...framework.arrays import cast, dtype_of, map_arrays
from ...framework.patching import original
from ...framework.wording import counted, shown
from ...policy.active import suspended
from ...scaling.loss_outputs import scaled_outputs
from .blocks import blocks_in

_SEED = 20180201
#: `autograd.backward` without the front ends' patches, which scale losses.
_backward = original(autograd, "backward")

NOT_ON_BATCH = "block {name!r} does not run on this batch of {arrays}: {why}{hint}"
UNLABELED = (
    ". Without {label_by}, a batch holds the net's arguments only; if its last element is the "
    "label, pass {label_by} too"
)
NO_LOSS_VALUE = (
    "the loss must return an NDArray that is computed from the net's output, not {given}"
)
#: MXNet's errors for a loss that was not recorded.
_NOT_RECORDED = "not in a computational graph", "no inputs in computation graph"


def copied(net: Block, inputs: Sequence[Any]) -> Block:
    """Return a deep copy of `net`, without trainers and hooks, hybridized where it can be traced.

    `inputs` are the arguments of a first call, of the copy.
    """
    for hybridized in (True, False):
        made = _deep_copy(net)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of blocks that could be hybrid as a whole
                made.hybridize(hybridized)
            with suspended(), autograd.pause(train_mode=False):
                made(*inputs)
        except (DeferredInitializationError, RuntimeError) as error:
            if not hybridized or "initialized" in str(error):
                raise StateError(f"block {net.name!r} does not run: {error}") from None
        except Exception:  # the user's own code runs in the trace
            if not hybridized:
                raise
        else:
            return made
    raise AssertionError


def _deep_copy(net: Block) -> Block:
    """Return a copy of a net with arrays of its own, and none of its cached ops and trainers."""
    blocks, params = blocks_in(net), list(net.collect_params().values())
    left_out = [getattr(block, "_cached_op", None) for block in blocks]
    left_out += [param._trainer for param in params]
    try:
        made: Block = copy.deepcopy(net, {id(one): None for one in left_out if one is not None})
    except TypeError as error:
        raise StateError(f"block {net.name!r} can't be copied: {error}") from None
    for block in blocks_in(made):
        block._forward_hooks.clear()
        block._forward_pre_hooks.clear()
    for param in made.collect_params().values():
        if param.grad_req != "null":
            # A copied array has lost its gradient.
            param.grad_req = "null"
            param.grad_req = "write"
    return made


@contextlib.contextmanager
def alike_numbers() -> Iterator[Callable[[], None]]:
    """Context with a function that makes the random numbers after each call of it the same.

    MXNet's generator continues from a number drawn before, since its state can't be read.
    """
    states = random.getstate(), np.random.get_state()
    with suspended(), autograd.pause():
        resume_from = int(mx.nd.random.randint(0, 2**31 - 1).asscalar())

    def seed() -> None:
        random.seed(_SEED)
        np.random.seed(_SEED)
        mx.random.seed(_SEED)

    try:
        yield seed
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        mx.random.seed(resume_from)


@contextlib.contextmanager
def explained_errors(
    net: Block, inputs: Sequence[Any], labeled: bool, label_by: str = "loss="
) -> Iterator[None]:
    """Context that raises `ArgumentError` for Python's errors where `net` does not take `inputs`.

    `label_by` names the arguments that make the last element of a batch its label.
    """
    try:
        yield
    except AmpError:
        raise
    except (TypeError, ValueError) as error:  # ValueError: while it infers a deferred shape
        count = len(arrays_in(inputs))
        arrays = counted(count, "array") + (" and a label" if labeled else "")
        hint = "" if labeled or count == 1 else UNLABELED.format(label_by=label_by)
        why = error_reason(error)
        message = NOT_ON_BATCH.format(name=net.name, arrays=arrays, why=why, hint=hint)
        raise ArgumentError(message) from error  # it may be of the user's own code


def arrays_in(value: Any) -> list[NDArray]:
    """Return all arrays in nested lists, tuples and dicts as a flat list."""
    arrays: list[NDArray] = []
    map_arrays(value, arrays.append, lambda other: other)
    return arrays


def dense_values(array: NDArray) -> Any:
    """Return an array's values as a float32 NumPy array."""
    with suspended():
        dense = array if array.stype == "default" else array.tostype("default")
        return cast(dense, "float32").asnumpy()


def loss_of(loss: Callable[[Any, Any], Any], output: Any, label: Any) -> Any:
    """Return the loss of an output; raise `ArgumentError` if the function returns no array."""
    found = loss(output, label)
    if not arrays_in(found):
        raise ArgumentError(NO_LOSS_VALUE.format(given=shown(found)))
    return found


def gradients_of(loss: Any, net: Block, scale: float) -> dict[str, NDArray]:
    """Return the gradients of a recorded loss times a scale, by name of the net's parameter."""
    params = [param for param in net.collect_params().values() if param.grad_req != "null"]
    # backward skips parameters that the loss does not depend on.
    for gradient in (param.list_grad()[0] for param in params):
        if gradient.stype == "default":
            gradient[:] = 0
        else:
            mx.nd.sparse.zeros_like(gradient, out=gradient)
    with suspended(), autograd.record():
        heads = [_in_float32(one) * scale for one in arrays_in(loss)]
    with suspended(), autograd.pause(), scaled_outputs(scale):
        try:
            _backward(heads)
        except MXNetError as error:
            if not any(words in str(error) for words in _NOT_RECORDED):
                raise
            raise ArgumentError(NO_LOSS_VALUE.format(given="one of other values")) from None
    return {param.name: param.list_grad()[0] for param in params}


def _in_float32(loss: NDArray) -> NDArray:
    return loss if dtype_of(loss) in ("float32", "float64") else loss.astype("float32")
