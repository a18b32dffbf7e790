"""Values for a model's inputs, read from the options --input, --input-dtype and --data."""

import zipfile
import zlib
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import click
import numpy as np
from mxnet import nd

from ..convert.options import check_names, checked_dtype
from ..convert.outputs import Model, finite_input, random_inputs
from ..errors import ArgumentError, prefix_errors
from ..framework.arrays import cast
from ..graph.ir import Graph

Named = Sequence[Tuple[str, Any]]

#: The files that a command reads, in the `meta` of its context.
READ = "mxamp.read"


def record_files(ctx: click.Context, _: object, paths: Union[None, str, Iterable[str]]) -> object:
    """Record the files that a command reads, which it must not overwrite (a click callback)."""
    listed = [paths] if isinstance(paths, str) else list(paths or ())
    ctx.meta.setdefault(READ, []).extend(listed)
    return paths


class NamedInput(click.ParamType):
    """Option type of --input: an input's name with its shape or an .npy file of values."""

    name = "NAME:SHAPE|NAME:FILE.npy"

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Any) -> Tuple[str, Any]:
        """Parse NAME:SHAPE or NAME:FILE.npy; return the name and the sizes or the array."""
        name, colon, text = value.rpartition(":")
        if text.endswith(".npy"):
            record_files(ctx, param, text)
            return name, _load_numpy(text, np.ndarray)
        sizes = text.split(",")
        if not (name and all(size.strip().isdecimal() and int(size) for size in sizes)):
            name = (name if colon else value) or "data"
            hint = f"write sizes from 1 as {name}:1,3,8,8, or a file as {name}:values.npy"
            self.fail(f"{value!r} has neither a shape nor a file: {hint}", param, ctx)
        return name, tuple(map(int, sizes))


class NamedDtype(click.ParamType):
    """Option type of --input-dtype: an input's name with its dtype."""

    name = "NAME:DTYPE"

    def convert(self, value: Any, param: Optional[click.Parameter], _: object) -> Tuple[str, str]:
        """Parse NAME:DTYPE; return the name and the dtype."""
        name, _, dtype = value.rpartition(":")
        if not (name and dtype):
            self.fail(f"{value!r} has no dtype: write {name or dtype or 'data'}:int64", param)
        return name, checked_dtype(name, dtype)


def _data_names(model: Model) -> List[str]:
    """Return the names of a model's inputs that are not parameters."""
    return [name for name in model[0].list_inputs() if name not in {**model[1], **model[2]}]


def input_values(
    model: Model, inputs: Named, dtypes: Named, seed: int = 0
) -> Tuple[Dict[str, Any], List[str]]:
    """Return values for a model's inputs by name, and the names of those with random values."""
    values = {name: one for name, one in inputs if isinstance(one, np.ndarray)}
    shapes: Dict[str, Any] = {name: getattr(one, "shape", one) for name, one in inputs}
    data = _data_names(model)
    with prefix_errors("--input"):
        check_names(shapes, data, "input")
    drawn = random_inputs(model, shapes, dict(dtypes), seed)
    return {**drawn, **values}, [name for name in data if name not in values]


def read_batches(
    model: Model, data: Sequence[str], inputs: Named, input_dtypes: Named, metric: object, **_: Any
) -> Tuple[List[Dict[str, Any]], List[Any], List[str]]:
    """Return batches from --data or --input, their labels, and the names of random inputs.

    Each .npz file in `data` holds a batch and, for a metric, its labels by the name "label".
    Without files, the batch is that of `input_values`.
    """
    if data and inputs:
        raise click.UsageError("give --data or --input, not both")
    if metric and not data:
        raise click.UsageError("--metric needs labels: give --data files that hold an array label")
    if not data:
        values, drawn = input_values(model, inputs, input_dtypes)
        return [checked_batch(model, values, dict(input_dtypes))], [], drawn
    batches, labels = [], []
    for path in data:
        with prefix_errors(f"--data {path}"):
            arrays = _load_numpy(path, dict)
            if metric:
                check_names(["label"], [*arrays], "array")
                labels.append(nd.array(arrays.pop("label")))
            check_names(arrays, _data_names(model), "input")
            batches.append(checked_batch(model, arrays, dict(input_dtypes)))
    return batches, labels, []


def checked_batch(
    model: Model, values: Mapping[str, Any], dtypes: Mapping[str, str]
) -> Dict[str, Any]:
    """Return a batch as NDArrays in the inputs' dtypes; raise if one has Inf or NaN."""
    check_names(dtypes, _data_names(model), "input")
    wanted, batch = {**Graph.from_symbol(model[0]).recorded_dtypes, **dtypes}, {}
    for name, value in values.items():
        array, dtype = finite_input(name, value), wanted.get(name, "float32")
        # An array of float32 would round large integers.
        is_whole = isinstance(value, np.ndarray) and "float" not in dtype
        batch[name] = nd.array(value, dtype=dtype) if is_whole else cast(array, dtype)
    return batch


def _load_numpy(path: str, kind: type) -> Any:
    """Return the content of an .npy or .npz file; raise if it isn't of the type `kind`."""
    try:
        with open(path, "rb") as file:
            found = np.load(file)
            found = found if isinstance(found, np.ndarray) else dict(found)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise ArgumentError(f"{path!r} can't be read as numbers of NumPy: {why}") from None
    if not isinstance(found, kind):
        raise ArgumentError(f"--input takes .npy files, and --data .npz files, not {path!r}")
    return found
