"""`mxamp tune`: a policy for a saved model, and what the other commands make of it."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner

from helpers import ROOT, randn
from mxamp.cli.main import main
from mxamp.policy.policy import Policy
from mxamp.tools.tuning import tune as module

S = mx.sym
NET = S.FullyConnected(S.var("data"), num_hidden=32, name="fc")
# Inf in float16 where it is not kept, and of all layers only here.
NET = S.FullyConnected(S.relu(NET, name="act"), num_hidden=16, no_bias=True, name="large")
NET = S.FullyConnected(NET * 1e-7, num_hidden=4, no_bias=True, name="last")
PARAMS = {
    "fc_weight": randn(32, 8), "fc_bias": randn(32), "large_weight": randn(16, 32, scale=1e5),
    "last_weight": randn(4, 16),
}  # fmt: skip
EMBEDDED = S.FullyConnected(
    S.Embedding(S.var("index"), input_dim=10, output_dim=8, name="embedding"), num_hidden=4, name="fc"
)  # fmt: skip
EMBEDDED = S.broadcast_mul(EMBEDDED, S.var("mask"))
INDEX = {"index": np.array([[1, 2, 3]]), "mask": np.ones((1, 4), "float32")}
#: Without timing, what comes out is the same on each machine.
QUICK = ["--accuracy-only", "--device", "cpu", "--budget", "30s"]
F16 = ["--dtype", "float16", *QUICK]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    mx.model.save_checkpoint(str(folder / "m"), 0, NET, PARAMS, {})
    params = {
        "embedding_weight": randn(10, 8), "fc_weight": randn(4, 24), "fc_bias": randn(4),
    }  # fmt: skip
    mx.model.save_checkpoint(str(folder / "e"), 0, EMBEDDED, params, {})
    mx.nd.waitall()
    data = randn(6, 8, seed=1).asnumpy()
    np.savez(folder / "one.npz", data=data[:3])
    np.savez(folder / "two.npz", data=data[3:])
    np.savez(folder / "index.npz", **INDEX)
    np.savez(folder / "wrong.npz", dat=data)
    np.savez(folder / "nan.npz", data=data * np.nan)
    np.savez(folder / "empty.npz")
    np.savez(folder / "rows.npz", data=data[:0])
    np.savez(folder / "wide.npz", data=randn(3, 9).asnumpy())
    np.savez(folder / "objects.npz", data=np.array([{}], object))
    np.save(folder / "data.npy", data)
    (folder / "text.npz").write_bytes(b"no")
    whole = (folder / "one.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "flipped.npz").write_bytes(whole[:150] + bytes([whole[150] ^ 255]) + whole[151:])
    Policy.default("float16", "cpu").override(fp32=["dot"]).save(folder / "start.toml")
    return folder


@pytest.fixture(autouse=True)
def inside(models, monkeypatch):
    monkeypatch.chdir(models)


@pytest.fixture
def out(models):
    path = models / "p.toml"
    yield path
    path.unlink(missing_ok=True)


def run(*arguments, status=0):
    done = CliRunner().invoke(main, [*map(str, arguments)], prog_name="mxamp")
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture(scope="module")
def tuned(models):
    """A policy file with one layer in float32."""
    before = os.getcwd()
    os.chdir(models)
    output = run("tune", "m", *F16, "--input", "data:data.npy", "--out", "tuned.toml")
    os.chdir(before)
    return models / "tuned.toml", output


def test_it_keeps_the_layer_that_overflows_and_says_so(tuned):
    path, output = tuned
    assert Policy.load(path).fp32_layers == ("large",)
    lines = output.splitlines()
    assert "Tuned for inference, within a relative error of 0.05." in lines
    assert "keeps in float32: 1 (large)." in output
    assert "Notes" in lines
    assert "random numbers" not in output
    assert "tuned.toml: mxamp run --policy tuned.toml SCRIPT" in lines[-1]
    assert "mxamp convert m --policy tuned.toml --out m-tuned" in lines[-1]
    assert "mxamp convert m --policy tuned.toml --out m-tuned" in path.read_text()


def test_random_inputs_are_noted_in_the_file_too(out):
    output = run("tune", "m", *F16, "--input", "data:4,8", "--out", out, "--seed", 7)
    assert "random numbers for data" in output and "seed 7" in output
    assert "random numbers for data" in out.read_text() and "seed 7" in out.read_text()


def test_integer_inputs_in_files(models, out):
    run("tune", "e", *F16, "--data", "index.npz", "--input-dtype", "index:int64", "--out", out)
    assert Policy.load(out).lowers


def test_errors_are_those_of_the_worst_batch(models, out):
    def error(*files):
        data = [text for file in files for text in ("--data", file)]
        output = run("tune", "m", *F16, *data, "--out", out, "--force")
        return float(re.search(r"error of an output is ([\d.e-]+\d)", output)[1])

    both, first, second = error("one.npz", "two.npz"), error("one.npz"), error("two.npz")
    assert both == max(first, second) != min(first, second)


def test_it_starts_from_a_policy_and_from_layers_to_keep(out):
    arguments = ["--policy", "start.toml", *QUICK, "--input", "data:4,8", "--keep-fp32", "l*"]
    output = run("tune", "m", *arguments, "--out", out)
    policy = Policy.load(out)
    assert policy.rule("dot").op_class == "fp32"
    assert "l*" in policy.fp32_layers
    assert "keeps in float32: none" in output
    run("tune", "m", "--policy", out, *QUICK, "--input", "data:4,8", "--out", out, "--force")
    assert Policy.load(out).rule("dot").op_class == "fp32"


def test_a_model_with_numpy_semantics(models, out):
    with mx.util.np_shape():
        mx.model.save_checkpoint("np", 0, NET, {k: v.copy() for k, v in PARAMS.items()}, {})
        mx.nd.waitall()
    run("tune", "np", *F16, "--data", "one.npz", "--out", out)
    assert len(Policy.load(out).fp32_layers) == 1


# ---------------------------------------------------------------------- what is done with it


def test_convert_takes_it_as_it_was_measured(models, tuned):
    path, _ = tuned
    run(*"convert m --out low --force --check --input data:4,8 --policy".split(), path)
    symbol, args, _ = mx.model.load_checkpoint("low", 0)
    assert args["fc_weight"].dtype == np.float32
    assert "amp_cast_float16" in symbol.tojson(remove_amp_cast=False)
    (row,) = run("explain", "m", "--policy", path, "--name", "large").splitlines()[1:-2]
    assert row.split()[2] == "float32"


@pytest.mark.parametrize("way, words", [
    ("plain", "run the model as it is"), ("autocast", "mxamp run --policy p.toml"),
    ("converted", "--out m-tuned --cast-params"), ("fused", "--out m-tuned --cast-params --fuse"),
])  # fmt: skip
def test_the_last_line_makes_what_was_measured(models, out, way, words, monkeypatch):
    measured = module._Tuner.tuning
    monkeypatch.setattr(
        module._Tuner, "tuning", lambda self, began: replace(measured(self, began), way=way)
    )
    output = run("tune", "m", *F16, "--data", "one.npz", "--out", "p.toml")
    assert words in output.splitlines()[-1]
    assert words in out.read_text()


SERVE = """
import mxnet as mx, numpy as np
net = mx.gluon.SymbolBlock.imports("m-symbol.json", ["data"], "m-0000.params")
net.hybridize()
print(np.isfinite(net(mx.nd.array(np.load("data.npy"))).asnumpy()).all())
"""


@pytest.mark.slow
def test_run_runs_with_it(models, tuned):
    path, _ = tuned
    script = models / "serve.py"
    script.write_text(SERVE)

    def printed(*options):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "mxamp", "run", *options, str(script)],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return done.stdout.strip()

    assert printed("--policy", str(path)) == "True"
    assert printed("--dtype", "float16") == "False"


# ---------------------------------------------------------------------- what is wrong


SHAPE = "--input data:4,8"


P = "--out p.toml"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (P, "give them with `shapes`"),
        (SHAPE, "Missing option '--out'"),
        (f"{SHAPE} --out=", "the name of the file to write is empty"),
        (f"{SHAPE} --out none/p.toml", "there is no folder"),
        (f"{SHAPE} --out start.toml", "overwrite it with --force"),
        (f"{SHAPE} --data one.npz {P}", "give --data or --input, not both"),
        *((f"--data {name}.npz {P}", f"'{name}.npz' can't be read: ") for name in ("none", "text", "cut", "flipped", "objects")),
        (f"--data data.npy {P}", "--data .npz files, not 'data.npy'"),
        (f"--data wrong.npz {P}", "--data wrong.npz: unknown input 'dat'"),
        (f"--data empty.npz {P}", "of the net's inputs, not {}"),
        (f"--data nan.npz {P}", "--data nan.npz: input 'data' is NaN"),
        (f"--data rows.npz {P}", "no elements"),
        (f"--data wide.npz {P}", "the model does not run on this data"),
        (f"--input dat:4,8 {P}", "--input: unknown input 'dat'"),
        (f"{SHAPE} --input-dtype x:int8 {P}", "unknown input 'x'"),
        (f"{SHAPE} --input-dtype data:int7 {P}", "'int7'"),
        (f"{SHAPE} --budget 0s {P}", "`budget` must be a number of"),
        (f"{SHAPE} --budget soon {P}", "not 'soon'"),
        (f"{SHAPE} --rtol 0 {P}", "--rtol"),
        (f"{SHAPE} --rtol nan {P}", "`rtol` must"),
        (f"{SHAPE} --seed -1 {P}", "--seed"),
        (f"{SHAPE} --keep-fp32 fcc {P}", "unknown layer 'fcc'"),
        (f"{SHAPE} --policy start.toml {P}", "--dtype or --policy"),
    ],
)  # fmt: skip
def test_bad_input_is_told_and_nothing_is_measured(models, arguments, words, monkeypatch):
    def none(*_):
        raise AssertionError("it was measured")

    monkeypatch.setattr(module._Tuner, "run", none)
    before = {path: path.read_bytes() for path in models.iterdir() if path.is_file()}
    output = run("tune", "m", *F16, *arguments.split(), status=2)
    assert words in output.splitlines()[-1]
    assert {path: path.read_bytes() for path in models.iterdir() if path.is_file()} == before


def test_a_folder_that_is_read_only_is_found_before(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.touch", refuse)
    monkeypatch.setattr(module._Tuner, "run", None)
    output = run("tune", "m", *F16, *SHAPE.split(), "--out", "p.toml", status=1)
    assert "'p.toml' can't be written (Permission denied)" in output


@pytest.mark.skipif(mx.context.num_gpus() > 0, reason="there is a GPU")
def test_a_policy_for_gpus_needs_one():
    output = run("tune", "m", "--device", "gpu", *SHAPE.split(), "--out", "p.toml", status=2)
    assert "with --device cpu" in output


def test_a_model_that_can_not_be_tuned(models, out):
    params = {**PARAMS, "last_weight": PARAMS["last_weight"] * np.inf}
    mx.model.save_checkpoint("inf", 0, NET, params, {})
    output = run("tune", "inf", *F16, *SHAPE.split(), "--out", out, status=1)
    assert "are Inf or NaN" in output
    assert not out.exists()


def test_ctrl_c_writes_the_best_so_far(models, out, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Tuner, "_time_forms", interrupted)
    output = run("tune", "m", *F16, "--data", "one.npz", "--out", "p.toml")
    assert "interrupted: the best policy so far is written" in output
    assert "The search ended early" in out.read_text()
    assert Policy.load(out).lowers
