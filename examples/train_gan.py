"""Train two nets against each other in mixed precision: two trainers, two losses, two loss scales.

    python examples/train_gan.py [--dtype float16] [--steps 200]

The generator learns to draw points as a bell curve around (2, -1) does. Each loss is scaled for the
trainer that is going to step on it. Each trainer has a scale of its own: where the gradients of one
net overflow, only that net's step is skipped. `amp.GradScaler` would share one scale among both.
"""

import argparse

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

BATCH = 64
CENTRE = (2.0, -1.0)


def network(outputs):
    net = nn.HybridSequential()
    net.add(nn.Dense(32), nn.LeakyReLU(0.2), nn.Dense(32), nn.LeakyReLU(0.2), nn.Dense(outputs))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def noise(count=BATCH):
    return mx.nd.random.normal(shape=(count, 4))


def distance(generator):
    """Return how far the middle of what is drawn lies from where it is to be."""
    return float(np.linalg.norm(generator(noise(1000)).asnumpy().mean(0) - CENTRE))


def backward(loss, trainer):
    with amp.scale_loss(loss, trainer) as scaled:
        autograd.backward(scaled)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    mx.random.seed(0)

    amp.init(options.dtype, ctx=mx.cpu())
    generator, critic = network(2), network(1)
    settings = {"learning_rate": 2e-3, "beta1": 0.5}
    of_generator, of_critic = [
        gluon.Trainer(net.collect_params(), "adam", settings) for net in (generator, critic)
    ]
    for trainer in (of_generator, of_critic):
        amp.init_trainer(trainer)
    loss_function = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    true, false = mx.nd.ones((BATCH, 1)), mx.nd.zeros((BATCH, 1))
    before = distance(generator)
    for _ in range(options.steps):
        real = mx.nd.random.normal(shape=(BATCH, 2)) * 0.5 + mx.nd.array(CENTRE)
        fake = generator(noise())
        with autograd.record():
            loss = loss_function(critic(real), true) + loss_function(critic(fake), false)
            backward(loss.mean(), of_critic)
        of_critic.step(1)
        with autograd.record():
            backward(loss_function(critic(generator(noise())), true).mean(), of_generator)
        of_generator.step(1)
    after = distance(generator)
    amp.shutdown()

    print(f"{options.dtype}: distance from the target {before:.2f} -> {after:.2f}")
    for name, trainer in ("critic", of_critic), ("generator", of_generator):
        print(
            f"{name}: loss scale {trainer.amp_loss_scale:g}, {trainer.amp_steps} steps, "
            f"{trainer.amp_skips} skipped"
        )


if __name__ == "__main__":
    main()
