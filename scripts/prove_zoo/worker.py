"""Prove one model: convert it, run it, save it, and load it in plain MXNet.

A task is a model's name, comma-separated dtypes, and "stock" or "". A task without a name returns
the names of all models.
"""

import logging
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet.gluon.block import _flatten  # noqa: E402

import mxamp as amp  # noqa: E402
from calibration import before_selection, calibrate  # noqa: E402
from networks import build, initialize, inputs_of, names  # noqa: E402
from processes import Server, first_line, serve  # noqa: E402
from zoo import (  # noqa: E402
    FAMILIES,
    LEAST_AGREEMENT,
    TOLERANCE,
    UNIT,
    Case,
    agreement,
    case_of,
    detections,
    flat,
    lost,
    relative,
)

#: The process without mxamp, and its seconds for a model.
PLAIN = Server("plain.py")
_PLAIN_LIMIT = 240.0


class Subject:
    """A network with its data, its graph if it has one, and its outputs in float32."""

    def __init__(self, case: Case, shapes: Sequence[Any]) -> None:
        self.case = case
        mx.random.seed(0)
        self.net = build(case, shapes)
        self.data = self.net.example() if hasattr(self.net, "example") else inputs_of(shapes)
        initialize(self.net)
        self.net(*self.data)
        mx.nd.waitall()
        self.unhybridized: Optional[str] = None
        try:
            self._hybridize()
        except Exception as error:
            self.unhybridized = first_line(error)
            self.net.hybridize(False)
        self.reference = flat(self.net(*self.data))

    def _hybridize(self) -> None:
        """Hybridize and calibrate the network; set `symbol`, `inputs` and `params`."""
        if not isinstance(self.net, mx.gluon.HybridBlock):
            raise TypeError(f"{type(self.net).__name__} is no HybridBlock")
        self.net.hybridize()
        self.net(*self.data)
        mx.nd.waitall()
        inputs, self.symbol = self.net._cached_graph
        given = [array for array in _flatten(self.data, "input")[0] if array is not None]
        self.inputs = dict(zip([one.name for one in inputs], given))
        params = self.net.collect_params()
        used = self.symbol.list_inputs()
        calibrate(self.symbol, {n: p for n, p in params.items() if n in used}, self.inputs)
        self.params = {name: params[name].data() for name in used if name in params}

    def inputs_of(self, symbol: Any) -> Dict[str, Any]:
        """Return the inputs that a part of this network's graph reads, by name."""
        read = symbol.list_inputs()
        return {name: value for name, value in self.inputs.items() if name in read}

    def model_of(self, symbol: Any) -> Tuple[Any, Dict[str, Any], Dict[str, Any]]:
        """Return a part of this network's graph with its parameters and auxiliary states."""
        args = {n: self.params[n] for n in symbol.list_arguments() if n in self.params}
        return symbol, args, {n: self.params[n] for n in symbol.list_auxiliary_states()}


def subject_of(case: Case) -> Subject:
    """Return a case's network, built for the first input shapes that it accepts."""
    for shapes in case.tries[:-1]:
        try:
            return Subject(case, shapes)
        except (mx.MXNetError, ValueError, AssertionError):
            continue
    return Subject(case, case.tries[-1])


def errors_of(subject: Subject, outputs: List[Any]) -> Dict[str, Any]:
    """Return the errors of outputs against the subject's float32 outputs, for the results."""
    measure = FAMILIES[subject.case.family].measure
    found: Dict[str, Any] = {"lost": lost(subject.reference, outputs)}
    if measure != "boxes":
        found["relative"] = rounded(relative(subject.reference, outputs))
    share = agreement(measure, subject.reference, outputs)
    if share is not None:
        found["agreement"] = rounded(share)
    return found


def rounded(value: float) -> float:
    """Return a number with three digits."""
    return float(f"{value:.3g}")


def prove_conversion(subject: Subject, dtype: str, folder: Path) -> Dict[str, Any]:
    """Return the errors of a model converted to a dtype; save the model and its outputs."""
    # float16 covers cast parameters, as saved for inference; bfloat16 covers float32 ones.
    block = amp.convert_hybrid_block(subject.net, dtype, cast_optional_params=dtype == "float16")
    outputs = flat(block(*subject.data))
    mx.nd.waitall()
    block.export(str(folder / dtype))
    np.savez(folder / f"ours-{dtype}.npz", *outputs)
    found = errors_of(subject, outputs)
    found.update(selection_errors(subject, dtype))
    least = LEAST_AGREEMENT.get(FAMILIES[subject.case.family].measure, {}).get(dtype, 0.0)
    if found["relative"] > TOLERANCE[dtype] or found.get("agreement", 1.0) < least:
        found["noise"] = weight_rounding_error(subject, dtype)
    return found


