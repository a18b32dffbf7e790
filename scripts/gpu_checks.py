"""One check on a GPU, for `scripts/gpu_report.py`: prints lines of JSON.

    gpu_checks.py smoke | sums | timings | model NAME CONTENDER | long | several [--simulated]

With `--simulated` sizes and counts are small.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))
from measuring import seconds  # noqa: E402
from models_worker import passes_and_step  # noqa: E402

SIMULATED = "--simulated" in sys.argv
GPU = mx.gpu(0)
#: Of `sums`: the lengths of a product's sums, and the sizes of its other axes.
LENGTHS, WIDTH = (64, 512) if SIMULATED else (64, 512, 2048, 8192), 16


def show(**values: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(values), flush=True)


def small_net(ctx: Any, has_norm: bool) -> gluon.HybridBlock:
    """Return a small convolutional net, the same in every process."""
    mx.random.seed(0)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(8, 3, in_channels=1, activation="relu"))
    net.add(*[gluon.nn.BatchNorm(in_channels=8)] * has_norm)
    net.add(gluon.nn.MaxPool2D(), gluon.nn.Dense(10, in_units=72))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize(static_alloc=True)
    return net


def train(dtype: str, contexts: List[Any], steps: int, scale: float, **settings: Any) -> Any:
    """Train a small net on random images; return its losses, its trainer and itself.

    `settings` are the trainer's. With some, as for several GPUs, the net has no BatchNorm, which
    sees the images of one GPU.
    """
    random = np.random.RandomState(0)
    images = random.rand(64, 1, 8, 8).astype("float32")
    labels = (images.mean(axis=(1, 2, 3)) * 1e3 % 10).astype(int).astype("float32")
    if dtype == "float16":
        amp.init("float16", ctx=contexts[0])
    net, loss_function = small_net(contexts, not settings), gluon.loss.SoftmaxCrossEntropyLoss()
    options = {"learning_rate": 0.02, "momentum": 0.9}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options, **settings)
    amp.init_trainer(trainer, amp.LossScaler(scale) if dtype == "float16" else amp.NoScaler())
    parts = [gluon.utils.split_and_load(one, contexts) for one in (images, labels)]
    losses = []
    for _ in range(steps):
        with autograd.record():
            found = [loss_function(net(data), label) for data, label in zip(*parts)]
            with amp.scale_loss(found, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(len(images))
        losses.append(float(np.mean([one.asnumpy().mean() for one in found])))
    amp.shutdown()
    return losses, trainer, net


def smoke() -> None:
    """Train a hybridized net for some steps: the first thing that may crash."""
    losses, trainer, _ = train("float16", [GPU], 5, 1024.0)
    show(losses=losses, skips=trainer.amp_skips, fine=bool(np.isfinite(losses).all()))


def long() -> None:
    """Train for 200 steps from a scale of 2**24, in float32 and in float16."""
    steps = 20 if SIMULATED else 200
    plain, _, _ = train("float32", [GPU], steps, 1.0)
    mixed, trainer, _ = train("float16", [GPU], steps, 2.0**24)
    losses = {"first": plain[0], "float32": plain[-1], "float16": mixed[-1]}
    show(**losses, skips=trainer.amp_skips, scale=trainer.amp_loss_scale)


def several() -> None:
    """Train on one GPU, then on all, by each kvstore: the weights are the same."""
    contexts = [mx.gpu(i) for i in range(mx.context.num_gpus())]
    _, _, one = train("float16", [GPU], 5, 1024.0, kvstore="device")
    for kvstore in ("device", "nccl") if len(contexts) > 1 else ():
        began = time.perf_counter()
        _, _, net = train("float16", contexts, 5, 1024.0, kvstore=kvstore)
        seconds = time.perf_counter() - began
        pairs = zip(one.collect_params().values(), net.collect_params().values())
        apart = [
            float(abs(a.list_data()[0].asnumpy() - b.list_data()[0].asnumpy()).max())
            for a, b in pairs
        ]
        show(kvstore=kvstore, gpus=len(contexts), difference=max(apart), seconds=seconds)


# ---------------------------------------------------------------------- who sums in float16


def product(name: str, a: Any, b: Any) -> Any:
    """Return a product of a, M by K, and b, K by N, by one of MXNet's operators."""
    if name == "FullyConnected":
        return nd.FullyConnected(a, b.T, no_bias=True, num_hidden=b.shape[1])
    if name == "batch_dot":
        return nd.batch_dot(a.expand_dims(0), b.expand_dims(0))[0]
    if name == "np.matmul":
        return mx.np.matmul(a.as_np_ndarray(), b.as_np_ndarray()).as_nd_ndarray()
    if name == "Convolution":
        weight, data = b.T.reshape((0, 0, 1, 1)), a.reshape((0, 0, 1, 1))
        made = nd.Convolution(data, weight, no_bias=True, kernel=(1, 1), num_filter=b.shape[1])
        return made.reshape((0, 0))
    return nd.dot(a, b)


