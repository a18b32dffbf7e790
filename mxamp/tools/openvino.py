"""OpenVINO: a form of a model for inference on CPUs, from the ONNX file that mxamp writes."""

from typing import Any, List, Sequence

import mxnet as mx

from ..framework import machine
from .debugging.measured import arrays_in
from .onnx import exported, float32_model, packages

_HINTS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


class OpenVINO:
    """A float32 block in OpenVINO, called as the block is; the outputs come as a flat list.

    `calls` are arguments of calls, of all sizes that it takes. `precision` is the dtype that it
    computes in: bfloat16 only if that is asked for, on a CPU that has it.
    """

    def __init__(self, block: mx.gluon.HybridBlock, calls: Sequence[Any], dtype: str) -> None:
        onnx, openvino = packages("onnx", "openvino")
        model, examples, self._names = float32_model(block, calls)
        core, hint = openvino.Core(), "bf16" if dtype == "bfloat16" else "f32"
        read = core.read_model(exported(onnx, model, examples), b"")
        options = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": machine.threads()}
        self._compiled = core.compile_model(read, "CPU", options)
        found = self._compiled.get_property("INFERENCE_PRECISION_HINT")
        self.precision = _HINTS[found.to_string()]
        # Its inputs have several names, and lack arguments that the model does not read.
        aliases = (one.names for one in self._compiled.inputs)
        self._used = [next(name for name in names if name in self._names) for names in aliases]

    def __call__(self, *inputs: Any) -> List[Any]:
        """Run the model once."""
        given = dict(zip(self._names, arrays_in(inputs)))
        found = self._compiled({name: given[name].asnumpy() for name in self._used})
        return [mx.nd.array(found[one]) for one in self._compiled.outputs]
