"""Trains, and has other processes train; prints whether they computed in float32."""

import multiprocessing
import subprocess
import sys

import mxnet as mx
from mxnet import autograd, gluon

IS_ON = "import mxnet, sys; print('mxamp' in sys.modules and sys.modules['mxamp'].is_enabled())"


def exact(_=None):
    """Return whether a product is computed in float32."""
    x, ones = mx.nd.ones((1, 1)) * 1.001, mx.nd.ones((1, 1))
    return bool(mx.nd.FullyConnected(x, ones, no_bias=True, num_hidden=1).asscalar() > 1.0005)


def train(results=None):
    net = gluon.nn.Dense(1)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with autograd.record():
        loss = net(mx.nd.ones((1, 1)))
    loss.backward()
    trainer.step(1)
    found = "exact" if exact() else "lowered", getattr(trainer, "amp_steps", None)
    if results is None:
        return found
    return results.put(found)


if __name__ == "__main__":
    print("here", *train())
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        results = context.Queue()
        process = context.Process(target=train, args=(results,))
        process.start()
        print(method, *results.get(timeout=60))
        process.join()
        with context.Pool(1) as pool:
            print(method, "pool", process.exitcode, *pool.map(exact, [0]))
    done = subprocess.run([sys.executable, "-c", IS_ON], capture_output=True, text=True, check=True)
    print("other", done.stdout.strip())
