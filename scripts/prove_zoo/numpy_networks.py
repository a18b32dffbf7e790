"""Networks in NumPy style (`mx.np`, `mx.npx`): a few that use what GluonCV's models do not."""

from typing import Any, Callable, Dict, Tuple

import mxnet as mx
from mxnet import np, npx
from mxnet.gluon import HybridBlock, nn


class Network(HybridBlock):
    """A network that knows its own example."""

    shape: Tuple[int, ...] = (2, 8, 16)

    def example(self) -> Tuple[Any, ...]:
        """Return its inputs."""
        npx.random.seed(0)
        return (np.random.normal(size=self.shape).astype("float32"),)


class Mlp(Network):
    """A gated multilayer perceptron with its own normalization."""

    shape = (4, 64)

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.wide, self.out = nn.Dense(256), nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        a, b = F.np.split(self.wide(x), 2, axis=-1)
        h = a * F.npx.sigmoid(b)
        h = (h - F.np.mean(h, axis=-1, keepdims=True)) / F.np.sqrt(
            F.np.var(h, axis=-1, keepdims=True) + 1e-5
        )
        return self.out(h)


class Attention(Network):
    """Self-attention by `einsum` and `matmul`, with a mask."""

    shape = (2, 12, 32)

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.project = nn.Dense(96, flatten=False)
            self.norm = nn.LayerNorm()
            self.out = nn.Dense(10, flatten=False)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        q, k, v = F.np.split(self.project(x), 3, axis=-1)
        scores = F.np.matmul(q, F.np.swapaxes(k, 1, 2)) / 32**0.5
        weights = F.npx.softmax(scores, axis=-1)
        return self.out(self.norm(x + F.np.einsum("bij,bjd->bid", weights, v)))


class Convolutions(Network):
    """Convolutions with BatchNorm, pooling and a residual sum."""

    shape = (2, 3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.first = nn.HybridSequential()
            self.first.add(nn.Conv2D(16, 3, 1, 1), nn.BatchNorm(), nn.Activation("relu"))
            self.second = nn.HybridSequential()
            self.second.add(nn.Conv2D(16, 3, 1, 1), nn.BatchNorm())
            self.pool, self.out = nn.GlobalAvgPool2D(), nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        h = self.first(x)
        return self.out(self.pool(F.npx.relu(h + self.second(h))))


class Mixture(Network):
    """Experts that are weighed by a gate, stacked and summed."""

    shape = (8, 32)

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.gate = nn.Dense(4)
            self.experts = nn.HybridSequential()
            for _ in range(4):
                self.experts.add(nn.Dense(16))

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        weights = F.np.expand_dims(F.npx.softmax(self.gate(x)), -1)
        outputs = F.np.stack([expert(x) for expert in self.experts._children.values()], axis=1)
        return F.np.sum(weights * F.np.tanh(outputs), axis=1)


NETWORKS: Dict[str, Callable[[], Network]] = {
    "mlp": Mlp, "attention": Attention, "convolutions": Convolutions, "mixture": Mixture,
}  # fmt: skip


def build(name: str) -> Network:
    """Return a network by its name, NumPy semantics switched on for this process."""
    npx.set_np()
    mx.random.seed(0)
    return NETWORKS[name.split(":")[1]]()
