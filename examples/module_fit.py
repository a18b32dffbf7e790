"""Train with the symbolic Module API in mixed precision: `Module.fit` with `amp.decorate`.

    python examples/module_fit.py [--dtype float16] [--epochs 3]

After `init` the module computes in mixed precision, and with `decorate` its optimizer scales the
loss, so `fit` stays one call. The saved checkpoint is a plain float32 model.
"""

import argparse
import tempfile

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np

CLASSES, BATCH = 4, 32


def points(count, seed):
    """Return points around four centres, and the centres' numbers."""
    centres = np.random.RandomState(0).randn(CLASSES, 16)
    rng = np.random.RandomState(seed)
    labels = rng.randint(0, CLASSES, count)
    data = centres[labels] + rng.randn(count, 16)
    return mx.io.NDArrayIter(data.astype("float32"), labels.astype("float32"), BATCH)


def network():
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=64, name="hidden")
    net = mx.sym.Activation(net, act_type="relu")
    net = mx.sym.FullyConnected(net, num_hidden=CLASSES, name="out")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    mx.random.seed(0)
    np.random.seed(0)
    train, test = points(640, seed=1), points(320, seed=2)
    ctx = mx.cpu()  # or mx.gpu()

    amp.init(options.dtype, ctx=ctx)
    module = mx.mod.Module(network(), context=ctx)
    optimizer = amp.decorate("sgd", init_loss_scaling=2.0**15)
    settings = {"learning_rate": 0.05, "momentum": 0.9, "rescale_grad": 1 / BATCH}
    losses = []
    module.fit(
        train,
        num_epoch=options.epochs,
        optimizer=optimizer,
        optimizer_params=settings,
        initializer=mx.init.Xavier(),
        eval_metric="ce",
        batch_end_callback=lambda batch: losses.append(batch.eval_metric.get()[1]),
    )
    accuracy = module.score(test, "acc")[0][1]
    amp.shutdown()

    with tempfile.TemporaryDirectory() as folder:
        module.save_checkpoint(f"{folder}/model", options.epochs)
        _, params, _ = mx.model.load_checkpoint(f"{folder}/model", options.epochs)
    kinds = {param.dtype.__name__ for param in params.values()}
    scaling = optimizer.scaling
    print(f"{options.dtype}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {accuracy:.1%}")
    print(f"loss scale {scaling.loss_scale:g}, {scaling.steps} steps, {scaling.skips} skipped")
    print(f"saved parameters are {', '.join(kinds)}")


if __name__ == "__main__":
    main()
