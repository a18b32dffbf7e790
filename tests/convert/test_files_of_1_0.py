"""Model files that mxamp 1.0.0 wrote load, run and mean what they meant."""

import shutil
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import with_avx512
from mxamp.convert.saved import load_model

FOLDER = Path(__file__).with_name("files_of_1_0")
DATA = np.load(FOLDER / "data.npz")  # the inputs, and the outputs of the float32 model
ERRORS = {"bfloat16": 0.01, "float16": 0.002, "cast": 0.01, "fused": 0.02}

pytestmark = pytest.mark.filterwarnings("ignore:Cannot decide type")


def error(output):
    return np.linalg.norm(output - DATA["output"]) / np.linalg.norm(DATA["output"])


@with_avx512
@pytest.mark.parametrize("name", ERRORS)
def test_models_run_as_they_did(name):
    prefix, x = FOLDER / name, mx.nd.array(DATA["data"])
    net = mx.gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params")
    if name == "fused":
        net.hybridize(static_alloc=True, static_shape=True)
    found = net(x)
    assert found.dtype == np.float32
    assert 0 < error(found.asnumpy()) < ERRORS[name]


@with_avx512
@pytest.mark.parametrize("name", ERRORS)
def test_models_become_float32_again(name, tmp_path):
    inputs = {"data": DATA["data"]}
    done = amp.convert_files(
        FOLDER / name, tmp_path / "wide", target_dtype="float32", check_inputs=inputs
    )
    module = mx.mod.Module.load(str(tmp_path / "wide"), 0, label_names=None)
    module.bind([("data", DATA["data"].shape)], for_training=False)
    module.forward(mx.io.DataBatch([mx.nd.array(DATA["data"])], []), is_train=False)
    assert error(module.get_outputs()[0].asnumpy()) < ERRORS[name]
    assert done.errors[0].relative < ERRORS[name]


def test_a_pair_of_which_one_file_was_replaced_is_named(tmp_path, caplog):
    """A process of mxamp 1.0 was killed after it moved the parameters, before the symbol."""
    half = tmp_path / "half"
    shutil.copytree(FOLDER / "half", half)
    hidden = {path.name for path in half.iterdir() if path.name.startswith(".")}
    with pytest.raises(
        amp.ArgumentError, match="killed conversion has left .model-symbol.json.mxamp-ready"
    ):
        load_model(half / "model")
    source = FOLDER / "bfloat16"
    amp.convert_files(source, half / "model", target_dtype="bfloat16", force=True)
    assert "killed conversion has left .model-symbol.json.mxamp-ready" in caplog.text
    load_model(half / "model")
    # Nothing that may be the only copy is deleted.
    assert hidden == {path.name for path in half.iterdir() if path.name.startswith(".")}