def selection_errors(subject: Subject, dtype: str) -> Dict[str, Any]:
    """Return the relative error of the inputs of selections (nms, topk); {} without selections."""
    chosen_from = before_selection(subject.symbol)
    if chosen_from is None:
        return {}
    whole = subject.model_of(chosen_from)
    inputs = subject.inputs_of(chosen_from)
    errors = amp.compare_models(whole, amp.convert_model(*whole, target_dtype=dtype), inputs)
    return {"relative": rounded(max(error.relative for error in errors))}


def weight_rounding_error(subject: Subject, dtype: str) -> float:
    """Return the error of the float32 network whose weights are rounded once, at random."""
    chosen_from = before_selection(subject.symbol)
    symbol, args, auxs = subject.model_of(subject.symbol if chosen_from is None else chosen_from)
    noisy = {
        name: value * mx.nd.random.normal(1, UNIT[dtype], value.shape)
        if value.dtype == np.float32
        else value
        for name, value in args.items()
    }
    inputs = subject.inputs_of(symbol)
    errors = amp.compare_models((symbol, args, auxs), (symbol, noisy, auxs), inputs)
    return rounded(max(error.relative for error in errors))


def prove_in_plain_mxnet(
    subject: Subject, dtypes: Sequence[str], stock: bool, folder: Path
) -> Dict[str, Any]:
    """Return, by dtype, the errors of the saved models in plain MXNet and of mxnet.contrib.amp."""
    np.savez(folder / "inputs.npz", **{n: v.asnumpy() for n, v in subject.inputs.items()})
    subject.net.export(str(folder / "float32"))
    if subject.case.family == "numpy":
        (folder / "numpy").touch()
    found: Dict[str, Any] = {}
    for dtype in dtypes:
        failure = PLAIN.ask(_PLAIN_LIMIT, str(folder), "load", dtype).get("failure")
        loaded: Dict[str, Any] = {"failure": failure}
        if failure is None:
            ours, theirs = (
                load_arrays(folder / f"{kind}-{dtype}.npz") for kind in ("ours", "load")
            )
            same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(ours, theirs))
            # In bfloat16 the block runs tuned to its data, and other operators round elsewhere.
            loaded = {"equal": True} if same else {"equal": False, **errors_of(subject, theirs)}
        found[dtype] = {"loaded": loaded}
        if stock:
            failure = PLAIN.ask(_PLAIN_LIMIT, str(folder), "stock", dtype).get("failure")
            found[dtype]["stock"] = (
                {"failure": failure}
                if failure
                else errors_of(subject, load_arrays(folder / f"stock-{dtype}.npz"))
            )
    return found


def load_arrays(path: Path) -> List[Any]:
    """Return the arrays that `numpy.savez` has saved without names."""
    file = np.load(path)
    return [file[f"arr_{i}"] for i in range(len(file.files))]


def prove_under_autocast(subject: Subject, dtype: str) -> Dict[str, Any]:
    """Return the errors of a network under `autocast`, for one that does not hybridize."""
    with amp.autocast(dtype):
        outputs = flat(subject.net(*subject.data))
    return errors_of(subject, outputs)


def prove(case: Case, dtypes: Sequence[str], stock: bool, folder: Path) -> Dict[str, Any]:
    """Return the result of one model."""
    found: Dict[str, Any] = {}
    try:
        subject = subject_of(case)
    except Exception as error:
        return {"float32": {"failure": first_line(error)}}
    arrays_in = _flatten(subject.data, "input")[0]
    found["shapes"] = [list(array.shape) for array in arrays_in if array is not None]
    found["float32"] = {"finite": all(np.isfinite(a).all() for a in subject.reference)}
    if FAMILIES[case.family].measure == "boxes":
        found["float32"]["found"] = sum(map(len, detections(subject.reference)))
    if subject.unhybridized:
        found["float32"]["unhybridized"] = subject.unhybridized
    for dtype in dtypes:
        try:
            if subject.unhybridized:
                found[dtype] = prove_under_autocast(subject, dtype)
            else:
                found[dtype] = prove_conversion(subject, dtype, folder)
        except Exception as error:
            found[dtype] = {"failure": first_line(error)}
    if not subject.unhybridized:
        done = [dtype for dtype in dtypes if "failure" not in found[dtype]]
        for dtype, more in prove_in_plain_mxnet(subject, done, stock, folder).items():
            found[dtype].update(more)
    return found


def perform_task(name: str = "", dtypes: str = "", stock: str = "") -> Dict[str, Any]:
    """Return the result of a model and the seconds it took; without a name, all names."""
    if not name:
        return {"names": names()}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        found = prove(case_of(name), dtypes.split(","), bool(stock), Path(place))
    found["seconds"] = round(time.perf_counter() - began, 1)
    return found


if __name__ == "__main__":
    # Before the processes for models are forked: they all ask it.
    PLAIN.start()
    with suppress(ImportError):
        import gluoncv.model_zoo  # noqa: F401
    serve(perform_task)
