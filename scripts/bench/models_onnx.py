"""ONNX Runtime and OpenVINO in `scripts/bench/models`: the export, and a step in each.

models_onnx.py MODEL FOLDER writes FOLDER/model.onnx, or the error to FOLDER/model.onnx.failed.
"""

import os
import sys
from pathlib import Path
from typing import Any, Callable

import numpy as np


def export(model: str, folder: Path) -> None:
    """Export the model with the parameters in `folder` to `folder`/model.onnx."""
    import mxamp as amp
    import mxamp.framework.compat

    mx = mxamp.framework.compat.import_mxnet()
    from models_worker import batch_of, mxnet_model

    arrays = [mx.nd.array(array) for array in batch_of(model)[0]]
    net = mxnet_model(model)
    net.load_parameters(str(folder / "mxnet.params"))
    net.hybridize()
    net(*arrays)
    net.export(str(folder / "model"))
    saved = mx.model.load_checkpoint(str(folder / "model"), 0)
    names = [name for name in saved[0].list_inputs() if name not in {**saved[1], **saved[2]}]
    amp.export_onnx(saved, folder / "model.onnx", dict(zip(names, arrays)), check=False)


def onnx_step(contender: str, model: str, folder: Path) -> Callable[[], Any]:
    """Return a function that runs the exported model once; save its outputs in `folder`."""
    from models_worker import batch_of

    path = folder / "model.onnx"
    if not path.exists():
        raise RuntimeError((folder / "model.onnx.failed").read_text(encoding="utf-8"))
    inputs, _ = batch_of(model)
    run = _onnxruntime if contender == "onnxruntime" else _openvino
    step = run(str(path), inputs, int(os.environ.get("OMP_NUM_THREADS", "1")), contender)
    np.save(folder / f"{contender}-outputs.npy", step())
    return step


def _onnxruntime(path: str, inputs: Any, threads: int, _contender: str) -> Callable[[], Any]:
    """Return a function that runs an ONNX file once in ONNX Runtime, in float32."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    named = {given.name: array for given, array in zip(session.get_inputs(), inputs)}
    return lambda: session.run(None, named)[0]


def _openvino(path: str, inputs: Any, threads: int, contender: str) -> Callable[[], Any]:
    """Return a function that runs an ONNX file once in OpenVINO, in the contender's precision."""
    import openvino

    precision = "bf16" if contender == "openvino" else "f32"
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    return lambda: request.infer(inputs)[0]


def main() -> None:
    """Export a model; write the error to a file if that fails."""
    model, folder = sys.argv[1], Path(sys.argv[2])
    try:
        export(model, folder)
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        text = f"not exported: {type(error).__name__}: {lines[0]}"
        (folder / "model.onnx.failed").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
