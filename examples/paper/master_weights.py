"""Master weights, section 3.1 of the paper: float16 weights that are updated directly fall behind.

A weight of more than 2048 times its update may not change in float16, which has 11 bits. At the
small learning rate of this net, 9 of 10 weights are that large.
"""

from common import Classifier, Config, Experiment, differs, initialized, matches

# isort: split
import mxnet as mx
from mxnet.gluon import nn


def task(config, rng, steps):
    net = nn.HybridSequential()
    net.add(nn.Dense(64, activation="relu"), nn.Dense(64, activation="relu"), nn.Dense(10))
    initialized(net, mx.nd.zeros((2, 1, 8, 8)))
    settings = {"learning_rate": 0.002}
    if not config.variant:
        return Classifier(net, rng, 30, ("sgd", settings))
    net.cast("float16")
    settings["multi_precision"] = config.variant == "masters"
    return Classifier(net, rng, 30, ("sgd", settings), "float16")


def verdict(found, fast):
    right = ("float32 weights, cast (mxamp)", "float16 weights, float32 masters")
    return [
        *(matches(found, name, "float32", 3 if fast else 1.5) for name in right),
        differs(found, "float16 weights alone", "float32", -2 if fast else -5),
    ]


EXPERIMENT = Experiment(
    title="Master weights: accuracy on 597 images, %",
    paper="updating float16 weights loses accuracy, float32 masters do not (3.1, figure 2)",
    # Not scaled: the gradients of this net are large enough, and weights are all that differs.
    configs=(
        Config("float32"),
        Config("float32 weights, cast (mxamp)", "float16", 1),
        Config("float16 weights, float32 masters", "float16", 1, "masters"),
        Config("float16 weights alone", "float16", 1, "direct"),
    ),
    steps=(1200, 200),
    task=task,
    verdict=verdict,
)
