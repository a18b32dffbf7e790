"""Train a Gluon classifier in mixed precision: `init`, `init_trainer`, `scale_loss`.

    python examples/train_classifier.py [--dtype float16] [--epochs 3]

The net learns to tell patterns apart in noisy images, made up here. Three numbered lines turn mixed
precision on; the rest is a training loop as in float32. In float16 the loss scale starts so high
that gradients overflow: it falls until they fit, and these steps are skipped.
"""

import argparse

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

CLASSES, BATCH = 4, 32


def images(count, seed):
    """Return images of four fixed patterns under noise, and the patterns' numbers."""
    patterns = np.random.RandomState(0).randn(CLASSES, 1, 12, 12)
    rng = np.random.RandomState(seed)
    labels = rng.randint(0, CLASSES, count)
    noisy = patterns[labels] + 2 * rng.randn(count, 1, 12, 12)
    return mx.nd.array(noisy), mx.nd.array(labels)


def network():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D(2))
    net.add(nn.Dense(64, activation="relu"), nn.Dense(CLASSES))
    return net


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    mx.random.seed(0)
    np.random.seed(0)
    ctx = mx.cpu()  # or mx.gpu()

    amp.init(options.dtype, ctx=ctx)  # 1: operators run in the precision that suits them
    net = network()
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
    scaler = amp.LossScaler(init_scale=2.0**24) if options.dtype == "float16" else None
    amp.init_trainer(trainer, scaler)  # 2: without a scaler, the dtype's default
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    data = gluon.data.ArrayDataset(*images(640, seed=1))
    losses = []
    for _ in range(options.epochs):
        for x, y in gluon.data.DataLoader(data, BATCH, shuffle=True):
            with autograd.record():
                loss = loss_function(net(x), y).mean()
                with amp.scale_loss(loss, trainer) as scaled:  # 3: gradients carry the scale
                    autograd.backward(scaled)
            trainer.step(1)
            losses.append(loss.asscalar())
    x, y = images(200, seed=2)
    accuracy = (net(x).argmax(1) == y).mean().asscalar()
    amp.shutdown()

    print(f"{options.dtype}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {accuracy:.1%}")
    print(
        f"loss scale {trainer.amp_loss_scale:g}, {trainer.amp_steps} steps, "
        f"{trainer.amp_skips} skipped"
    )


if __name__ == "__main__":
    main()
