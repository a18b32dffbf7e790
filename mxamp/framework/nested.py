"""Arrays in lists, tuples, named tuples and dicts."""

from typing import Any, Callable, Sequence

from mxnet.ndarray.ndarray import NDArray

__all__ = ["as_list", "map_arrays"]


def as_list(outputs: Any) -> Sequence[Any]:
    """Return what MXNet gives as one array or several as a list or tuple."""
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]


def map_arrays(
    value: Any, function: Callable[[NDArray], Any], otherwise: Callable[[Any], Any]
) -> Any:
    """Return `value` with `function` applied to each array in it, in the same containers.

    What is neither an array nor a container goes through `otherwise`.
    """
    if isinstance(value, NDArray):
        return function(value)
    if isinstance(value, dict):
        return type(value)((k, map_arrays(v, function, otherwise)) for k, v in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_arrays(item, function, otherwise) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_arrays(item, function, otherwise) for item in value)
    return otherwise(value)
