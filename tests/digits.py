"""Handwritten digits, a small net, and the accuracy it reaches: what each front door trains."""

import functools

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from sklearn.datasets import load_digits

BATCH = 60
EPOCHS = 5


@functools.lru_cache(maxsize=1)
def arrays():
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(images))
    images = (images[order] / 16).astype("float32").reshape(-1, 1, 8, 8)
    labels = labels[order].astype("float32")
    return images[:1200], labels[:1200], images[1200:], labels[1200:]


def batches():
    images, labels, _, _ = arrays()
    for i in range(0, len(images), BATCH):
        yield nd.array(images[i : i + BATCH]), nd.array(labels[i : i + BATCH])


def network(seed=0):
    mx.random.seed(seed)
    np.random.seed(seed)
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(16, 3, padding=1, in_channels=1), nn.BatchNorm(in_channels=16), nn.Activation("relu"),
        nn.MaxPool2D(2), nn.Conv2D(16, 3, padding=1, in_channels=16), nn.Activation("relu"),
        nn.Flatten(), nn.Dense(10, in_units=256),
    )  # fmt: skip
    net.initialize(mx.init.Xavier())
    return net


def trainer_of(net, optimizer="sgd", **settings):
    if not isinstance(optimizer, mx.optimizer.Optimizer):
        settings = {"learning_rate": 0.05, "momentum": 0.8, **settings}
    return gluon.Trainer(net.collect_params(), optimizer, settings or None, update_on_kvstore=False)


def accuracy(net):
    _, _, images, labels = arrays()
    return float((net(nd.array(images)).asnumpy().argmax(1) == labels).mean())


def values(net):
    return [p.data().asnumpy() for p in net.collect_params().values() if p.grad_req != "null"]


def train(net, trainer, backward, step=None, overflow_at=3):
    """Train; in step `overflow_at` a gradient holds Inf. Return whether that step changed nothing."""
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    count, skipped = 0, None
    for _ in range(EPOCHS):
        for data, label in batches():
            with autograd.record():
                loss = loss_function(net(data), label)
                backward(loss)
            if count == overflow_at:
                before = values(net)
                next(iter(net.collect_params().values())).grad()[:] = np.inf
            (step or (lambda: trainer.step(BATCH)))()
            if count == overflow_at:
                skipped = all((a == b).all() for a, b in zip(before, values(net)))
            count += 1
    return skipped
