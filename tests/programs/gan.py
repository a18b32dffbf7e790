"""Trains a generator and a critic, each with its own trainer; prints the generator's mean."""

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

STEPS = 60
mx.random.seed(0)
np.random.seed(0)


def net(outputs):
    made = gluon.nn.HybridSequential()
    made.add(gluon.nn.Dense(32, activation="relu"), gluon.nn.Dense(outputs))
    made.initialize(mx.init.Xavier())
    made.hybridize()
    return made


generator, critic = net(2), net(1)
trainers = [
    gluon.Trainer(one.collect_params(), "adam", {"learning_rate": 0.01})
    for one in (generator, critic)
]
loss = gluon.loss.SigmoidBCELoss()
for _ in range(STEPS):
    real, noise = nd.random.normal(3, 0.5, (32, 2)), nd.random.normal(shape=(32, 4))
    with autograd.record():
        fake = generator(noise)
        error = loss(critic(real), nd.ones(32)) + loss(critic(fake.detach()), nd.zeros(32))
    error.backward()
    trainers[1].step(32)
    with autograd.record():
        error = loss(critic(generator(noise)), nd.ones(32))
    error.backward()
    trainers[0].step(32)
print("mean", float(generator(nd.random.normal(shape=(256, 4))).mean().asscalar()))
print("steps", *(getattr(t, "amp_steps", STEPS) + getattr(t, "amp_skips", 0) for t in trainers))
