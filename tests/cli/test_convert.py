"""`mxamp convert`: what it says of bad input, in one line that names the file or the option."""

import json
import os
import re
import shutil
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from helpers import ROOT, check_python, randn, run_mxamp

S = mx.sym
NET = S.FullyConnected(S.var("data"), num_hidden=4, name="fc")
NET = S.FullyConnected(NET, num_hidden=3, name="head_fwd")
PARAMS = {
    "fc_weight": randn(4, 8), "fc_bias": randn(4), "head_fwd_weight": randn(3, 4),
    "head_fwd_bias": randn(3),
}  # fmt: skip
# Underflows in float16, and only there.
LOST = S.FullyConnected(S.var("data") * 1e-30, num_hidden=4, no_bias=True, name="fc") * 1e30
# Overflows in float16, and only there.
HUGE = S.FullyConnected(S.var("data") * 1e5, num_hidden=4, no_bias=True, name="fc")

CUSTOM = """
import mxnet as mx

@mx.operator.register("cli_doubled")
class Doubled(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        class Op(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                self.assign(out_data[0], req[0], in_data[0] * 2)
        return Op()
"""


ONES = np.ones((2, 8))
ARRAYS = {"data": ONES.astype("float32"), "huge": ONES * 1e300, "text": ONES.astype(str)}


def save(prefix, epoch=0, net=NET):
    params = {name: value for name, value in PARAMS.items() if name in net.list_inputs()}
    mx.model.save_checkpoint(prefix, epoch, net, params, {})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    before = os.getcwd()
    os.chdir(folder)
    for name in ("m", "cut", "cutp", "list", "foreign", "attribute", "pipe"):
        save(name)
    for epoch in (3, 7):
        save("many", epoch)
    save("one", 5)
    save("lost", net=LOST)
    save("huge", net=HUGE)
    mx.nd.save("list-0000.params", [mx.nd.ones(2)])
    foreign = {f"arg:conv{i}_weight": mx.nd.ones(2) for i in range(5)}
    mx.nd.save("foreign-0000.params", foreign)
    mx.nd.waitall()
    text, params = Path("m-symbol.json").read_bytes(), Path("m-0000.params").read_bytes()
    contents = {
        "cut-symbol.json": text[: len(text) // 2],
        "cutp-0000.params": params[: len(params) // 2], "m.onnx": b"x",
        "cli_custom.py": CUSTOM.encode(),
    }  # fmt: skip
    for name, content in contents.items():
        Path(name).write_bytes(content)
    # Saved where the operator is registered, and read where it is not.
    custom = S.FullyConnected(S.sigmoid(S.var("data"), name="custom"), num_hidden=4, name="fc")
    save("custom", net=custom)
    path, attrs = Path("custom-symbol.json"), '"attrs": {"op_type": "cli_doubled"}'
    path.write_text(path.read_text().replace('"op": "sigmoid"', f'"op": "Custom", {attrs}'))
    for name, values in ARRAYS.items():
        np.save(f"{name}.npy", values)
    Path("attribute-symbol.json").write_text(NET.tojson().replace("num_hidden", "num_hiddn"))
    os.remove("pipe-0000.params")
    os.mkfifo("pipe-0000.params")
    for part in ("symbol.json", "0000.params"):
        os.symlink(f"m-{part}", f"link-{part}")
    os.symlink("data.npy", "data-symbol.json")
    os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def in_folder(models, monkeypatch):
    """Run in the folder of the models, and leave it and the path of imports as they were."""
    monkeypatch.chdir(models)
    monkeypatch.syspath_prepend(models)
    before = set(os.listdir())
    yield
    for name in set(os.listdir()) - before:
        (shutil.rmtree if os.path.isdir(name) else os.remove)(name)


F16 = "--dtype float16"
CHECK = f"m {F16} --out x --check --input"

#: The arguments, what the last line says, and the status.
BAD = json.loads((ROOT / "tests" / "cli" / "bad_convert.json").read_text())


@pytest.mark.parametrize("arguments, said, status", BAD, ids=[one[0] for one in BAD])
def test_bad_input_is_told_in_one_line(arguments, said, status):
    before = set(os.listdir())
    result = run_mxamp("convert", *arguments.split(), status=status)
    assert isinstance(result.exception, SystemExit), result.exception
    for part in said:
        assert part in result.output.splitlines()[-1]
    assert set(os.listdir()) == before


@pytest.mark.parametrize(
    "arguments, cells, said",
    [
        (f"{CHECK} data:2,8 --tolerance 1e-9", ["0", "1"], "Keep more in float32 with --keep-fp32"),
        (f"lost {F16} --device gpu --out x --check --input data:2,8", ["1"], "error of 1, more"),
        (f"huge {F16} --out x --check --input data:data.npy", ["8"], "Inf or NaN in 8 elements"),
    ],
)
def test_a_failed_check_shows_the_errors_of_outputs_then_one_line(arguments, cells, said):
    before = set(os.listdir())
    *lines, last = run_mxamp("convert", *arguments.split(), status=1).output.splitlines()
    (row,) = (line for line in lines if "_output" in line)
    assert set(cells) <= set(re.split(" {2,}", row))
    assert "Error: " in last and "nothing was written" in last and said in last
    assert set(os.listdir()) == before


@pytest.mark.slow
def test_custom_operators_are_imported(tmp_path):
    """In another process, as MXNet keeps what is registered until the process ends."""
    for command in ("convert", "explain"):
        out = ["--out", str(tmp_path / "x")] if command == "convert" else []
        arguments = [command, "custom", "--dtype", "float16", "--import", "cli_custom", *out]
        check_python(f"from mxamp.cli.main import main; main({arguments!r})", cwd=".")
    assert (tmp_path / "x-symbol.json").is_file()
