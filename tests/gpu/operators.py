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

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet.ndarray.register import _imperative_invoke
from mxnet.symbol.register import _symbol_creator

from mxamp.framework.operators import handle_of

IMAGES, ROWS = (2, 4, 6, 6), (4, 6)
SEQUENCE = (5, 2, 36)  # queries, keys and values of two heads of 6

#: Attributes and shapes of inputs, where neither all inputs alike nor the shapes that MXNet infers
#: for the others do.
CALLS = {
    "Activation": ({"act_type": "softrelu"}, [IMAGES]),
    "Convolution": ({"kernel": (3, 3), "num_filter": 5}, [IMAGES]),
    "Deconvolution": ({"kernel": (3, 3), "num_filter": 5}, [IMAGES]),
    "Dropout": ({"p": 0}, [ROWS]),
    "Embedding": ({"input_dim": 7, "output_dim": 3}, [ROWS]),
    "FullyConnected": ({"num_hidden": 5}, [IMAGES]),
    "LeakyReLU": ({"act_type": "prelu"}, [IMAGES, (4,)]),
    "Pad": ({"mode": "edge", "pad_width": (0, 0, 0, 0, 1, 1, 1, 1)}, [IMAGES]),
    "Pooling": ({"kernel": (2, 2), "stride": (2, 2), "pool_type": "avg"}, [IMAGES]),
    "RNN": ({"mode": "lstm", "num_layers": 2, "state_size": 3, "bidirectional": True}, [(5, 2, 4)]),
    "SliceChannel": ({"num_outputs": 2}, [IMAGES]),
    "UpSampling": ({"scale": 2, "sample_type": "nearest", "num_args": 1}, [IMAGES]),
    "Reshape": ({"shape": (2, -1)}, [IMAGES]),
    "SequenceLast": ({"use_sequence_length": True}, [(5, 2, 4), (2,)]),
    "SequenceMask": ({"use_sequence_length": True}, [(5, 2, 4), (2,)]),
    "SequenceReverse": ({"use_sequence_length": True}, [(5, 2, 4), (2,)]),
    "_contrib_SparseEmbedding": ({"input_dim": 7, "output_dim": 3}, [ROWS]),
    "_contrib_boolean_mask": ({}, [ROWS, (4,)]),
    "_contrib_index_copy": ({}, [ROWS, (2,), (2, 6)]),
    "_contrib_interleaved_matmul_encdec_qk": ({"heads": 2}, [(5, 2, 12), (7, 2, 24)]),
    "_contrib_interleaved_matmul_encdec_valatt": ({"heads": 2}, [(7, 2, 24), (4, 5, 7)]),
    "_contrib_interleaved_matmul_selfatt_qk": ({"heads": 2}, [SEQUENCE]),
    "_contrib_interleaved_matmul_selfatt_valatt": ({"heads": 2}, [SEQUENCE, (4, 5, 5)]),
    "_np_moveaxis": ({"source": (0,), "destination": (1,)}, [ROWS]),
    "_np_reshape": ({"newshape": (6, 4)}, [ROWS]),
    "_np_roll": ({"shift": (1,), "axis": (0,)}, [ROWS]),
    "_npi_broadcast_to": ({"shape": (3, 4, 6)}, [ROWS]),
    "_npi_delete": ({"int_ind": 1, "axis": 0}, [ROWS]),
    "_npi_dsplit": ({"indices": (0, 2), "axis": 2, "sections": 2}, [IMAGES]),
    "_npi_dstack": ({"num_args": 2}, [ROWS, ROWS]),
    "_npi_einsum": ({"num_args": 2, "subscripts": "ij,kj->ik"}, [ROWS, ROWS]),
    "_npi_full_like": ({"fill_value": 2}, [ROWS]),
    "_npi_hsplit": ({"indices": (0, 2), "axis": 1, "sections": 2}, [IMAGES]),
    "_npi_hstack": ({"num_args": 2}, [ROWS, ROWS]),
    "_npi_insert_slice": ({"start": 1, "stop": 2, "step": 1, "axis": 0}, [ROWS, (1, 6)]),
    "_npi_insert_tensor": ({"axis": 0}, [ROWS, (2, 6), (2,)]),
    "_npi_matmul": ({}, [(2, 4, 6), (2, 6, 3)]),
    "_npi_pad": ({"pad_width": ((1, 1), (1, 1)), "mode": "constant"}, [ROWS]),
    "_npi_rot90": ({"k": 1, "axes": (0, 1)}, [ROWS]),
    "_npi_tensordot": ({"a_axes_summed": (1,), "b_axes_summed": (0,)}, [ROWS, (6, 3)]),
    "_npi_tensordot_int_axes": ({"axes": 1}, [ROWS, (6, 3)]),
    "_npx_nonzero": ({}, [ROWS]),
    "_npx_reshape": ({"newshape": (6, 4)}, [ROWS]),
    "_split_v2": ({"indices": (0, 2), "axis": 1, "sections": 2}, [IMAGES]),
    "batch_dot": ({}, [(2, 4, 6), (2, 6, 3)]),
    "batch_take": ({}, [ROWS, (4,)]),
    "broadcast_to": ({"shape": (3, 4, 6)}, [(1, 4, 6)]),
    "clip": ({"a_min": -0.5, "a_max": 0.5}, [ROWS]),
    "col2im": ({"output_size": (4, 4), "kernel": (2, 2)}, [(2, 16, 9)]),
    "depth_to_space": ({"block_size": 2}, [IMAGES]),
    "dot": ({}, [ROWS, (6, 3)]),
    "gather_nd": ({}, [ROWS, (1, 2)]),
    "im2col": ({"kernel": (2, 2)}, [IMAGES]),
    "pick": ({}, [ROWS, (4,)]),
    "repeat": ({"repeats": 2}, [ROWS]),
    "reshape_like": ({}, [ROWS, (6, 4)]),
    "scatter_nd": ({"shape": (8, 6)}, [ROWS, (1, 4)]),
    "slice": ({"begin": (1,), "end": (3,)}, [ROWS]),
    "slice_axis": ({"axis": 1, "begin": 1, "end": 3}, [ROWS]),
    "space_to_depth": ({"block_size": 2}, [IMAGES]),
    "tile": ({"reps": (2, 1)}, [ROWS]),
}

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
GENERIC = [IMAGES, (4, 6, 6), (6, 6), (6,)]


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
        attributes, shapes = CALLS[name]
        symbol = compose(name, attributes)
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
