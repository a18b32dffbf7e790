"""What the workers of the tests of Horovod do: train a small net in one way after the other.

horovod_worker.py OUT
"""

import sys

import mxamp as amp

# isort: split
import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from distributed import OVERFLOWS, ROWS, STEPS, batch, values
from mxnet import autograd, gluon, nd

SCALE = 1024.0
#: Worker 0 without the others.
ALONE = hvd.ProcessSet([0])


def network(seed=3, in_units=4, cast=None):
    mx.random.seed(seed)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, activation="relu", in_units=in_units))
    net.add(gluon.nn.Dense(2, in_units=2 * in_units))
    net.initialize(mx.init.Uniform(0.5))
    if cast:
        net.cast(cast)
    net.hybridize()
    return net


#: By name: what `train` is called with.
WAYS = {
    "scale_loss": {},
    "GradScaler": {"way": "GradScaler"},
    "decorate": {"way": "decorate"},
    "static": {"scaler": amp.StaticLossScaler(SCALE)},
    "predivided, average before": {"average_before": True, "gradient_predivide_factor": 2.0},
    "groups": {"num_groups": 2},
    "fp16": {"compression": hvd.Compression.fp16},
    "accumulated": {"accumulate": 2},
    "clipped": {"clip": 0.5},
    "late shapes": {"in_units": 0},
    "float16 net": {"cast": "float16", "multi_precision": True},
    "fp16, large scale": {
        "compression": hvd.Compression.fp16,
        "scaler": amp.LossScaler(init_scale=2.0**18),
    },
    "alone": {"process_set": ALONE},
}


def distributed_trainer(net, optimizer, average_before, options):
    """A trainer that averages after the sum, as without NCCL, or in it."""
    built = hvd.nccl_built
    hvd.nccl_built = (lambda: 21000) if average_before else built
    try:
        return hvd.DistributedTrainer(net.collect_params(), optimizer, **options)
    finally:
        hvd.nccl_built = built


class Run:
    """One way to train: the scale is one of the trainer's, a `GradScaler`'s or the optimizer's."""

    def __init__(
        self, way="scale_loss", scaler=None, average_before=False, accumulate=1, clip=None,
        in_units=4, cast=None, multi_precision=False, weights=None, **options,
    ):  # fmt: skip
        self.way, self.accumulate, self.clip, self.cast = way, accumulate, clip, cast
        # Worker 0's weights are to reach the others.
        self.net = network(3 + hvd.rank(), in_units, cast)
        if weights:
            self.net.load_parameters(weights)
        self.params = self.net.collect_params()
        hvd.broadcast_parameters(self.params, root_rank=0)
        optimizer = mx.optimizer.Adam(learning_rate=0.05, multi_precision=multi_precision)
        if way == "decorate":
            optimizer = amp.decorate(optimizer, SCALE)
        self.trainer = distributed_trainer(self.net, optimizer, average_before, options)
        if way == "scale_loss":
            scaler = scaler or amp.LossScaler(init_scale=SCALE, growth_interval=3)
            amp.init_trainer(self.trainer, scaler)
        self.scaler = amp.GradScaler(init_scale=SCALE)
        self.params.setattr("grad_req", "add" if accumulate > 1 else "write")

    def backward(self, data):
        data = nd.array(data, dtype=self.cast or "float32")
        with autograd.record(), amp.autocast(self.cast or "float16", enabled=bool(self.cast)):
            loss = (self.net(data).astype("float32") ** 2).sum()
            if self.way == "scale_loss":
                with amp.scale_loss(loss, self.trainer) as scaled:
                    scaled.backward()
        if self.way == "GradScaler":
            self.scaler.scale(loss).backward()
        if self.way == "decorate":
            loss.backward()
            for param in self.params.values():
                nd.clip(param.grad(), -1e3, 1e3, out=param.grad())  # hides what overflowed

    def step(self, rows):
        if self.way == "GradScaler":
            self.scaler.step(self.trainer, rows)
            self.scaler.update()
        elif self.clip:
            amp.clip_grad_global_norm(self.trainer, self.clip)
            self.trainer.update(rows)
        else:
            self.trainer.step(rows)
        if self.accumulate > 1:
            self.params.zero_grad()
        return self.trainer.amp_last_step.stepped, self.trainer.amp_loss_scale


def train(first=0, saved=None, **options):
    """Return the weights, and what the steps decided; `saved` is where states are kept."""
    rank, workers = hvd.rank(), hvd.size()
    run = Run(weights=saved + ".params" if first else None, **options)
    if first:
        run.trainer.load_states(saved + ".states")
    decisions = []
    for step in range(first, STEPS):
        for part in np.split(batch(step, rank, workers), run.accumulate):
            run.backward(part)
        decisions.append(run.step(ROWS // workers))
        if saved and step == 2 and rank == 0:
            run.net.save_parameters(saved + ".params")
            run.trainer.save_states(saved + ".states")
    amp.shutdown()
    return [*values(run.net), np.array(decisions, dtype="float64")]


def control(clip=None):
    """Train in one process, in plain MXNet, without the steps that overflow."""
    net = network()
    optimizer = mx.optimizer.Adam(learning_rate=0.05)
    trainer = gluon.Trainer(net.collect_params(), optimizer)
    for step in sorted(set(range(STEPS)) - set(OVERFLOWS)):
        with autograd.record():
            loss = (net(nd.array(batch(step, 0, 1))) ** 2).sum()
        loss.backward()
        if clip:
            gradients = [param.grad() for param in net.collect_params().values()]
            gluon.utils.clip_global_norm(gradients, clip)
        trainer.step(ROWS)
    return values(net)


def refused(function):
    """Return the error that a call ends with, in this worker."""
    try:
        function()
    except amp.AmpError as error:
        return str(error)
    return ""


def trainer_of(net, scaler=None):
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
    amp.init_trainer(trainer, scaler or amp.StaticLossScaler(SCALE))
    return trainer


def errors():
    """What is refused where workers differ, by name."""
    found = {}
    scaler = amp.StaticLossScaler(512.0 if hvd.rank() else SCALE)
    found["another scale"] = refused(lambda: trainer_of(network(), scaler).step(1))
    with amp.autocast("float16", enabled=hvd.rank() == 0):
        found["another policy"] = refused(lambda: trainer_of(network()).step(1))
    return found


def main(out):
    hvd.init(process_sets=[ALONE])
    found = {name: train(**options) for name, options in WAYS.items()}
    found["control"], found["control, clipped"] = control(), control(clip=0.5)
    found["saved"] = train(saved=out)
    hvd.allreduce(nd.zeros((1,)), name="written").wait_to_read()
    found["resumed"] = train(saved=out, first=3)
    found.update({name: [np.array(error)] for name, error in errors().items()})
    arrays = {f"{name}/{i}": a for name, listed in found.items() for i, a in enumerate(listed)}
    np.savez(f"{out}{hvd.rank()}", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
