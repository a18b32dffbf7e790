"""Train on several workers with MXNet's parameter server, and go on from a checkpoint.

    python examples/train_on_workers.py
    python examples/launch_workers.py -n 2 python examples/train_on_workers.py [--dtype float16]

The first trains alone, the second on two workers of this machine. Each worker takes its share of
every batch. A step that overflows in one worker is skipped in all; the first steps in float16 are.
"""

import argparse
import os
import tempfile

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

BATCH, INPUTS = 64, 20


def batch(step, rank, workers):
    """Return one worker's rows of a batch: points, and which side of a plane they are on."""
    points = np.random.RandomState(step).randn(BATCH, INPUTS)
    labels = points[:, :5].sum(axis=1) > 0
    return mx.nd.array(points[rank::workers]), mx.nd.array(labels[rank::workers])


def made(dtype, kvstore):
    mx.random.seed(0)  # in all workers: each computes its first gradients with its own weights
    net = nn.HybridSequential()
    net.add(nn.Dense(64, activation="relu", in_units=INPUTS), nn.Dense(2, in_units=64))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.2}, kvstore=kvstore)
    scaler = amp.LossScaler(init_scale=2.0**20) if dtype == "float16" else None
    amp.init_trainer(trainer, scaler)
    return net, trainer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    distributed = os.environ.get("DMLC_ROLE") == "worker"
    kvstore = mx.kv.create("dist_sync" if distributed else "device")
    rank, workers = kvstore.rank, kvstore.num_workers

    amp.init(options.dtype, ctx=mx.cpu())  # or mx.gpu(number)
    net, trainer = made(options.dtype, kvstore)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    losses = []
    for step in range(options.steps):
        x, y = batch(step, rank, workers)
        with autograd.record():
            loss = loss_function(net(x), y)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(BATCH)  # the rows of all workers
        losses.append(loss.mean().asscalar())
    if rank == 0:  # all have the same weights, optimizer states and loss scale
        with tempfile.TemporaryDirectory() as folder:
            net.save_parameters(f"{folder}/net.params")
            trainer.save_states(f"{folder}/trainer.states")
    amp.shutdown()

    print(f"{options.dtype}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {workers} workers")
    print(
        f"loss scale {trainer.amp_loss_scale:g}, {trainer.amp_steps} steps, "
        f"{trainer.amp_skips} skipped"
    )


if __name__ == "__main__":
    main()
