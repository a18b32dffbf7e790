"""Values for the inputs of a model, from the options --input and --data."""

import zipfile
import zlib
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

import numpy as np
from mxnet import nd

from ..convert.options import check_names, checked_dtype
from ..convert.outputs import Model, declared_dtypes, finite_input, random_inputs
from ..errors import ArgumentError, prefix_errors
from ..framework.arrays import cast
from .options import parse_named_values
from .output import usage_error

__all__ = ["checked_batch", "input_values", "parse_input_dtypes", "parse_inputs", "read_batches"]

NOT_SAVED = "it is no array that NumPy has saved"
NOT_ARRAYS = (
    "it holds no arrays by name, as numpy.savez writes them (one array without a name: give it as "
    "--input NAME:{path})"
)

#: Errors of `numpy.load` for damaged files and files of other kinds.
_UNREADABLE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)


def parse_input_dtypes(texts: Sequence[str]) -> Dict[str, str]:
    """Return the dtypes in the texts NAME:DTYPE of --input-dtype, by input name."""
    dtypes = parse_named_values("--input-dtype", texts)
    with prefix_errors("--input-dtype"):
        return {name: checked_dtype(name, dtype) for name, dtype in dtypes.items()}


def parse_inputs(texts: Sequence[str]) -> Tuple[Dict[str, Tuple[int, ...]], Dict[str, Any]]:
    """Return the shapes in the texts of --input by input name, and the values from .npy files."""
    shapes, values = {}, {}
    for name, value in parse_named_values("--input", texts).items():
        text = f"{name}:{value}"
        if value.endswith(".npy"):
            values[name] = _load_numpy(f"--input {text}", value, np.ndarray, NOT_SAVED)
            shapes[name] = values[name].shape
            continue
        parts = value.split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise usage_error(
                f"--input takes NAME:1,3,224,224, of sizes above 0, or NAME:FILE.npy, not {text!r}"
            )
        shapes[name] = tuple(map(int, parts))
    return shapes, values


def _data_names(model: Model) -> List[str]:
    """Return the names of a model's inputs that are no parameters."""
    return [name for name in model[0].list_inputs() if name not in {**model[1], **model[2]}]


def input_values(
    model: Model, inputs: Sequence[str], dtypes: Mapping[str, str], seed: int = 0
) -> Tuple[Dict[str, Any], List[str]]:
    """Return values for all inputs of a model by name, and the names of those that are random.

    `inputs` are the texts of --input, which hold values or shapes.
    """
    shapes, values = parse_inputs(inputs)
    data = _data_names(model)
    with prefix_errors("--input"):
        check_names([*shapes], data, "input")
    with prefix_errors("--input-dtype"):
        check_names([*dtypes], model[0].list_inputs(), "input")
    drawn = random_inputs(model, shapes, dtypes, seed)
    return {**drawn, **values}, [name for name in data if name not in values]


def read_batches(
    model: Model, files: Sequence[str], dtypes: Mapping[str, str]
) -> Iterator[Dict[str, Any]]:
    """Yield the arrays in each .npz file by input name, in the dtypes of the model's inputs."""
    data = _data_names(model)
    with prefix_errors("--input-dtype"):
        check_names([*dtypes], data, "input")
    for path in files:
        with prefix_errors(f"--data {path}"):
            arrays = _load_numpy("--data", path, dict, NOT_ARRAYS.format(path=path))
            check_names([*arrays], data, "input")
            if not arrays:
                raise ArgumentError(f"inputs without a value: {', '.join(data)}")
            yield checked_batch(model, arrays, dtypes)


def checked_batch(
    model: Model, values: Mapping[str, Any], dtypes: Mapping[str, str]
) -> Dict[str, Any]:
    """Return inputs as NDArrays in `dtypes`, else in the declared dtypes; raise unless finite."""
    wanted = {**declared_dtypes(model[0]), **dtypes}
    return {
        name: _cast_input(value, finite_input(name, value), wanted.get(name, "float32"))
        for name, value in values.items()
    }


def _cast_input(value: Any, array: Any, dtype: str) -> Any:
    """Return the input `value`, of which `array` is the NDArray, as an NDArray in `dtype`."""
    if isinstance(value, np.ndarray) and "float" not in dtype:
        return nd.array(value, dtype=dtype)  # float32 would round large integers
    return cast(array, dtype)


def _load_numpy(option: str, path: str, kind: type, expected: str) -> Any:
    """Return the array of an .npy file, or the arrays of an .npz file by name.

    Raises a usage error, which says what was `expected`, unless that is of type `kind`.
    """
    found, why = None, expected
    try:
        with open(path, "rb") as file:
            found = np.load(file)
            if not isinstance(found, np.ndarray):
                found = {name: found[name] for name in found.files}
    except _UNREADABLE as error:
        why = getattr(error, "strerror", None) or expected
    if not isinstance(found, kind):
        raise usage_error(f"{option}: {path!r} can't be read: {why}") from None
    return found
