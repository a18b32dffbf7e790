"""Operators whose gradient is zero by definition, and the crash that they cause in MXNet.

If all of an array's gradient is such a zero, eager backward makes zeros "like" the inputs of the
operators before, back to one that computes a gradient. It has kept only the inputs that gradients
are computed from. At a freed one, such as the input of a cast, the process dies by a segmentation
fault.
"""

from functools import lru_cache
from typing import FrozenSet, List, Mapping, Optional, Sequence

from mxnet.ndarray.ndarray import NDArray

from .arrays import KIND_NAMES, dtype_code, invoke
from .operators import handle_of

__all__ = ["kept_safe", "zero_gradients"]

# The operators that MXNet's sources make with MakeZeroGradNodes, and those that make zeros for one
# of their inputs; without those that take integers alone.
_COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "lesser", "lesser_equal")
_NUMPY_COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
_LOGIC = ("logical_and", "logical_or", "logical_xor")
_OF_ALL_INPUTS = (
    *(f"{prefix}{name}" for name in (*_COMPARISONS, *_LOGIC) for prefix in ("_", "broadcast_")),
    *(f"_{name}_scalar" for name in (*_COMPARISONS, *_LOGIC)),
    *(f"_npi_{name}{end}" for name in _NUMPY_COMPARISONS for end in ("", "_scalar")),
    *(f"_npi_{name}" for name in ("rint", "ceil", "floor", "trunc", "fix", "around")),
    "_npi_logical_not",
    *(f"_npi_is{name}" for name in ("nan", "inf", "posinf", "neginf", "finite")),
    "round", "rint", "ceil", "floor", "trunc", "fix", "logical_not", "BlockGrad",
    "argmax", "argmin", "_npi_argmax", "_npi_argmin", "argmax_channel", "_np_any", "_np_all",
    "_npi_std", "_npi_var", "_npi_percentile", "_npi_bincount", "_npi_unique", "_npx_nonzero",
    "_npi_eig", "_npi_eigh", "_npi_eigvals", "_npi_eigvalsh", "_npi_pinv", "_npi_pinv_scalar_rcond",
    "_npi_boolean_mask_assign_scalar", "_npi_boolean_mask_assign_tensor", "_npi_where_scalar2",
    "_npi_full_like", "_npi_diag_indices_from", "_npx_constraint_check",
    "_np_atleast_1d", "_np_atleast_2d", "_np_atleast_3d",
    "_contrib_box_encode", "_contrib_box_decode", "_contrib_index_array", "_contrib_arange_like",
    "shape_array", "size_array", "zeros_like", "ones_like", "one_hot", "topk", "argsort",
    "_ravel_multi_index", "_unravel_index",
    *(f"_sample_{name}" for name in ("uniform", "normal", "gamma", "exponential", "poisson",
      "negative_binomial", "generalized_negative_binomial", "multinomial")),
    *(f"_npi_{name}" for name in ("bernoulli", "choice", "gamma", "multinomial", "powerd",
      "uniform", "uniform_n")),
)  # fmt: skip
_FIRST, _SECOND = frozenset({0}), frozenset({1})
_OF_ONE_INPUT: Mapping[str, FrozenSet[int]] = {
    "where": _FIRST, "_npi_where": _FIRST, "_npi_where_lscalar": _FIRST,
    "_npi_where_rscalar": _FIRST, "pick": _SECOND, "broadcast_like": _SECOND,
    "reshape_like": _SECOND, "_identity_with_attr_like_rhs": _SECOND, "gather_nd": _SECOND,
    "scatter_nd": _SECOND,
}  # fmt: skip

_FLOATS = frozenset({"float16", "bfloat16", "float32"})
_SUM = handle_of("add_n")


@lru_cache(maxsize=None)
def zero_gradients() -> Mapping[int, Optional[FrozenSet[int]]]:
    """Return the inputs whose gradient is always zero by operator handle; None for all inputs."""
    table = {handle_of(name): inputs for name, inputs in _OF_ONE_INPUT.items()}
    return {**table, **{handle_of(name): None for name in _OF_ALL_INPUTS}}


def kept_safe(
    arrays: Sequence[NDArray], positions: Optional[FrozenSet[int]], is_np_op: bool
) -> List[NDArray]:
    """Return an operator's inputs with copies at `positions`, which backward survives.

    Each copy is a sum of one array: a sum computes its gradient from the one that comes to it.
    """
    return [
        invoke(_SUM, [array], ["num_args"], ["1"], None, is_np_op, False)
        if (positions is None or i in positions) and KIND_NAMES.get(dtype_code(array)) in _FLOATS
        else array
        for i, array in enumerate(arrays)
    ]
