"""Run models without mxamp: load converted ones, and convert with mxnet.contrib.amp.

A task is a folder, "load" or "stock", and a dtype. Outputs are written to the folder.
"""

import sys
import warnings
from pathlib import Path
from typing import Any, Dict, List

import numpy as np

warnings.simplefilter("ignore")
import mxnet as mx  # noqa: E402

from processes import serve  # noqa: E402
from zoo import flat  # noqa: E402


def load_model(folder: Path, name: str, inputs: List[str]) -> Any:
    """Return an exported model as a `SymbolBlock` of plain MXNet."""
    prefix = str(folder / name)
    return mx.gluon.SymbolBlock.imports(f"{prefix}-symbol.json", inputs, f"{prefix}-0000.params")


def perform_task(place: str, kind: str, dtype: str) -> Dict[str, Any]:
    """Run a model and write its outputs; return {}."""
    folder = Path(place)
    # Only NumPy shape semantics read the shapes saved by NumPy-style networks.
    mx.util.set_np_shape((folder / "numpy").exists())
    given = np.load(folder / "inputs.npz")
    data = [mx.nd.array(given[name], dtype=given[name].dtype) for name in given.files]
    if kind == "load":
        net = load_model(folder, dtype, given.files)
    else:
        from mxnet.contrib import amp

        plain = load_model(folder, "float32", given.files)
        plain.hybridize()
        plain(*data)
        net = amp.convert_hybrid_block(plain, target_dtype=dtype, ctx=mx.cpu())
    net.hybridize()
    outputs = flat(net(*data))
    mx.nd.waitall()
    assert not any(name.split(".")[0] == "mxamp" for name in sys.modules), "mxamp was imported"
    np.savez(folder / f"{kind}-{dtype}.npz", *outputs)
    return {}


if __name__ == "__main__":
    serve(perform_task)
