"""Train on several workers: with MXNet's parameter server, or with Horovod.

    python examples/train_on_workers.py
    python examples/launch_workers.py -n 2 python examples/train_on_workers.py [--dtype float16]
    horovodrun --gloo -np 2 -H localhost:2 python examples/train_on_workers.py --horovod

The first command trains alone, the others on two workers of this machine; `scripts/install_horovod`
builds Horovod. Each worker takes its share of every batch. If gradients overflow in one worker, as
in the first steps in float16, all workers skip the step.
"""

import argparse
import os

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


def network():
    mx.random.seed(0)  # in all workers: each computes its first gradients with its own weights
    net = nn.HybridSequential()
    net.add(nn.Dense(64, activation="relu", in_units=INPUTS), nn.Dense(2, in_units=64))
    net.initialize(mx.init.Xavier())  # on GPUs with ctx=mx.gpu(number)
    net.hybridize()
    return net


def with_horovod(net):
    """Return a trainer, this worker's rank and the number of workers."""
    import horovod.mxnet as hvd

    hvd.init()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    # compression=hvd.Compression.fp16 sends float16
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.2})
    return trainer, hvd.rank(), hvd.size()


def with_parameter_server(net):
    """Return a trainer, this worker's rank and the number of workers."""
    distributed = os.environ.get("DMLC_ROLE") == "worker"
    store = mx.kv.create("dist_sync" if distributed else "device")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.2}, kvstore=store)
    return trainer, store.rank, store.num_workers


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--horovod", action="store_true")
    options = parser.parse_args()
    net = network()
    made = with_horovod if options.horovod else with_parameter_server
    trainer, rank, workers = made(net)

    amp.init(options.dtype, ctx=mx.cpu())  # or mx.gpu(number)
    scaler = amp.LossScaler(init_scale=2.0**20) if options.dtype == "float16" else None
    amp.init_trainer(trainer, scaler)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    losses = []
    for step in range(80):
        x, y = batch(step, rank, workers)
        with autograd.record():
            loss = loss_function(net(x), y)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        # Horovod averages over workers; the parameter server adds up.
        trainer.step(len(x) if options.horovod else BATCH)
        losses.append(loss.mean().asscalar())
    amp.shutdown()

    print(f"{options.dtype}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {workers} workers")
    print(
        f"loss scale {trainer.amp_loss_scale:g}, {trainer.amp_steps} steps, "
        f"{trainer.amp_skips} skipped"
    )


if __name__ == "__main__":
    main()
