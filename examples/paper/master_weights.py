"""Master weights: float16 weights that are updated directly fall behind, float32 masters do not.

    python examples/paper/master_weights.py [--fast] [--seeds 3] [--json FILE] [--png FILE]

Section 3.1 of the paper: a weight of more than 2048 times its update may not change in float16,
which has 11 bits. At the small learning rate of this net, most weights are that large.
"""

from common import (
    Config,
    Experiment,
    Run,
    digits,
    draw_curves,
    draw_shares,
    facts_of,
    initialized,
    interval,
    main,
    seeded,
)

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

BATCH, LEARNING_RATE = 30, 0.002
#: Weights of so many times their update, and more, may stay as they are.
RATIO = 2048
#: Percentage points of accuracy.
TOLERANCE, MARGIN, FAST_MARGIN = 1.5, 5.0, 2.0


def network():
    net = nn.HybridSequential()
    net.add(nn.Dense(64, activation="relu", in_units=64))
    net.add(nn.Dense(64, activation="relu", in_units=64), nn.Dense(10, in_units=64))
    return net


def weights_of(net):
    values = [p.data().asnumpy() for name, p in net.collect_params().items() if "weight" in name]
    return np.concatenate([value.ravel() for value in values]).astype("float32")


def ratios(before, after):
    """Return how many times the size of its update each weight is, by powers of two."""
    updates = np.abs(after - before)
    moved = (updates > 0) & (before != 0)
    ratio = np.abs(before[moved]) / updates[moved]
    powers, counts = np.unique(np.floor(np.log2(ratio)).astype(int), return_counts=True)
    return {
        "powers": powers.tolist(),
        "counts": counts.tolist(),
        "over 2048": float((ratio > RATIO).mean()),
    }


def train(config, seed, size, tick):
    images, labels, test_images, test_labels = digits()
    rng = seeded(seed)
    net = initialized(network(), mx.nd.array(images[:2]))
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    dtype = "float32"
    settings = {"learning_rate": LEARNING_RATE}
    if config.variant:
        net.cast("float16")
        dtype = "float16"
        settings["multi_precision"] = config.variant == "masters"
    test = mx.nd.array(test_images, dtype=dtype)

    def accuracy():
        return 100 * float((net(test).asnumpy().argmax(1) == test_labels).mean())

    curve, every, facts = [], interval(size), {}
    with config.precision():
        trainer = config.trainer(net, "sgd", settings)
        for step in range(1, size["steps"] + 1):
            chosen = rng.randint(0, len(images), BATCH)
            x = mx.nd.array(images[chosen], dtype=dtype)
            y = mx.nd.array(labels[chosen])
            with autograd.record():
                config.backward(loss_function(net(x).astype("float32"), y).mean(), trainer)
            watched = config.dtype == "float32" and step == size["steps"] // 2
            before = weights_of(net) if watched else None
            trainer.step(1)
            if watched:
                facts = ratios(before, weights_of(net))
            if step % every == 0:
                curve.append((step, accuracy()))
            tick()
    return Run(config.name, seed, curve[-1][1], curve, {**facts, **facts_of(trainer)})


def verdict(results):
    tolerance = TOLERANCE * (2 if results.fast else 1)
    masters = ("float32 weights, cast (mxamp)", "float16 weights, float32 masters")
    return [
        *(results.matches(name, "float32", tolerance) for name in masters),
        results.worse("float16 weights alone", "float32", FAST_MARGIN if results.fast else MARGIN),
    ]


def draw(figure, results):
    left, right = figure.subplots(1, 2)
    draw_curves(left, results)
    facts = results.of("float32")[0].facts
    powers, counts = np.array(facts["powers"]), np.array(facts["counts"])
    lost = powers >= np.log2(RATIO)
    kinds = ((~lost, "#0072B2", "up to 2048"), (lost, "#D55E00", "over 2048"))
    draw_shares(right, powers, counts, kinds)
    right.set_xlim(0, 30)
    right.set_xlabel("weight over its update, power of two")
    right.set_ylabel("% of weights")


EXPERIMENT = Experiment(
    name="master weights",
    paper="updating float16 weights loses accuracy, float32 masters do not (3.1, figure 2)",
    metric="accuracy on 597 images, %",
    # Not scaled: the gradients of this net are large enough, and weights are all that differs.
    configs=(
        Config("float32"),
        Config("float32 weights, cast (mxamp)", "float16"),
        Config("float16 weights, float32 masters", "float16", variant="masters"),
        Config("float16 weights alone", "float16", variant="direct"),
    ),
    sizes={
        False: {"steps": 1200, "evaluations": 15},
        True: {"steps": 200, "evaluations": 2},
    },
    train=train,
    verdict=verdict,
    draw=draw,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
