"""Trains on digits, with an overflow at the step given; prints the accuracy."""

import sys

import mxnet as mx

import digits

net = digits.network()
net.hybridize()
trainer = digits.trainer_of(net)
skipped = digits.train(net, trainer, lambda loss: loss.backward(), overflow_at=int(sys.argv[1]))
print("skipped", skipped)
print("accuracy", digits.accuracy(net))
net.save_parameters("net.params")
print("saved", {v.dtype.__name__ for v in mx.nd.load("net.params").values()})
