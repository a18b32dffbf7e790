"""Operators whose gradient is zero by definition, and a workaround for the crash that they cause.

If an array gets no gradient but such zeros, eager backward calls `zeros_like` on the inputs of the
preceding operators, back to one that computes a gradient. But autograd has freed the inputs that no
gradient needs, such as the input of a cast: reading one is a segmentation fault.
"""

from functools import lru_cache
from typing import FrozenSet, List, Mapping, Optional, Sequence

from mxnet.ndarray.ndarray import NDArray

from .arrays import KIND_NAMES, copy, dtype_code
from .operators import handle_of

# Operators that MXNet's sources register with MakeZeroGradNodes, or with a zero gradient for one
# input. Operators that take only integers are left out.
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
def zero_gradient_inputs() -> Mapping[int, Optional[FrozenSet[int]]]:
    """Return the positions of inputs with a zero gradient by operator handle; None for all."""
    table = {handle_of(name): inputs for name, inputs in _OF_ONE_INPUT.items()}
    return {**table, **{handle_of(name): None for name in _OF_ALL_INPUTS}}


def copy_inputs_at(
    arrays: Sequence[NDArray], positions: Optional[FrozenSet[int]], is_np_op: bool
) -> List[NDArray]:
    """Return `arrays` with float inputs at `positions` copied, so that backward can't crash.

    None stands for all positions. Each copy is an `add_n` of one array, whose gradient needs no
    inputs.
    """
    return [
        copy(array, is_np_op, _SUM)
        if (positions is None or i in positions) and KIND_NAMES.get(dtype_code(array)) in _FLOATS
        else array
        for i, array in enumerate(arrays)
    ]
