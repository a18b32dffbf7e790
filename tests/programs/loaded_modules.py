"""Trains for three steps; prints the state of the garbage collector, and which modules are loaded.

The modules are those of mxamp, and rich.
"""

import gc
import sys

import mxnet as mx
from mxnet import autograd, gluon

net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(4, activation="relu"), gluon.nn.Dense(2))
net.initialize()
net.hybridize()
trainer = gluon.Trainer(net.collect_params(), "sgd")
loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
for _ in range(3):
    with autograd.record():
        loss = loss_function(net(mx.nd.ones((8, 5))), mx.nd.zeros(8))
    loss.backward()
    trainer.step(8)
mx.nd.waitall()
print(f"{gc.isenabled()},{gc.get_freeze_count() > 0}")
print(*sorted(name for name in sys.modules if name.split(".")[0] == "mxamp" or name == "rich"))
