"""Trains a symbolic module on digits; prints the accuracy."""

import mxnet as mx
import numpy as np

import digits

images, labels, test, answers = digits.arrays()
net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=64, name="a")
net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="relu"), num_hidden=10, name="b")
mx.random.seed(0)
np.random.seed(0)
module = mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"))
module.fit(
    mx.io.NDArrayIter(images, labels, 60),
    num_epoch=6,
    initializer=mx.init.Xavier(),
    optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
)
scores = dict(module.score(mx.io.NDArrayIter(test[:540], answers[:540], 60), "acc"))
print("accuracy", scores["accuracy"])
