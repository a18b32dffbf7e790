"""A GAN with two trainers, section 4.6 of the paper: float16 draws as well as float32.

A generator and a discriminator in the manner of DCGAN, each with a loss scale of its own. The paper
compares pictures. Here the measure is the Frechet distance of drawn to real digits, as normal
distributions of pixels.
"""

from common import Config, Experiment, handwritten, initialized, matches

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

BATCH, NOISE = 64, 16


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
    return initialized(net, mx.nd.zeros((2, NOISE)), init=mx.init.Normal(0.02))


def critic():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(32, 4, 2, padding=1), nn.LeakyReLU(0.2))
    net.add(nn.Conv2D(64, 4, 2, padding=1, use_bias=False), nn.BatchNorm(), nn.LeakyReLU(0.2))
    net.add(nn.Flatten(), nn.Dense(1))
    return initialized(net, mx.nd.zeros((2, 1, 8, 8)), init=mx.init.Normal(0.02))


def frechet(a, b):
    """Return the Frechet distance of two sets of pictures, as normal distributions."""
    means, covariances = [x.mean(0) for x in (a, b)], [np.cov(x.T) for x in (a, b)]
    # The trace of a matrix's root is the sum of the roots of its eigenvalues.
    roots = np.sqrt(np.linalg.eigvals(covariances[0] @ covariances[1]).astype(complex)).real
    return float(((means[0] - means[1]) ** 2).sum() + np.trace(sum(covariances)) - 2 * roots.sum())


class Gan:
    """A task of two nets and two losses."""

    optimizer = "adam", {"learning_rate": 1e-3, "beta1": 0.5}

    def __init__(self, config, rng, steps):
        self.images, _, self.real, _ = handwritten()
        self.rng, self.loss = rng, gluon.loss.SigmoidBinaryCrossEntropyLoss()
        self.nets = self.critic, self.generator = critic(), generator()

    def losses(self):
        """Yield the discriminator's loss, then the generator's."""
        chosen = self.rng.randint(0, len(self.images), BATCH)
        real, fake = mx.nd.array(self.images[chosen]) * 2 - 1, self.drawn(self.rng)
        ones, zeros = mx.nd.ones((BATCH, 1)), mx.nd.zeros((BATCH, 1))
        yield lambda: (
            self.loss(self.critic(real), ones) + self.loss(self.critic(fake), zeros)
        ).mean()
        noise = mx.nd.array(self.rng.randn(BATCH, NOISE))
        yield lambda: self.loss(self.critic(self.generator(noise)), ones).mean()

    def drawn(self, rng):
        """Return images as in training: BatchNorm takes the batch's own statistics."""
        with autograd.train_mode():
            return self.generator(mx.nd.array(rng.randn(BATCH, NOISE)))

    def metric(self):
        """Return the Frechet distance of 320 drawn to real digits."""
        rng = np.random.RandomState(1)
        drawn = np.concatenate([self.drawn(rng).asnumpy() for _ in range(5)])
        return frechet((drawn.reshape(-1, 64) + 1) / 2, self.real.reshape(-1, 64))


def verdict(found, fast):
    # Some 10 before training.
    learned = [
        (f"{name} learns: {values.mean():.2f}", values.mean() < 5) for name, values in found.items()
    ]
    return [*learned, matches(found, "float16", "float32", 2 if fast else 0.5)]


EXPERIMENT = Experiment(
    title="GAN with two trainers: Frechet distance to real digits",
    paper="draws as well as in float32 (4.6)",
    configs=(Config("float32"), Config("float16", "float16")),
    steps=(160, 60),
    task=Gan,
    verdict=verdict,
    measured=(0.75, 0.875, 1.0),  # the distance goes up and down
)
