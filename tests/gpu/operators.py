"""Call operators on a GPU in float16, forward and backward; prints a line of JSON for each.

    python tests/gpu/operators.py [--no-values] OPERATOR ...

Each line has the operator's name, the error that it raised, and how far its outputs and gradients
are from those of the CPU in float32, relative to their norm. `MXAMP_PLANTED=relu=crash,tanh=hang`
plants faults, of which "wrong" is the third. The name is printed before the call,
in a line of its own: the last one is the operator that has ended the process. Where kernels only
count, `--no-values` leaves the comparison out.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet.ndarray.register import _imperative_invoke
from mxnet.symbol.register import _symbol_creator

from mxamp.framework.operators import handle_of

#: Attributes and shapes of inputs, where neither all inputs alike nor the shapes that MXNet infers
#: for the others do.
CALLS = json.loads(Path(__file__).with_name("calls.json").read_text())

#: Inputs that are indices, which are 0 or 1, and their dtypes.
INDICES = {
    "indices": "int32", "index": "float32", "index_vector": "int64", "obj": "int64",
    "sequence_length": "float32",
}  # fmt: skip
READS_INDICES = {"Embedding", "_contrib_SparseEmbedding"}
#: Operators whose gradient MXNet lacks on any device.
WITHOUT_GRADIENT = {
    "_contrib_SparseEmbedding", "_npi_copysign_scalar", "_npi_delete", "_npi_insert_scalar",
    "_npi_insert_slice", "_npi_insert_tensor", "_npi_rcopysign_scalar", "_npx_nonzero",
    "batch_take",
}  # fmt: skip
POLICY = amp.Policy.default("float16", "gpu")
GENERIC = [(2, 4, 6, 6), (4, 6, 6), (6, 6), (6,)]


def compose(name, attributes):
    """Return the symbol of one call of an operator on new variables."""
    values = [str(value) for value in attributes.values()]
    return _symbol_creator(handle_of(name), [], {}, list(attributes), values, "op", False)


def infer(symbol, shapes):
    """Return the shapes of a symbol's inputs and auxiliary states; None if they don't fit."""
    names = symbol.list_arguments()
    try:
        partial, _, _ = symbol.infer_shape_partial(**dict(zip(names, shapes)))
        full = {
            name: shape if shape and min(shape) > 0 else shapes[0]
            for name, shape in zip(names, partial)
        }
        inputs, outputs, auxiliary = symbol.infer_shape(**full)
    except mx.base.MXNetError:
        return None
    return None if outputs is None else (inputs, auxiliary)


def call_of(name):
    """Return the symbol of a call of an operator, and the shapes that it reads."""
    if name in CALLS:
        shapes = [tuple(shape) for shape in CALLS[name]["shapes"]]
        symbol = compose(name, CALLS[name]["attributes"])
        return symbol, *(infer(symbol, shapes) or ([*shapes], []))
    for attributes in ({}, {"num_args": 2}, {"axis": 1}, {"shape": (2, -1)}):
        try:
            symbol = compose(name, attributes)
        except mx.base.MXNetError:
            continue
        for shape in GENERIC:
            found = infer(symbol, [shape])
            if found is not None:
                return symbol, *found
    raise ValueError(f"no call of {name} is known: CALLS needs one")


def run(name, context, dtype):
    """Return the outputs and the gradients of a call, in float64."""
    symbol, shapes, auxiliary = call_of(name)
    random = np.random.RandomState(0)
    names = [argument.partition("op_")[2] for argument in symbol.list_arguments()]
    kept = POLICY.rule(name).keep_inputs
    arguments, trained = [], []
    for argument, shape in zip(names, shapes):
        kind = INDICES.get(argument)
        held = "float32" if argument in kept else dtype
        numbers = random.uniform(0.1, 0.9, shape) if kind is None else random.randint(0, 2, shape)
        numbers = 2 * np.ones(shape) if argument == "sequence_length" else numbers
        arguments.append(mx.nd.array(numbers, context, kind or held))
        if kind is None and not (name in READS_INDICES and argument == "data"):
            trained.append(arguments[-1])
    states = [mx.nd.ones(shape, context) for shape in auxiliary]
    has_gradient = name not in WITHOUT_GRADIENT
    for array in trained:
        array.attach_grad()
    attributes = symbol.list_attr()
    # Under the policy, as a user's call: what has to stay in float32 is cast.
    recorded = mx.autograd.record() if has_gradient else contextlib.nullcontext()
    with amp.autocast(policy=POLICY, enabled=dtype == "float16"), recorded:
        found = _imperative_invoke(
            handle_of(name), [*arguments, *states], list(attributes), list(attributes.values()),
            None, False, True,
        )  # fmt: skip
    if has_gradient:
        heads = [mx.nd.array(random.uniform(-1, 1, out.shape), context, out.dtype) for out in found]
        mx.autograd.backward(found, heads)
        found = [*found, *[array.grad for array in trained]]
    return [array.asnumpy().astype("float64") for array in found]


def difference(mine, theirs):
    """Return the largest relative difference of two lists of arrays."""
    norms = [max(float(np.linalg.norm(one)), 1e-3) for one in theirs]
    apart = [float(np.linalg.norm(a - b)) / norm for a, b, norm in zip(mine, theirs, norms)]
    return float(np.max(apart)) if apart else 0.0  # not max(): it may leave out NaN


def plant(fault, found):
    """Crash, hang, or make a value wrong."""
    if fault == "crash":
        os.abort()
    elif fault == "hang":
        time.sleep(1e4)
    found[0] = found[0] + (fault == "wrong")


def main():
    faults = dict(one.split("=") for one in os.environ.get("MXAMP_PLANTED", "").split(",") if one)
    for name in sys.argv[1:]:
        if name == "--no-values":
            continue
        print(name, flush=True)
        result = {"operator": name, "error": None, "difference": None}
        try:
            on_gpu = run(name, mx.gpu(0), "float16")
            mx.nd.waitall()
            plant(faults.get(name), on_gpu)
        except (mx.base.MXNetError, ValueError) as error:
            lines = str(error).strip().splitlines()
            result["error"] = next(
                (x for x in lines if "Check failed" in x or "Error" in x), lines[-1]
            )
        else:
            if "--no-values" not in sys.argv:
                result["difference"] = difference(on_gpu, run(name, mx.cpu(0), "float32"))
                if not np.isfinite(result["difference"]):
                    result["error"] = "Inf or NaN"
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
