"""What carries arrays from worker to worker, and the dtypes that it takes."""

from typing import Any, Iterator, NamedTuple, Tuple

from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError
from .machine import dtype_name
from .wording import one_of

__all__ = ["HOROVOD", "PARAMETER_SERVER", "Transport"]

UNSUPPORTED = (
    "{transport} takes arrays of {allowed}, and {name} is {dtype}: leave parameters in float32 "
    "(mixed precision casts them where it computes with them), or cast what you send to float32"
)


class Transport(NamedTuple):
    """A way between workers."""

    name: str
    dtypes: Tuple[str, ...]

    def check_dtype(self, name: str, dtype: Any) -> None:
        """Raise `ArgumentError` where arrays of this dtype can't be sent."""
        given = dtype_name(dtype)
        if given not in self.dtypes:
            allowed = one_of(self.dtypes)
            raise ArgumentError(
                UNSUPPORTED.format(transport=self.name, allowed=allowed, name=name, dtype=given)
            )

    def check_arrays(self, name: str, value: Any) -> None:
        """Do that for an array, or all arrays in lists; other values are let pass."""
        for array in _arrays(value):
            self.check_dtype(name, array.dtype)


def _arrays(value: Any) -> Iterator[NDArray]:
    if isinstance(value, NDArray):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _arrays(one)


#: Any other dtype ends the servers: the workers would wait for them for ever.
PARAMETER_SERVER = Transport("the parameter server", ("float32", "float16", "float64"))
#: The dtypes that both MXNet and Horovod have.
HOROVOD = Transport("Horovod", ("float32", "float16", "float64", "int8", "uint8", "int32", "int64"))