def sums() -> None:
    """Measure how the error of a product and of its gradients grows with the length of sums."""
    for name in ("FullyConnected", "Convolution", "dot", "batch_dot", "np.matmul"):
        for axis in "KMN":
            for length in LENGTHS:
                m, k, n = (length if one == axis else WIDTH for one in "MKN")
                random = np.random.RandomState(0)
                arrays = [random.rand(*shape).astype("float16") for shape in ((m, k), (k, n))]
                a, b = (nd.array(one, GPU, "float16") for one in arrays)
                head = random.rand(m, n).astype("float16")
                a.attach_grad(), b.attach_grad()
                with autograd.record():
                    out = product(name, a, b)
                out.backward(nd.array(head, GPU, "float16"))
                x, y, z = (one.astype("float64") for one in (*arrays, head))
                found = {"K": out, "M": b.grad, "N": a.grad}[axis]
                right = {"K": x @ y, "M": x.T @ z, "N": z @ y.T}[axis]
                apart = np.linalg.norm(found.asnumpy().astype("float64") - right)
                error = float(apart / np.linalg.norm(right))
                show(operator=name, axis=axis, length=length, error=error)


# ---------------------------------------------------------------------- timings


def milliseconds(function: Callable[[], Any]) -> float:
    """Return the median time of a call, until the GPU has computed it."""
    found = [seconds(function) for _ in range(3 if SIMULATED else 30)]
    return statistics.median(found[len(found) // 3 :]) * 1e3


def timings() -> None:
    """Time what may be faster in another dtype or operator than by mxamp's lists."""
    size = 16 if SIMULATED else 512
    heads, units = nd.ones((8, size, 64), GPU), 16 if SIMULATED else 1024
    scores, words = nd.ones((8, size, size), GPU), nd.ones((35, 32, units), GPU)
    count = sum(4 * units * (2 * units + 2) for _ in range(2))
    weights, state = nd.ones((count,), GPU) * 0.01, nd.zeros((2, 32, units), GPU)

    def lstm(dtype: str) -> Any:
        given = [one.astype(dtype) for one in (words, weights, state, state)]
        return lambda: nd.RNN(*given, mode="lstm", num_layers=2, state_size=units)

    low, low_scores = heads.astype("float16"), scores.astype("float16")
    timed: Dict[str, Callable[[], Any]] = {
        "batch_dot float16": lambda: nd.batch_dot(low, low, transpose_b=True),
        "batch_dot float32": lambda: nd.batch_dot(heads, heads, transpose_b=True),
        "gemm2 float32": lambda: nd.linalg.gemm2(heads, heads, transpose_b=True),
        "softmax float32": lambda: nd.softmax(scores),
        "softmax float16": lambda: nd.softmax(low_scores),
        "RNN float16": lstm("float16"),
        "RNN float32": lstm("float32"),
    }
    for name, function in timed.items():
        try:
            found, error = milliseconds(function), None
        except mx.base.MXNetError as failure:
            found, error = 0.0, str(failure).strip().splitlines()[-1]
        show(name=name, milliseconds=None if SIMULATED or error else found, error=error)


def model(title: str, contender: str) -> None:
    """Train a model as one contender does: time, the host's time of a step, and memory."""
    passes, update, _ = passes_and_step(contender, title)
    on_host: List[float] = []

    def step() -> None:
        passes()
        nd.waitall()
        began = time.process_time()
        update()
        on_host.append(time.process_time() - began)

    for _ in range(1 if SIMULATED else 10):
        step()
    found = milliseconds(step)
    free, total = mx.context.gpu_memory_info(0)
    speeds = {"milliseconds": found, "step_on_host": statistics.median(on_host) * 1e3}
    nothing = dict.fromkeys(speeds)
    show(
        model=title, contender=contender, memory=total - free, **(nothing if SIMULATED else speeds)
    )


if __name__ == "__main__":
    command, *names = [word for word in sys.argv[1:] if word != "--simulated"]
    checks = {check.__name__: check for check in (smoke, sums, timings, model, long, several)}
    checks[command](*names)
