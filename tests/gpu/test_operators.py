"""Each operator that may run in float16 on GPUs is dispatched on one, forward and backward."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp

pytestmark = pytest.mark.gpu

#: What MXNet 1.9.1 can't run on a GPU in any dtype, and why.
BROKEN = {
    "_contrib_BatchNormWithReLU": "has no function for GPUs",
    "CuDNNBatchNorm": "is an old name of BatchNorm, without a function of its own",
}
#: Operators whose gradient, in any dtype, has another number of inputs than its function reads.
BROKEN_GRADIENTS = {"_npi_arctan2_scalar", "_npi_rarctan2_scalar"}
#: Operators whose outputs have a size that a kernel computes.
SIZED_BY_KERNELS = {"_contrib_boolean_mask", "_npi_delete", "_npx_nonzero"}


def names():
    policy = amp.Policy.default("float16", "gpu")
    classes = ("low", "widest", "neutral")
    listed = [n for n, r in policy.rules.items() if r.op_class in classes and not r.no_kernel]
    return sorted(set(listed) - set(BROKEN))


def call_all(part, options=(), **environment):
    """Call the operators of one part in a process of its own; return its lines, by operator."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("operators.py"))]
    done = subprocess.run(
        [*program, *options, *part], capture_output=True, text=True,
        env={name: value for name, value in environment.items() if value}, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{lines[-1:]} ended the process: {done.stderr[-2000:]}"
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert [one["operator"] for one in found] == part
    return found


def float16(device, *shape):
    return mx.nd.random.uniform(shape=shape, ctx=device).astype("float16")


#: Calls of operators that have no function for float16, but get float16 at level O3.
AT_O3 = {
    "LRN": lambda x: mx.nd.LRN(x(2, 4, 5, 5), nsize=3),
    "SoftmaxActivation": lambda x: mx.nd.SoftmaxActivation(x(4, 6)),
    "InstanceNorm": lambda x: mx.nd.InstanceNorm(x(2, 4, 5), x(4), x(4)),
    "MultiBoxPrior": lambda x: mx.nd.contrib.MultiBoxPrior(x(1, 3, 4, 4)),
    "MultiBoxTarget": lambda x: mx.nd.contrib.MultiBoxTarget(x(1, 5, 4), x(2, 3, 5), x(2, 3, 5))[0],
    "MultiBoxDetection": lambda x: mx.nd.contrib.MultiBoxDetection(
        x(2, 3, 5), x(2, 20), x(1, 5, 4)
    ),
}


@pytest.mark.parametrize("name", AT_O3)
def test_level_o3_computes_in_float32_what_has_no_float16(name, device):
    net = mx.gluon.nn.Dense(2, in_units=4)
    net.initialize(ctx=device)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
    amp.initialize(net, trainer, opt_level="O3", loss_scale=8.0, ctx=device)
    assert np.isfinite(AT_O3[name](partial(float16, device)).asnumpy()).all()


PARTS = [names()[i::4] for i in range(4)]


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("part", PARTS, ids=range(4))
def test_none_refuses_float16(part):
    """The GPU's own functions run, up to the kernels that they launch."""
    part = [name for name in part if name not in SIZED_BY_KERNELS]
    found = call_all(part, ["--no-values"], MXNET_LIBRARY_PATH="")
    refused = {one["operator"]: one["error"] for one in found if one["error"]}
    assert set(refused) == BROKEN_GRADIENTS.intersection(part), refused


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("part", PARTS, ids=range(4))
def test_values_are_those_of_the_cpu(part):
    wrong = [one for one in call_all(part) if one["error"] or one["difference"] > 3e-3]
    assert not wrong
