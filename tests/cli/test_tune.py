"""`mxamp tune`: a policy for a saved model, and what the other commands make of it."""

import io
import json
import logging
import re
import sys
import time
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner

import mxamp as amp
from helpers import ROOT, randn, run_mxamp
from mxamp.cli.main import main
from mxamp.cli.output import progress
from mxamp.convert.outputs import run_model
from mxamp.tools.tuning import tune as module
from tuned import FAST

S = mx.sym
NET = S.FullyConnected(S.var("data"), num_hidden=32, name="fc")
# Inf in float16 where it is not kept, and of all layers only here.
NET = S.FullyConnected(S.relu(NET, name="act"), num_hidden=16, no_bias=True, name="large")
NET = S.FullyConnected(NET * 1e-7, num_hidden=4, no_bias=True, name="last")
PARAMS = {
    "fc_weight": randn(32, 8), "fc_bias": randn(32), "large_weight": randn(16, 32, scale=1e5),
    "last_weight": randn(4, 16),
}  # fmt: skip
EMBEDDED = S.Embedding(S.var("index"), input_dim=10, output_dim=8, name="embedding")
EMBEDDED = S.FullyConnected(EMBEDDED, num_hidden=4, no_bias=True, name="fc")
#: Without timing, what comes out is the same on each machine.
QUICK = ["--accuracy-only", "--device", "cpu", "--budget", "30s"]
F16 = ["--dtype", "float16", *QUICK]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    mx.model.save_checkpoint(str(folder / "m"), 0, NET, PARAMS, {})
    embedding = {"embedding_weight": randn(10, 8), "fc_weight": randn(4, 24)}
    mx.model.save_checkpoint(str(folder / "e"), 0, EMBEDDED, embedding, {})
    mx.nd.waitall()
    data = randn(6, 8, seed=1).asnumpy()
    np.savez(folder / "one.npz", data=data[:3])
    np.savez(folder / "two.npz", data=data[3:])
    np.savez(folder / "index.npz", index=np.array([[1, 2, 3]]))
    (outputs,) = run_model((NET, PARAMS, {}), {"data": mx.nd.array(data)}, mx.cpu())
    labels = outputs.argmax(1)
    text = "def agreement(label, output):\n    return (output.argmax(1) == label).mean()"
    (folder / "judge.py").write_text(text)
    np.savez(folder / "labelled.npz", data=data, label=labels)
    np.savez(folder / "short.npz", data=data, label=labels[:2])
    np.savez(folder / "wrong.npz", dat=data)
    np.savez(folder / "nan.npz", data=data * np.nan)
    np.savez(folder / "wide.npz", data=randn(3, 9).asnumpy())
    np.save(folder / "data.npy", data)
    (folder / "cut.npz").write_bytes((folder / "one.npz").read_bytes()[:150])
    amp.Policy.default("float16", "cpu").override(fp32=["dot"]).save(folder / "start.toml")
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
    return run_mxamp(*arguments, status=status).output


def test_it_keeps_the_layer_that_overflows_and_says_so(out):
    output = run("tune", "m", *F16, "--input", "data:data.npy", "--out", out.name)
    assert amp.Policy.load(out).fp32_layers == ("large",)
    assert "inference, within a relative error of 0.05" in output
    assert "keeps in float32: large." in output and "random numbers" not in output
    command = "mxamp convert m --policy p.toml --out m-p"
    assert command in output.splitlines()[-1] and command in out.read_text()


def test_random_inputs_are_noted_in_the_file_too(out):
    output = run("tune", "m", *F16, "--input", "data:4,8", "--out", out)
    assert "random numbers for data" in output and "random numbers for data" in out.read_text()


def test_integer_inputs_in_files(models, out):
    run("tune", "e", *F16, "--data", "index.npz", "--input-dtype", "index:int64", "--out", out)
    assert amp.Policy.load(out).lowers


def test_it_starts_from_a_policy_and_from_layers_to_keep(out):
    arguments = ["--policy", "start.toml", *QUICK, "--input", "data:4,8", "--keep-fp32", "l*"]
    output = run("tune", "m", *arguments, "--out", out)
    policy = amp.Policy.load(out)
    assert policy.rule("dot").op_class == "fp32" and "l*" in policy.fp32_layers
    assert "keeps in float32: none" in output


