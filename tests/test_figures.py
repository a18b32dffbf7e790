"""The speeds on README and the page of evidence are those of docs/measured."""

import json
import re

import pytest

from helpers import ROOT

EVIDENCE = (ROOT / "docs/evidence.md").read_text()
README = (ROOT / "README.md").read_text()
MODELS = {
    "ResNet-50": "resnet50", "MobileNetV2": "mobilenet_v2", "DenseNet-121": "densenet121", "VGG-16": "vgg16",
    "ResNeXt-50": "resnext50_32x4d", "MLP": "mlp", "BERT base": "bert_base", "BERT of 2 layers": "bert",
    "LSTM of 256 units": "lstm", "LSTM of 650 units": "lstm_650", "MobileNetV3": "mobilenetv3_large", "SSD with ResNet-50": "ssd",
    "a small network with global pooling": "textbook", "SE-ResNet-50": "se_resnet50_v1",
}  # fmt: skip
FLOAT32 = "training mxamp, training torch32, inference mxamp, inference fused, inference torch32"
#: The first cell of a table of docs/evidence.md, its file, and the mode and contender of columns.
TABLES = [
    ("inference in bfloat16", "avx512_bf16", ["inference mxamp", "inference fused"]),
    ("training in bfloat16", "avx512_bf16", ["training mxamp"]),
    ("float32 (speed", "avx2", [*FLOAT32.split(", "), "inference openvino32"]),
]


def measured(name):
    rows = json.loads((ROOT / f"docs/measured/{name}.json").read_text())["rows"]
    return {
        (row["model"].rpartition("-")[0], f"{row['mode']} {row['contender']}"): row["ratio"]
        for row in rows
        if "ratio" in row  # else it raised an error
    }


def table(text, first):
    lines = text[text.index(f"| {first}") :].partition("\n\n")[0].splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line
    ]


@pytest.mark.parametrize("first, name, columns", TABLES)
def test_the_page_of_evidence(first, name, columns):
    found = measured(name)
    for model, *cells in table(EVIDENCE, first)[1:]:
        key = MODELS[model.rpartition(", batch")[0]]
        speeds = [found.get((key, one)) for one in columns]  # PyTorch lacks some of the models
        assert cells[: len(columns)] == ["none" if one is None else f"{one:.2f}" for one in speeds]


@pytest.mark.parametrize("first, name, skip", [
    ("speed in bfloat16", "avx512_bf16", 1), ("speed in float32", "avx2", 0),
])  # fmt: skip
def test_readme(first, name, skip):
    found = measured(name)
    [_, *heads], *rows = table(README, first)
    for mode, *cells in rows:
        kind = "training mxamp" if mode == "training" else "inference fused"
        if "contrib" not in "".join(cells):
            wanted = [f"{found[MODELS[head], kind]:.1f}" for head in heads[skip:]]
            assert cells[skip:] == wanted, mode


def test_the_range_on_the_page_of_dtypes():
    page = (ROOT / "docs/which-dtype.md").read_text()
    for kind, said in (
        ("training mxamp", r"usually \[1\.0 to ([\d.]+)"),
        ("inference fused", r"inference is 1\.0 to ([\d.]+) times"),
    ):
        most = max(ratio for (_, one), ratio in measured("avx2").items() if one == kind)
        assert re.search(said, page)[1] == f"{most:.1f}"
