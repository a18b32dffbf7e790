"""What the workers of the tests of distributed runs do: train a small net, in one of several ways.

distributed.py WAY OUT [first=0 load=... save=... accumulate=1]
"""

import os
import sys

if "MXNET_ENABLE_AUTO_MIXED_PRECISION" not in os.environ:  # `mxamp run` is for other programs
    import mxamp  # noqa: F401  # first: beside a new NumPy, MXNet alone can't be imported

# isort: split
import mxnet as mx
import numpy as np

RANK, WORKERS = (
    int(os.environ.get(n, d)) for n, d in (("DMLC_WORKER_ID", 0), ("DMLC_NUM_WORKER", 1))
)
STEPS, OVERFLOWS = 6, {1: 1, 4: 0}  # by step: the worker whose gradients overflow
ROWS = 8


def batch(step, rank=RANK, workers=WORKERS):
    """A worker's rows of a batch; Inf in one of them, in one worker alone."""
    data = np.random.RandomState(100 + step).randn(ROWS, 4).astype("float32")[rank::workers]
    if OVERFLOWS.get(step) == rank and workers > 1:
        data[0, 0] = np.inf
    return data


def values(net):
    return [param.data().asnumpy() for param in net.collect_params().values()]


def train_gluon(way, first=0, load=None, save=None, accumulate=1):
    from mxnet import nd

    from training import one_step, setup, trainer_in

    net, accumulate = setup()[0], int(accumulate)
    net.collect_params().setattr("grad_req", "add" if accumulate > 1 else "write")
    optimizer = mx.optimizer.Adam(learning_rate=0.05)
    if load:
        net.load_parameters(load + ".params")
    kvstore = "dist_sync" if WORKERS > 1 else None
    trainer, scaler = trainer_in(way, net.collect_params(), 1024.0, optimizer, 3, kvstore=kvstore)
    if load:
        trainer.load_states(load + ".states")

    def clip():
        for param in net.collect_params().values() if way == "decorate" else ():
            nd.clip(param.grad(), -1e3, 1e3, out=param.grad())  # hides what overflowed

    for step in range(int(first), STEPS):
        net.collect_params().zero_grad()
        one_step(net, trainer, batch(step), way, scaler, accumulate, clip, ROWS)
        assert trainer.amp_last_step.stepped == (step not in OVERFLOWS or WORKERS == 1)
        if save and step == 2:
            if RANK == 0:
                net.save_parameters(save + ".params")
                trainer.save_states(save + ".states")
            trainer._kvstore._barrier()
    return values(net), trainer.amp_loss_scale


def train_module(way):
    import mxamp as amp
    from models import module_of

    out = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    out = mx.sym.LinearRegressionOutput(out, mx.sym.var("label"), name="lin")
    rows = ROWS // WORKERS
    module = module_of(out, (rows, 4), ("label", (rows, 2)))
    mx.random.seed(3 + RANK)  # worker 0's weights are to reach the others
    module.init_params(mx.init.Uniform(0.5), force_init=True)
    optimizer = amp.decorate("adam", 1024.0)
    kvstore = "dist_sync" if WORKERS > 1 else "local"
    module.init_optimizer(kvstore, optimizer, {"learning_rate": 0.05, "rescale_grad": 1 / ROWS})
    for step in range(STEPS):
        data = mx.nd.array(batch(step))
        module.forward_backward(mx.io.DataBatch([data], [data[:, :2]]))
        module.update()
    arguments, _ = module.get_params()
    found = [arguments[name].asnumpy() for name in sorted(arguments)]
    return found, optimizer.scaling.loss_scale


def main(way, out, *options):
    settings = dict(option.split("=") for option in options)
    train = train_module if "Module" in way else train_gluon
    found, scale = train(way, **settings)
    np.savez(f"{out}{RANK}", *found, scale=scale)


if __name__ == "__main__":
    main(*sys.argv[1:])
