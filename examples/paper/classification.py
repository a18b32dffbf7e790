"""Image classification without loss scaling, section 4.1 of the paper.

The paper trained seven networks on ImageNet. Here two small networks, one plain and one residual,
learn scikit-learn's handwritten digits.
"""

from common import Classifier, Config, Experiment, initialized, matches

# isort: split
import mxnet as mx
from mxnet.gluon import nn
from mxnet.gluon.model_zoo.vision import BasicBlockV2


def task(config, rng, steps):
    net = nn.HybridSequential()
    if config.variant == "residual":
        net.add(nn.Conv2D(8, 3, padding=1), BasicBlockV2(8, 1), BasicBlockV2(16, 2, True))
        net.add(nn.BatchNorm(), nn.Activation("relu"))
    else:
        net.add(nn.Conv2D(16, 3, padding=1, activation="relu"), nn.MaxPool2D(2))
        net.add(nn.Conv2D(32, 3, padding=1, activation="relu"), nn.Flatten())
        net.add(nn.Dense(64, activation="relu"))
    net.add(nn.Flatten(), nn.Dense(10))
    rate = mx.lr_scheduler.FactorScheduler(step=steps * 2 // 3, factor=0.1, base_lr=0.05)
    optimizer = "sgd", {"momentum": 0.9, "wd": 1e-4, "lr_scheduler": rate}
    return Classifier(initialized(net, mx.nd.zeros((2, 1, 8, 8))), rng, 60, optimizer)


def verdict(found, fast):
    return [
        matches(found, f"{kind}, float16", f"{kind}, float32", 3 if fast else 1)
        for kind in ("plain", "residual")
    ]


EXPERIMENT = Experiment(
    title="Image classification: accuracy on 597 images, %",
    paper="float32's accuracy without loss scaling (4.1, table 1)",
    configs=tuple(
        Config(f"{kind}, {dtype}", dtype, 1, kind)
        for kind in ("plain", "residual")
        for dtype in ("float32", "float16")
    ),
    steps=(250, 90),
    task=task,
    verdict=verdict,
)
