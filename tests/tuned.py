"""A made-up tuning."""

import mxnet as mx
from mxnet.gluon import nn

import mxamp as amp
from mxamp.policy.policy import Policy
from mxamp.tools.tuning.forms import Timing
from mxamp.tools.tuning.tune import Tuning

PLAIN = Timing("inference", "plain", "float32", 4.0, 1.0, (1.0, 1.0), 0.0, True)
FAST = Timing("inference", "fused", "bfloat16", 2.1, 1.9, (1.8, 2.0), 0.004, True)
TUNING = Tuning(
    policy=Policy.default("bfloat16").override(fp32_layers=["b<i>", "d"]),
    way="fused", kept=("b<i>", "d"), error=0.004, gradient_error=None, metric=0.91, complete=False,
    notes=("Two\nlayers.", "One & only."), timings=(PLAIN, FAST), chosen=FAST, in_mxnet=FAST,
)  # fmt: skip


def small_net():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, in_units=4), nn.BatchNorm(in_channels=8), nn.Dropout(0.5), nn.Dense(2))
    net.initialize(mx.init.Xavier())
    return net, mx.nd.random.normal(shape=(6, 4))


def benchmarked(net, batch, *arguments, dtype="bfloat16"):
    return amp.benchmark(net, batch, *arguments, target_dtype=dtype, budget=0.01)
