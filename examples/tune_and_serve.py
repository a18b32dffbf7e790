"""Tune a saved model for this machine, convert it as it was measured, and serve it.

    python examples/tune_and_serve.py [--dtype float16] [--budget 30s] [--folder served]

One layer of this net has weights so large that float16 loses its outputs. `tune` finds it, keeps it
in float32, and takes the fastest way to run the net here, which may be float32. `mxamp tune` and
`mxamp convert` do the same on the command line.
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn

SHAPE = (8, 3, 16, 16)


def exported(prefix):
    """Export a net whose next to last layer leaves float16's range."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, padding=1, activation="relu"), nn.GlobalAvgPool2D(), nn.Flatten())
    net.add(nn.Dense(32), nn.LayerNorm(), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    net(mx.nd.random.normal(shape=SHAPE))
    weight = net[3].weight
    weight.set_data(weight.data() * 1e6)
    net.export(prefix)


def serve(prefix, data):
    """Load a model and run it: plain MXNet."""
    files = f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SymbolBlock wonders about its input's dtype
        return gluon.SymbolBlock.imports(*files)(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--budget", default="10s", help="the time to spend, such as 5m")
    parser.add_argument("--folder", type=Path, help="where the models go; by default nowhere")
    options = parser.parse_args()
    mx.random.seed(0)
    with tempfile.TemporaryDirectory() as place:
        folder = options.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        original, tuned, file = (str(folder / name) for name in ("model", "tuned", "model.toml"))
        exported(original)

        batches = [{"data": mx.nd.random.normal(shape=SHAPE)} for _ in range(2)]
        model = mx.model.load_checkpoint(original, 0)
        start = amp.Policy.default(options.dtype, device="cpu")  # or "gpu"
        tuning = amp.tune(model, batches, policy=start, budget=options.budget)
        tuning.save(file)
        policy = amp.Policy.load(file)
        as_measured = tuning.convert_options
        amp.convert_files(original, tuned, policy=policy, check_inputs=batches[0], **as_measured)

        data = batches[0]["data"]
        wanted, served = serve(original, data), serve(tuned, data)
    kept = tuning.kept
    same = (wanted.argmax(1) == served.argmax(1)).sum().asscalar()
    print(f"{options.dtype}: {tuning.way}, relative error {tuning.error:.4f}")
    print(f"in float32: {', '.join(kept) or 'no layer by name'}")
    print(f"tried {tuning.evaluations} policies, timed {len(tuning.trials)} ways")
    print(f"{same:.0f} of {len(data)} predictions the same")


if __name__ == "__main__":
    main()
