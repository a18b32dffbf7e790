"""A first look at an installation: trains, converts, saves and loads a small network.

    python scripts/smoke.py

`nox -s smoke` runs it on the Pythons and NumPys of docs/evidence.md#versions.
"""

import platform
import tempfile
import warnings

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from mxamp.framework.operators import registry


def network() -> nn.HybridBlock:
    """Return a new hybridized network, with the same random weights each time."""
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, in_channels=4), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Flatten(), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def trained(dtype: str, data: mx.nd.NDArray) -> nn.HybridBlock:
    """Return a network trained for five steps in a dtype; raise if the loss does not fall."""
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    losses = []
    amp.init(dtype, ctx=mx.cpu())
    amp.init_trainer(trainer)
    for _ in range(5):
        with autograd.record():
            loss = (net(data) ** 2).mean()
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(1)
        losses.append(float(loss.asscalar()))
    amp.shutdown()
    assert losses[-1] < losses[0], losses
    assert trainer.amp_steps > 0
    return net


def main() -> None:
    """Train, convert, save and load in each dtype; raise AssertionError if a result is wrong."""
    data = mx.nd.array(np.random.RandomState(0).randn(8, 4, 12, 12).astype("float32"))
    for dtype in ("bfloat16", "float16"):
        assert set(amp.Policy.default(dtype, "cpu").rules) == set(registry())
        net = trained(dtype, data)
        expected = net(data).asnumpy()
        policy = amp.Policy.default(dtype, "cpu")
        fast = amp.convert_hybrid_block(
            net, policy=policy, example_inputs=data, cast_optional_params=True
        )
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MXNet wonders about the dtype of its input
            fast.export(f"{folder}/fast")
            files = f"{folder}/fast-symbol.json", ["data"], f"{folder}/fast-0000.params"
            found = gluon.SymbolBlock.imports(*files)(data).asnumpy()
        assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)
    with amp.autocast("bfloat16"):
        mx.npx.set_np()
        x = mx.np.ones((4, 8))
        assert mx.npx.fully_connected(x, mx.np.ones((2, 8)), no_bias=True, num_hidden=2).sum() == 64
        mx.npx.reset_np()
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}, MXNet {mx.__version__}"
    print(f"{versions}: right in bfloat16 and float16, {len(registry())} operators")


if __name__ == "__main__":
    main()