def test_a_model_with_numpy_semantics(models, out):
    with mx.util.np_shape():
        mx.model.save_checkpoint("np", 0, NET, {k: v.copy() for k, v in PARAMS.items()}, {})
        mx.nd.waitall()
    run("tune", "np", *F16, "--data", "one.npz", "--out", out)
    assert len(amp.Policy.load(out).fp32_layers) == 1


@pytest.mark.parametrize("way", ["plain", "autocast", "converted", "fused", "openvino"])
def test_the_printed_command_makes_the_form_that_was_measured(models, out, way, monkeypatch):
    measured, converted = module._Search.tuning, {}
    beside = {"in_mxnet": FAST} if way == "openvino" else {}
    monkeypatch.setattr(
        module._Search, "tuning", lambda self: replace(measured(self), way=way, **beside)
    )
    monkeypatch.setattr("mxamp.cli.convert.convert_files", lambda *_, **o: converted.update(o))
    *_, before, last = run("tune", "m", *F16, "--data", "one.npz", "--out", "p.toml").splitlines()
    assert last in out.read_text()
    if way in ("plain", "autocast"):
        assert ("amp.init(policy=amp.Policy.load('p.toml'))" in last) == (way == "autocast")
        assert before == "Wrote p.toml." and "run the model as it is" in last
        refused = run(*"convert m --policy p.toml --out x --fuse".split(), status=2)
        assert repr(way) in refused and not converted
        return
    export = "Next, for OpenVINO: mxamp export-onnx m --input data:3,8 --out m.onnx"
    assert before == (export if way == "openvino" else "Wrote p.toml.")
    command = last.partition(": mxamp ")[2].split()
    assert command[-1] == "m-p"
    CliRunner().invoke(main, command)
    assert converted["cast_optional_params"] and converted["fuse"] == (way in ("fused", "openvino"))


@pytest.mark.parametrize("metric", ["accuracy", "judge:agreement"])
def test_a_metric_on_labels_in_the_files(models, out, metric):
    options = ["--data", "labelled.npz", "--data", "labelled.npz", "--metric", metric]
    output = run("tune", "m", *F16, *options, "--min-metric", 0.5, "--out", out)
    assert "with a metric from 0.5." in output and "metric 1." in output
    assert amp.Policy.load(out).fp32_layers == ("large",)
    run("convert", "m", "--policy", out, "--out", "judged", "--force")
    _, row, scores, _ = run("compare", "m", "judged", *options).splitlines()
    assert row.startswith("last_output")
    assert re.fullmatch(r"\S*(accuracy|agreement)\S*: 1 for m, 1 for judged", scores)


def test_float32_is_a_dtype(out):
    options = ["--dtype", "float32", "--budget", "1s", "--input", "data:4,8"]
    assert "float16" not in run("tune", "m", *options, "--out", out)
    assert amp.Policy.load(out).target_dtype == "float32"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal_alone(monkeypatch):
    steps = logging.getLogger("mxamp.progress")
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("Starting"):
            steps.info("Timing fused once")
            time.sleep(0.6)
        steps.info("unseen")
        assert ("Timing fused once" in stream.getvalue()) == stream.isatty()
        assert "unseen" not in stream.getvalue()


# ---------------------------------------------------------------------- what is wrong


#: The arguments, and what is said of them.
BAD = json.loads((ROOT / "tests" / "cli" / "bad_tune.json").read_text())


@pytest.mark.parametrize("arguments, words", BAD)
def test_bad_input_is_told_and_nothing_is_written(models, arguments, words):
    before = {path: path.read_bytes() for path in models.iterdir() if path.is_file()}
    done = CliRunner().invoke(main, ["tune", "m", *F16, *arguments.split()], prog_name="mxamp")
    assert done.exit_code and words in done.output
    assert {path: path.read_bytes() for path in models.iterdir() if path.is_file()} == before


@pytest.mark.skipif(mx.context.num_gpus() > 0, reason="there is a GPU")
def test_a_policy_for_gpus_is_tuned_for_accuracy_alone(out):
    output = run("tune", "m", "--device", "gpu", "--input", "data:4,8", "--out", "p.toml", status=2)
    assert "policy for the gpu, data on cpu" in output and output.endswith("with --accuracy-only\n")
    run("tune", "m", "--device", "gpu", *F16[2:3], "--data", "one.npz", "--out", out)
    policy = amp.Policy.default("float16", "gpu").override(fp32_layers=["large"])
    assert amp.Policy.load(out) == policy
    run("convert", "m", "--policy", out, "--out", "for-gpu")
