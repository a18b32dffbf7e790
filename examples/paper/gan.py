"""A GAN with two trainers: in float16 it draws as well as in float32.

    python examples/paper/gan.py [--fast] [--seeds 3] [--json FILE] [--png FILE]

Section 4.6 of the paper: DCGAN, in which a generator and a discriminator train against each other.
Here it draws handwritten digits. Each trainer has a loss scale of its own. The paper compares
pictures; the number here is the Frechet distance of drawn to real digits in the features of a
classifier, as FID is for photographs.
"""

from common import (
    DYNAMIC,
    Check,
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
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

BATCH, NOISE, PICTURES = 64, 16, 12
#: Of the distance at the start.
TOLERANCE, FAST_TOLERANCE = 0.05, 0.25
LEARNS, FAST_LEARNS = 0.3, 0.9


def doubled():
    """Return a layer that doubles the sides of images.

    DCGAN has transposed convolutions. Those of MXNet's oneDNN fail in float32 training.
    """
    return nn.HybridLambda(lambda F, x: F.UpSampling(x, scale=2, sample_type="nearest"))


def generator():
    net = nn.HybridSequential()
    net.add(nn.Dense(128, use_bias=False), nn.HybridLambda(lambda F, x: x.reshape((0, 32, 2, 2))))
    net.add(nn.BatchNorm(), nn.Activation("relu"), doubled())
    net.add(nn.Conv2D(32, 3, padding=1, use_bias=False))
    net.add(nn.BatchNorm(), nn.Activation("relu"), doubled())
    net.add(nn.Conv2D(1, 3, padding=1), nn.Activation("tanh"))
    return net


def critic():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(32, 4, 2, padding=1), nn.LeakyReLU(0.2))
    net.add(nn.Conv2D(64, 4, 2, padding=1, use_bias=False), nn.BatchNorm(), nn.LeakyReLU(0.2))
    net.add(nn.Flatten(), nn.Dense(1))
    return net


def features_of(images, labels, steps):
    """Return a function to a classifier's last features: a small Inception network for digits."""
    rng = seeded(99)
    body, head = nn.HybridSequential(), nn.Dense(10)
    body.add(nn.Conv2D(16, 3, padding=1, activation="relu"), nn.MaxPool2D(2), nn.Flatten())
    body.add(nn.Dense(32, activation="tanh"))
    net = nn.HybridSequential()
    net.add(body, head)
    initialized(net, mx.nd.array(images[:2]))
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 3e-3})
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    for _ in range(steps):
        chosen = rng.randint(0, len(images), BATCH)
        with autograd.record():
            loss = loss_function(net(mx.nd.array(images[chosen])), mx.nd.array(labels[chosen]))
        loss.backward()
        trainer.step(BATCH)
    return lambda batch: body(mx.nd.array(batch)).asnumpy()


def frechet(a, b):
    """Return the Frechet distance of two sets of features, as normal distributions."""
    from scipy.linalg import sqrtm

    means, covariances = [x.mean(0) for x in (a, b)], [np.cov(x.T) for x in (a, b)]
    root = sqrtm(covariances[0] @ covariances[1]).real
    return float(((means[0] - means[1]) ** 2).sum() + np.trace(sum(covariances) - 2 * root))


def train(config, seed, size, tick):
    images, labels, test_images, _ = digits()
    features = features_of(images, labels, size["classifier"])
    real_features = features(test_images)
    rng = seeded(seed)
    noise = [rng.randn(BATCH, NOISE) for _ in range(2)]
    drawing, judging = generator(), critic()
    initialized(drawing, mx.nd.array(noise[0]), init=mx.init.Normal(0.02))
    initialized(judging, mx.nd.array(images[:2]), init=mx.init.Normal(0.02))
    fixed = np.random.RandomState(1).randn(size["drawn"], BATCH, NOISE)
    loss_function = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    true, false = mx.nd.ones((BATCH, 1)), mx.nd.zeros((BATCH, 1))

    def drawn(given):
        """Return images as in training: BatchNorm takes the batch's own statistics."""
        with autograd.train_mode():
            return drawing(mx.nd.array(given))

    def distance():
        images = np.concatenate([drawn(part).asnumpy() for part in fixed])
        return frechet(features((images + 1) / 2), real_features)

    curve, every = [(0, distance())], interval(size)
    settings = {"learning_rate": size["rate"], "beta1": 0.5}
    with config.precision():
        of_drawing, of_judging = (
            config.trainer(net, "adam", settings) for net in (drawing, judging)
        )
        for step in range(1, size["steps"] + 1):
            real = mx.nd.array(images[rng.randint(0, len(images), BATCH)]) * 2 - 1
            fake = drawn(rng.randn(BATCH, NOISE))
            with autograd.record():
                loss = loss_function(judging(real), true) + loss_function(judging(fake), false)
                config.backward(loss.mean(), of_judging)
            of_judging.step(1)
            with autograd.record():
                score = judging(drawing(mx.nd.array(rng.randn(BATCH, NOISE))))
                config.backward(loss_function(score, true).mean(), of_drawing)
            of_drawing.step(1)
            if step % every == 0:
                curve.append((step, distance()))
            tick()
        pictures = [drawn(part).asnumpy()[:, 0] for part in fixed[:1]] if seed == 0 else [[]]
    facts = {"pictures": np.round(pictures[0][:PICTURES], 2).tolist(), **facts_of(of_drawing)}
    # The last quarter's mean: the distance goes up and down.
    metric = float(np.mean([value for _, value in curve[-3:]]))
    return Run(config.name, seed, metric, curve, facts)


def verdict(results):
    start = float(np.mean([run.curve[0][1] for run in results.of("float32")]))
    tolerance = start * (FAST_TOLERANCE if results.fast else TOLERANCE)
    names = [config.name for config in results.experiment.configs]
    matching = [results.matches(name, "float32", round(tolerance, 2)) for name in names[1:]]
    return [*(learned(results, name, start) for name in names), *matching]


def learned(results, name, start):
    """Check that what is drawn has come much closer to digits."""
    end, most = results.mean(name), start * (FAST_LEARNS if results.fast else LEARNS)
    return Check(f"{name} learns", bool(end < most), f"from {start:.2f} to {end:.2f}")


def draw(figure, results):
    left, right = figure.subplots(1, 2)
    draw_curves(left, results)
    left.set_yscale("log")
    rows = [results.of(config.name)[0].facts["pictures"] for config in results.experiment.configs]
    right.imshow(np.vstack([np.hstack(row) for row in rows]), cmap="gray")
    right.set_yticks([8 * number + 3.5 for number in range(len(rows))])
    right.set_yticklabels([config.name for config in results.experiment.configs], fontsize=8)
    right.set_xticks([])


EXPERIMENT = Experiment(
    name="GAN",
    paper="draws as well as in float32 (4.6)",
    metric="Frechet distance to real digits",
    configs=(
        Config("float32"),
        Config("float16, dynamic scale", "float16", DYNAMIC),
    ),
    sizes={
        False: {"steps": 160, "evaluations": 8, "rate": 1e-3, "classifier": 200, "drawn": 5},
        True: {"steps": 24, "evaluations": 2, "rate": 2e-3, "classifier": 100, "drawn": 2},
    },
    train=train,
    verdict=verdict,
    draw=draw,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
