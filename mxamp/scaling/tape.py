"""Autograd's tape: find the scaled losses and variables that a backward pass depends on.

MXNet names each marked array and each input of a recorded call ("var17", "null3"); no other array
of the process has that name, and the tape lists the names behind a head. A scaled loss is the
loss times a one-element array, its mark, whose name stands for the scale.

Every loss has a mark of its own. MXNet clears the tape's entry of an input that has no gradient in
the pass that frees the tape: losses with one mark could not run backward one after another.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import weakref
from functools import lru_cache
from typing import Any, Iterable, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, MXNetError, NDArrayHandle, c_array, check_call
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.sparse import _ndarray_cls

from ..errors import StateError
from ..framework.arrays import dtype_of, shallow_copy
from ..policy.active import suspended

TOO_LARGE = "a loss scale of {:g} is not between 2**-126 and 2**127, the range of float32"


class ScaleMark(NamedTuple):
    """The record of a scaled loss: the scale, and the array by which the loss was multiplied."""

    scale: float
    factor: NDArray  #: the array that holds the scale
    product: Any  #: weak reference to the handle of the scaled loss, which has the loss itself


#: `grad_req="null"` of one array.
_NO_GRADIENT = (ctypes.c_uint * 1)(0)
#: Marks by their names. A tape can outlive the loss, so a mark stays until a pass frees its tape.
_marks: dict[str, ScaleMark] = {}


@lru_cache(maxsize=64)
def _factor(ctx: Any, dtype: str, scale: float, ndim: int, is_numpy: bool) -> NDArray:
    """Return a one-element array that holds a loss scale, to multiply losses by; cached."""
    with autograd.pause(), suspended(), mx.util.np_shape(is_numpy):
        # By an operator: a copy from the host would wait on GPUs.
        array = mx.nd.full((1,) * (ndim if is_numpy else max(ndim, 1)), scale, ctx, dtype)
    return array.as_np_ndarray() if is_numpy else array


def marked(array: NDArray) -> NDArray:
    """Return an alias of an array as a newly named variable on autograd's tape, without gradient.

    By that name the array's use is found in a recorded graph.
    """
    copied = shallow_copy(array)
    handles = c_array(NDArrayHandle, [copied.handle])
    check_call(_LIB.MXAutogradMarkVariables(1, handles, _NO_GRADIENT, handles))
    return copied


def scaled(loss: NDArray, scale: float) -> NDArray:
    """Return a loss times a loss scale, recorded so that a backward pass can find the scale.

    Raises `StateError` if float32 can't hold the scale.
    """
    if not 2.0**-126 <= scale <= 2.0**127:
        raise StateError(TOO_LARGE.format(scale))
    is_numpy = isinstance(loss, mx.np.ndarray)
    factor = _factor(loss.context, dtype_of(loss), scale, loss.ndim, is_numpy)
    mark = marked(factor)
    with suspended():
        product = loss * mark if is_numpy else mx.nd.broadcast_mul(loss, mark)
    product.handle._amp_loss = loss
    _marks[name_of(mark)] = ScaleMark(scale, factor, weakref.ref(product.handle))
    return product


def unscaled_heads(
    heads: Sequence[NDArray], head_grads: Sequence[Any] | None
) -> tuple[list[NDArray], list[Any]]:
    """Return the losses before scaling, and head gradients multiplied by the scale instead.

    MXNet can't differentiate a multiplication twice, so a second derivative begins here.
    """
    losses, gradients = list(heads), list(head_grads or [None] * len(heads))
    for i, head in enumerate(heads):
        for name in _mark_of(autograd.get_symbol(head)) or ():
            mark = _marks[name]
            loss = getattr(mark.product(), "_amp_loss", None)
            if loss is not None:
                with autograd.pause(), suspended():
                    given = loss.ones_like() if gradients[i] is None else gradients[i]
                    losses[i], gradients[i] = loss, given * mark.scale
    return losses, gradients


def forget(names: Iterable[str]) -> None:
    """Drop the records of scaled losses whose tape autograd has freed."""
    for name in names:
        _marks.pop(name, None)


def end_scaling() -> None:
    """Reset to 1 the loss scale of all scaled losses that still await a backward pass."""
    factors = {id(mark.factor): mark.factor for mark in list(_marks.values())}
    _marks.clear()
    _factor.cache_clear()
    with autograd.pause(), suspended(), mx.util.np_shape(True):
        for factor in factors.values():
            factor.__imul__(0).__iadd__(1)


atexit.register(_factor.cache_clear)  # before MXNet's library is unloaded
atexit.register(_marks.clear)


# ------------------------------------------------------------------------ reading the tape


def arrays_of(handles: Any) -> list[Any]:
    """Return NDArrays for C API handles, as aliases that share their entries on autograd's tape."""
    found: list[Any] = []
    for one in handles:
        copied = NDArrayHandle()
        if one:
            check_call(_LIB.MXShallowCopyNDArray(NDArrayHandle(one), ctypes.byref(copied)))
        found.append(_ndarray_cls(copied) if one else None)
    return found


