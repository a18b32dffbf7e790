"""Train an LSTM in mixed precision, with gradients clipped between `backward` and `step`.

    python examples/train_lstm.py [--dtype float16] [--steps 120]

The net reads 12 numbers and says the sum of the first half less that of the second. Gradients carry
the loss scale until `step`; `clip_grad_global_norm` takes it out before it clips.
"""

import argparse

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

LENGTH, BATCH = 12, 64


class Reader(gluon.HybridBlock):
    """An LSTM over a sequence, and a dense layer on its last state."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.lstm = rnn.LSTM(32, layout="NTC", input_size=1)
            self.out = nn.Dense(1, in_units=32)

    def hybrid_forward(self, F, x):
        """Return one number for each sequence."""
        return self.out(F.slice_axis(self.lstm(x), axis=1, begin=-1, end=None))


def sequences(rng):
    """Return a batch of sequences and what the net is to say of them."""
    values = rng.uniform(-1, 1, (BATCH, LENGTH, 1))
    half = LENGTH // 2
    return mx.nd.array(values), mx.nd.array(values[:, :half].sum(1) - values[:, half:].sum(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    mx.random.seed(0)
    rng = np.random.RandomState(0)
    ctx = mx.cpu()  # or mx.gpu()

    amp.init(options.dtype, ctx=ctx)
    net = Reader()
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    amp.init_trainer(trainer)
    loss_function = gluon.loss.L2Loss()
    losses, clipped = [], 0
    for _ in range(options.steps):
        x, y = sequences(rng)
        with autograd.record():
            loss = loss_function(net(x), y).mean()
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        clipped += amp.clip_grad_global_norm(trainer, 1.0) > 1.0
        trainer.step(1)
        losses.append(loss.asscalar())
    amp.shutdown()

    first, last = np.mean(losses[:5]), np.mean(losses[-5:])
    print(f"{options.dtype}: loss {first:.3f} -> {last:.3f}, clipped in {clipped} steps")
    print(
        f"loss scale {trainer.amp_loss_scale:g}, {trainer.amp_steps} steps, "
        f"{trainer.amp_skips} skipped"
    )


if __name__ == "__main__":
    main()
