"""The models of `scripts/bench`, and which names of others can be given."""

import re
from typing import Any, Sequence

import click

from mxamp.errors import unknown

MODELS = (
    "resnet50-16", "resnet50-4", "mobilenet_v2-8", "densenet121-4", "squeezenet1_1-8", "vgg16-2",
    "resnext50_32x4d-2", "textbook-4", "mlp-64", "bert-16", "bert-4", "bert_base-4",
    "bert_base_512-1", "lstm-8", "lstm_cell-8", "lstm_650-20",
)  # fmt: skip


def checked(_context: Any, _option: Any, names: Sequence[str]) -> Sequence[str]:
    """Return the names of models, if there are such; GluonCV is asked for what MODELS has not."""
    own = sorted({model.rsplit("-", 1)[0] for model in MODELS})
    for name in names:
        if re.fullmatch(r"[\w.]+-[1-9]\d*(@[1-9]\d*)?", name) is None:
            raise click.BadParameter(f"{name!r} has no batch: write it as in resnet50-16")
        title = name.rsplit("-", 1)[0]
        if title in own:
            continue
        from gluoncv import model_zoo

        known = (*own, *model_zoo.get_model_list())
        if title.lower() not in known:
            raise click.BadParameter(str(unknown("model", title, known)))
    return names
