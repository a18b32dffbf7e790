"""Convert a trained model for inference, save it, and serve it with MXNet alone.

    python examples/convert_and_serve.py [--dtype float16] [--tune 30s] [--folder served]

Export a net from Gluon. `convert_files` then writes the same model with casts in its graph and half
the bytes of parameters, which plain MXNet loads and runs. With `--tune`, `tune` first measures the
fastest way to run it here, and which layers have to stay in float32. On the command line, use
`mxamp tune` and `mxamp convert`.
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

SHAPE = (8, 3, 32, 32)


def exported(prefix):
    """Export a net, as a training script does at its end."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(32, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Conv2D(64, 3, padding=1), nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    net(mx.nd.random.normal(shape=SHAPE))
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
    parser.add_argument("--tune", metavar="TIME", help="tune first, for this time, such as 5m")
    parser.add_argument("--folder", type=Path, help="where the models go; by default nowhere")
    options = parser.parse_args()
    mx.random.seed(0)
    with tempfile.TemporaryDirectory() as place:
        folder = options.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        original, converted = str(folder / "model"), str(folder / f"model-{options.dtype}")
        exported(original)

        data = mx.nd.random.normal(shape=SHAPE)
        policy = amp.Policy.default(options.dtype, device="cpu")  # or "gpu"
        how = {"cast_optional_params": True}
        if options.tune:
            model = mx.model.load_checkpoint(original, 0)
            tuning = amp.tune(model, [{"data": data}], policy=policy, budget=options.tune)
            policy, how = tuning.policy, tuning.convert_options
            print(tuning)
        amp.convert_files(original, converted, policy=policy, check_inputs={"data": data}, **how)

        wanted, served = serve(original, data), serve(converted, data)
        sizes = [Path(f"{prefix}-0000.params").stat().st_size for prefix in (original, converted)]
    error = (served - wanted).norm() / wanted.norm()
    same = (wanted.argmax(1) == served.argmax(1)).sum().asscalar()
    print(f"{options.dtype}: {sizes[0]:,} -> {sizes[1]:,} bytes of parameters")
    print(f"relative error {error.asscalar():.4f}, {same:.0f} of {len(data)} predictions the same")
    print(f"outputs are {served.dtype.__name__}; mixed precision on: {amp.is_enabled()}")


if __name__ == "__main__":
    main()
