"""One worker of `scripts/bench/dist`: trains, and writes JSON on worker 0.

dist_worker.py CONTENDER STEPS OUT ENGINE
"""

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Dict

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)

import mxamp as amp  # noqa: E402

# isort: split
import mxnet as mx  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402
from mxnet.kvstore import KVStore  # noqa: E402

REPEATS = 10


class Engine:
    """A trainer on several workers; counts `messages` and `bytes` after `start_counting`."""

    messages = bytes = 0

    def counting(self, function: Callable[..., Any], arrays: Callable[..., Any]) -> Any:
        """Return a wrapper that counts the arrays summed by a call: `arrays` of its arguments."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.messages += 1
            self.bytes += sum(array.size * 4 for array in arrays(*args))
            return function(*args, **kwargs)

        return call


class ParameterServer(Engine):
    """MXNet's parameter server."""

    def __init__(self, params: Any) -> None:
        self.trainer = gluon.Trainer(
            params, "sgd", {"learning_rate": 1e-3}, kvstore="dist_sync", update_on_kvstore=False
        )
        # As mxamp does: otherwise MXNet may take the first gradients for the weights.
        self.trainer._init_kvstore()
        self.trainer._init_params()
        nd.waitall()
        self.store = self.trainer._kvstore
        self.rank = self.store.rank

    def start_counting(self) -> None:
        KVStore.pushpull = self.counting(KVStore.pushpull, lambda _store, _key, value, *_: value)

    def prepare(self, size: int, array: Any) -> None:
        """Register an array of a size with the server, before its first sum."""
        self.store.init(10**6 + size, array)

    def sum(self, size: int, array: Any) -> None:
        """Sum an array over the workers, in place."""
        self.store.pushpull(10**6 + size, [array])


class Horovod(Engine):
    """Horovod with gloo."""

    def __init__(self, params: Any) -> None:
        import horovod.mxnet as hvd

        hvd.init()
        hvd.broadcast_parameters(params, root_rank=0)
        self.hvd, self.rank = hvd, hvd.rank()
        self.trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": 1e-3})

    def start_counting(self) -> None:
        for name in ("allreduce", "allreduce_"):
            function = getattr(self.hvd, name)
            setattr(self.hvd, name, self.counting(function, lambda tensor, *_: [tensor]))

    def prepare(self, size: int, array: Any) -> None:
        """Do nothing: Horovod needs no registration."""

    def sum(self, size: int, array: Any) -> None:
        """Sum an array over the workers, in place."""
        self.hvd.allreduce_(array, average=False, name=str(size))


def seconds_a_call(function: Callable[[], Any], repeats: int) -> float:
    """Call a function `repeats` times; return the seconds of one call."""
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    nd.waitall()
    return (time.perf_counter() - began) / repeats


def main() -> None:
    """Train one contender, and write worker 0's figures as JSON."""
    name, steps, out, engine_name = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    if name == "bfloat16":
        amp.init("bfloat16", ctx=mx.cpu())
    mx.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(*(gluon.nn.Dense(512, activation="relu", in_units=512) for _ in range(4)))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    engine: Any = (Horovod if engine_name == "horovod" else ParameterServer)(net.collect_params())
    trainer = engine.trainer
    if name != "float32":
        amp.init_trainer(trainer, amp.LossScaler(1024))
    data = nd.random.normal(shape=(128, 512))

    def step() -> None:
        with autograd.record():
            loss = (net(data) ** 2).mean(axis=1).sum()
            if name != "float32":
                with amp.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
        if name == "float32":
            loss.backward()
        trainer.step(128)

    seconds_a_call(step, 3)
    engine.start_counting()
    result: Dict[str, float] = {"step": seconds_a_call(step, steps)}
    result.update(messages=engine.messages / steps, bytes=engine.bytes / steps)
    for case, size in (("message", 1), ("large", 2**22)):
        array = nd.zeros((size,))
        engine.prepare(size, array)

        def once(size: int = size, array: Any = array) -> None:
            engine.sum(size, array)
            array.wait_to_read()

        once()
        result[case] = seconds_a_call(once, REPEATS)
    if engine.rank == 0:
        Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
