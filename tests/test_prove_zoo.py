"""`scripts/prove_zoo`: proves models, goes on where it stopped, and outlives those that die."""

import importlib
import json
import os
import signal
import subprocess
import sys

import pytest

from helpers import ROOT

FOLDER = ROOT / "scripts" / "prove_zoo"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (
            getattr(sys.modules[name], "__file__", None)
            and str(FOLDER) in sys.modules[name].__file__
        ):
            del sys.modules[name]


def prove(path, *options):
    return subprocess.run(
        [sys.executable, str(FOLDER), "--json", str(path), *options], capture_output=True, text=True,
        check=False, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )  # fmt: skip


RIGHT = {"lost": 0, "relative": 0.01, "agreement": 1.0, "loaded": {"equal": True}}


@pytest.mark.slow
@pytest.mark.proof
def test_a_model_is_proven_once(tmp_path):
    path = tmp_path / "proof.json"
    done = prove(path, "--only", "np:convolutions")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(path.read_text())["models"].values()
    for dtype in ("float16", "bfloat16"):
        assert 0 < found[dtype]["relative"] < 0.02
        assert "stock" in found[dtype]
    assert found["float16"]["loaded"] == {"equal": True}
    again = prove(path, "--only", "np:convolutions")
    assert again.returncode == 0
    assert "np:convolutions: " not in again.stdout


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def sleep():
    import time

    time.sleep(60)


@pytest.mark.parametrize(
    "task, words", [(die, "the process died (status -9)"), (sleep, "took over 0.2 s")]
)
def test_a_model_that_dies_is_a_result(module, task, words):
    assert module("processes").run_forked(task, [], 0.2 if task is sleep else 30) == {
        "failure": words
    }


@pytest.mark.parametrize(
    "name, family",
    [
        ("resnet18_v1b", "classification"),
        ("resnet18_v1b_kinetics400", "action"),
        ("resnet18_v1b_custom", "action"),
        ("hrnet_w18_small_v1_c", "classification"),
        ("hrnet_w18_small_v1_s", "segmentation"),
        ("ssd_300_resnet34_v1b_custom", "ssd"),
        ("mask_rcnn_resnet50_v1b_coco", "rcnn"),
        ("custom_faster_rcnn_fpn", "rcnn"),
        ("mobile_pose_mobilenet1.0", "pose"),
        ("monodepth2_resnet18_posenet_kitti_mono_640x192", "depth"),
        ("np:mlp", "numpy"),
    ],
)
def test_families_by_name(module, name, family):
    assert module("zoo").case_of(name).family == family


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, None),
        ({"relative": 0.5}, "relative error 0.5"),
        ({"relative": 0.5, "noise": 0.4}, None),
        ({"lost": 3}, "3 values are not finite"),
        ({"loaded": {"equal": False, "failure": "no"}}, "loaded in plain MXNet: no"),
        ({"loaded": {"equal": False, "relative": 0.5}}, "loaded in plain MXNet: relative error"),
        ({"failure": "MXNetError"}, "MXNetError"),
    ],
)
def test_what_counts_as_wrong(module, change, words):
    case = module("zoo").case_of("resnet18_v1b")
    found = module("results").problem(case, "bfloat16", {**RIGHT, **change})
    assert found is None if words is None else found.startswith(words)


def test_boxes_are_matched_by_class_and_overlap(module):
    import numpy as np

    outputs = module("zoo")
    ours = [
        np.array([[[0.0], [1.0]]]),
        np.array([[[0.9], [0.5]]]),
        np.array([[[0, 0, 10, 10], [5, 5, 9, 9.0]]]),
    ]
    moved = [ours[0], ours[1], ours[2] + 1]
    other_class = [ours[0][:, ::-1], *ours[1:]]
    assert outputs.agreement("boxes", ours, ours) == 1
    assert outputs.agreement("boxes", ours, moved) < 1
    assert outputs.agreement("boxes", ours, other_class) == 0


@pytest.mark.parametrize(
    "losses, right",
    [([2.0, 1.0, 0.5], True), ([2.0, 3.0], False), ([2.0, float("nan")], False), ([], False)],
)
def test_losses_have_to_fall(module, losses, right):
    assert module("results").losses_fall({"losses": losses}) is right


def test_the_page_has_the_tables_of_what_was_measured(module):
    """The lists of problems are prose there."""
    found = json.loads((ROOT / "docs" / "measured" / "proof.json").read_text())
    families, *_, training = module("results").markdown(found).split("\n\n")
    page = (ROOT / "docs" / "proof.md").read_text()
    assert families in page
    assert training in page


def test_a_training_that_was_not_run_is_an_empty_cell(module):
    training = {"a: float32": {"losses": [2.0, 1.0]}, "b: float16": {"failure": "no kernel | here"}}
    assert module("results").loss_table(training) == (
        ("trains", "float32", "float16"), [("a", "2 1", None), ("b", None, "no kernel | here")]
    )  # fmt: skip
    assert "| b |  | no kernel \\| here |" in module("results").markdown(
        {"models": {}, "training": training}
    )
