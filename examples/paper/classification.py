"""Image classification: mixed precision without loss scaling reaches float32's accuracy.

    python examples/paper/classification.py [--fast] [--seeds 3] [--json FILE] [--png FILE]

Section 4.1 of the paper: seven ImageNet networks need no loss scaling. Here two small networks, one
plain and one residual, learn scikit-learn's handwritten digits.
"""

from common import (
    Config,
    Experiment,
    Run,
    digits,
    draw_curves,
    facts_of,
    initialized,
    interval,
    main,
    seeded,
)

# isort: split
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

BATCH = 60
TOLERANCE = 1.0  # percentage points


class Residual(gluon.HybridBlock):
    """Two convolutions around which the input goes."""

    def __init__(self, channels, stride):
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            for step in (stride, 1):
                self.body.add(nn.BatchNorm(), nn.Activation("relu"))
                self.body.add(nn.Conv2D(channels, 3, step, padding=1, use_bias=False))
            self.around = nn.Conv2D(channels, 1, stride, use_bias=False)

    def hybrid_forward(self, F, x):
        """Return the sum of both ways."""
        return self.body(x) + self.around(x)


def network(kind):
    net = nn.HybridSequential()
    if kind == "residual":
        net.add(nn.Conv2D(8, 3, padding=1), Residual(8, 1), Residual(16, 2))
        net.add(nn.BatchNorm(), nn.Activation("relu"))
    else:
        net.add(nn.Conv2D(16, 3, padding=1, activation="relu"), nn.MaxPool2D(2))
        net.add(nn.Conv2D(32, 3, padding=1, activation="relu"), nn.Flatten())
        net.add(nn.Dense(64, activation="relu"))
    net.add(nn.Flatten(), nn.Dense(10))
    return net


def accuracy(net, images, labels):
    return 100 * float((net(images).asnumpy().argmax(1) == labels).mean())


def train(config, seed, size, tick):
    images, labels, test_images, test_labels = digits()
    rng = seeded(seed)
    net = initialized(network(config.variant), mx.nd.array(images[:2]))
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    test = mx.nd.array(test_images)
    curve, every = [], interval(size)
    with config.precision():
        trainer = config.trainer(net, "sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-4})
        for step in range(1, size["steps"] + 1):
            if step == size["steps"] * 2 // 3:
                trainer.set_learning_rate(0.005)
            chosen = rng.randint(0, len(images), BATCH)
            x, y = mx.nd.array(images[chosen]), mx.nd.array(labels[chosen])
            with autograd.record():
                config.backward(loss_function(net(x), y).mean(), trainer)
            trainer.step(1)
            if step % every == 0:
                curve.append((step, accuracy(net, test, test_labels)))
            tick()
        metric = accuracy(net, test, test_labels)
    return Run(config.name, seed, metric, curve, facts_of(trainer))


def verdict(results):
    return [
        results.matches(
            f"{kind}, float16", f"{kind}, float32", TOLERANCE * (3 if results.fast else 1)
        )
        for kind in ("plain", "residual")
    ]


def draw(figure, results):
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("plain", "residual")):
        names = [f"{kind}, float32", f"{kind}, float16"]
        draw_curves(axes, results, names, floor=85)


EXPERIMENT = Experiment(
    name="classification",
    paper="float32's accuracy without loss scaling (4.1, table 1)",
    metric="accuracy on 597 images, %",
    configs=tuple(
        Config(f"{kind}, {dtype}", dtype, variant=kind)
        for kind in ("plain", "residual")
        for dtype in ("float32", "float16")
    ),
    sizes={
        False: {"steps": 250, "evaluations": 20},
        True: {"steps": 30, "evaluations": 3},
    },
    train=train,
    verdict=verdict,
    draw=draw,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