def handles_of(arrays: Sequence[NDArray | None]) -> Any:
    """Return the C API handles of arrays as a C array."""
    handles = [NDArrayHandle(0) if array is None else array.handle for array in arrays]
    return c_array(NDArrayHandle, handles)


def _symbol_of(array: NDArray) -> mx.sym.Symbol | None:
    """Return the graph that autograd recorded for an array; None if it recorded none."""
    try:
        return autograd.get_symbol(array)
    except MXNetError:
        return None


def name_of(array: NDArray) -> str:
    """Return the name of an array on autograd's tape; "" if it is not on the tape.

    Takes some 2 us.

    An array gets another name when it is marked again: by `attach_grad`, and where a parameter's
    `grad_req`, dtype or device changes.
    """
    symbol = _symbol_of(array)
    return "" if symbol is None else str(symbol.name)


def names_behind(heads: Iterable[NDArray]) -> set[str]:
    """Return the tape's names of all inputs and variables that heads depend on."""
    symbols = [symbol for symbol in map(_symbol_of, heads) if symbol is not None]
    return {name for symbol in symbols for name in symbol.list_inputs()}


def marks_behind(head: NDArray) -> dict[str, float]:
    """Return the loss scales of the scaled losses that a head depends on, by tape name.

    A head that is a scaled loss itself counts too.

    Marks behind a BlockGrad, which no gradient reaches, are left out. Takes some 5 us for a head
    that is a scaled loss itself.
    """
    symbol = _symbol_of(head) if _marks else None
    if symbol is None:
        return {}
    own = _mark_of(symbol)
    if own or own is None or _marks.keys().isdisjoint(symbol.list_inputs()):
        return own or {}
    found, waiting, seen = {}, [symbol], set()
    while waiting:
        for child in waiting.pop().get_children():
            own = _mark_of(child)
            if own is None:  # a variable: a part of the head is no scaled loss
                return _marks_in(json.loads(symbol.tojson()))
            found.update(own)
            if not own and child.name not in seen:
                seen.add(child.name)
                waiting.append(child)
    return found


def _mark_of(symbol: mx.sym.Symbol) -> dict[str, float] | None:
    """Return {tape name: scale} if a recorded symbol is a scaled loss; {} for other operators.

    None for a variable, which no recorded call has computed.
    """
    children = symbol.get_children()
    if children is None:
        return None
    name = children.list_outputs()[-1]
    return {name: _marks[name].scale} if name in _marks else {}


def _marks_in(graph: Any) -> dict[str, float]:
    """Return the scales of the scaled losses in a recorded graph, by tape name."""
    nodes, found, seen = graph["nodes"], {}, set()
    waiting = [head[0] for head in graph["heads"]]
    while waiting:
        index = waiting.pop()
        node = nodes[index]
        sources = [source[0] for source in node["inputs"]]
        name = nodes[sources[-1]]["name"] if sources else ""
        if name in _marks:
            found[name] = _marks[name].scale
        elif node["op"] != "BlockGrad" and index not in seen:
            waiting += sources
        seen.add(index)
    return found
