"""Show a training run in TensorBoard: loss, loss scale, skipped steps, gradients.

    pip install tensorboardX tensorboard
    python examples/tensorboard.py --dtype float16 --folder runs/a
    tensorboard --logdir runs

`debugging.on_step` passes the report of each step to a function. The histogram counts gradients by
exponent: float16 has fewer digits below -14, and only zero below -25.
"""

import argparse
import math

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from tensorboardX import SummaryWriter


def exponents(params):
    """Return the exponents of all gradients that are neither zero nor infinite nor NaN."""
    values = np.concatenate([abs(param.grad().asnumpy().ravel()) for param in params])
    return np.log2(values[(values > 0) & np.isfinite(values)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--folder", default="runs/mxamp")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    mx.random.seed(0)

    amp.init(options.dtype, ctx=mx.cpu())
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(64, activation="relu"), gluon.nn.Dense(1))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer)
    x = mx.nd.random.normal(shape=(64, 20))
    y = x[:, :1] - x[:, 1:2]
    reports, losses = [], []

    hook = amp.debugging.on_step(trainer, reports.append)
    with SummaryWriter(options.folder) as writer:
        for step in range(options.steps):
            with autograd.record():
                loss = gluon.loss.L2Loss()(net(x), y).mean()
                with amp.scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
            # Takes the loss scale out of the gradients, and clips nothing.
            norm = amp.clip_grad_global_norm(trainer, math.inf)
            writer.add_histogram("gradient/exponent", exponents(trainer._params), step)
            trainer.step(1)
            losses.append(loss.asscalar())
            writer.add_scalar("loss", losses[-1], step)
            writer.add_scalar("gradient/norm", norm, step)
            writer.add_scalar("loss_scale", reports[-1].loss_scale, step)
            writer.add_scalar("skipped", not reports[-1].stepped, step)
    hook.remove()
    amp.shutdown()
    skipped = sum(not report.stepped for report in reports)
    print(f"{options.dtype}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {skipped} skipped steps")
    print(f"tensorboard --logdir {options.folder}")


if __name__ == "__main__":
    main()
