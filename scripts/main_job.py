"""Train a network on handwritten digits in three precisions, and convert the saved model.

    scripts/quickstart [--fast]
    main_job.py [--fast] [--device gpu] [--json FILE]

A small convolutional net trains with the same seed in float32, in float16 with dynamic loss
scaling, and in bfloat16. The exported float32 model is converted to both, and loaded by plain MXNet
with mxamp switched off. On CPUs with avx512, `amp.benchmark` times a ResNet-18 with random weights
in float32 and bfloat16. On a GPU the job runs in float32 and float16, without timing.
"""

import json
import logging
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Tuple

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import click
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits

from mxamp.backends.onednn.cpu import onednn_features
from mxamp.framework.machine import cpu_name, dtype_name, threads

BATCH = 64
# High enough for overflows in the first steps, so that the scaler has to lower it.
FIRST_SCALE = 2.0**24
# The timed net's batch, and the time for it.
IMAGES, SIZE, BUDGET = 4, 128, "5s"

Data = Tuple[mx.nd.NDArray, mx.nd.NDArray]


class Row(NamedTuple):
    """One line of the table."""

    name: str
    accuracy: float
    loss_scale: Optional[float]
    skipped: Optional[int]
    parameter_bytes: int
    difference: float


def digits() -> Tuple[Data, Data]:
    """Return 898 images of 8x8 to train on and 899 to test on, in a fixed order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(images))
    images = (images[order].reshape(-1, 1, 8, 8) / 16).astype("float32")
    halves = np.split(np.arange(len(images)), [len(images) // 2])
    train, test = ((mx.nd.array(images[i]), mx.nd.array(labels[order][i])) for i in halves)
    return train, test


def network() -> nn.HybridBlock:
    """Return a new hybridized convolutional net, with the same random weights each time."""
    mx.random.seed(7)
    np.random.seed(7)
    net = nn.HybridSequential(prefix="digits_")
    with net.name_scope():
        for channels in (16, 32):
            net.add(nn.Conv2D(channels, 3, padding=1, use_bias=False), nn.BatchNorm())
            net.add(nn.Activation("relu"), nn.MaxPool2D(2))
        net.add(nn.Dense(64, activation="relu"), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True)
    return net


def train(dtype: Optional[str], data: Data, epochs: int, advance: Any) -> Tuple[Any, Any]:
    """Return a trained net and its trainer; call `advance` after each step."""
    images, labels = data
    net = network()
    steps = epochs * (len(images) // BATCH)
    schedule = mx.lr_scheduler.CosineScheduler(steps, base_lr=0.05, final_lr=0)
    settings = {"lr_scheduler": schedule, "momentum": 0.9, "wd": 1e-4}
    trainer = gluon.Trainer(net.collect_params(), "nag", settings)
    if dtype is not None:
        low = dtype == "float16"
        amp.init_trainer(trainer, amp.LossScaler(init_scale=FIRST_SCALE) if low else None)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    rng = np.random.RandomState(1)
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for start in range(0, len(images) - BATCH + 1, BATCH):
            index = mx.nd.array(order[start : start + BATCH])
            x, y = images.take(index), labels.take(index)
            with autograd.record():
                backward(loss_function(net(x), y).mean(), trainer if dtype else None)
            trainer.step(1)
            mx.nd.waitall()
            advance()
    return net, trainer


def backward(loss: mx.nd.NDArray, trainer: Optional[gluon.Trainer]) -> None:
    """Compute gradients, of the scaled loss if there is a trainer that scales."""
    with amp.scale_loss(loss, trainer) if trainer else nullcontext(loss) as scaled:
        autograd.backward(scaled)


def accuracy(outputs: mx.nd.NDArray, data: Data) -> float:
    """Return the share of images whose largest output is that of their label."""
    return float((outputs.asnumpy().argmax(1) == data[1].asnumpy()).mean())


def parameter_bytes(net: Any) -> int:
    """Return the bytes of a net's parameters."""
    return sum(
        param.data().size * (4 if dtype_name(param.dtype) == "float32" else 2)
        for param in net.collect_params().values()
    )


#: The low-precision dtypes of each device.
DTYPES = {"cpu": ("float16", "bfloat16"), "gpu": ("float16",)}


def trained_rows(
    data: Data, test: Data, epochs: int, folder: Path, progress: Progress
) -> List[Row]:
    """Train in each precision; export the float32 model to `folder`; return a row for each."""
    rows: List[Row] = []
    ctx = mx.current_context()
    for dtype in (None, *DTYPES[ctx.device_type]):
        steps = epochs * (len(data[0]) // BATCH)
        task = progress.add_task(f"training in {dtype or 'float32'}", total=steps)
        if dtype is not None:
            amp.init(dtype, ctx=ctx)
        try:
            net, trainer = train(dtype, data, epochs, lambda task=task: progress.advance(task))
            outputs = net(test[0])
        finally:
            amp.shutdown()
        if dtype is None:
            net.export(str(folder / "digits"))
        hook = getattr(trainer, "_amp_loss_scaler", None)
        again = net(test[0])  # the same weights, computed in float32
        scale, skips = (hook.loss_scale, hook.skips) if hook else (None, None)
        difference = float(abs(outputs - again).max().asscalar())
        values = accuracy(outputs, test), scale, skips, parameter_bytes(net), difference
        rows.append(Row(f"trained {dtype or 'float32'}", *values))
    return rows


def converted_rows(test: Data, folder: Path) -> List[Row]:
    """Convert the exported files and load them with mxamp off; return a row for each dtype."""
    rows = []
    device = mx.current_context().device_type
    expected = load(folder / "digits")(test[0])
    for dtype in DTYPES[device]:
        model = mx.model.load_checkpoint(str(folder / "digits"), 0)
        policy = amp.Policy.default(dtype, device=device)
        converted = amp.convert_model(*model, policy=policy, cast_optional_params=True)
        mx.model.save_checkpoint(str(folder / dtype), 0, *converted)
        assert not amp.is_enabled()
        net = load(folder / dtype)
        outputs = net(test[0])
        difference = float(abs(outputs - expected).max().asscalar())
        values = accuracy(outputs, test), None, None, parameter_bytes(net), difference
        rows.append(Row(f"converted {dtype}", *values))
    return rows


def load(prefix: Path) -> gluon.SymbolBlock:
    """Return an exported model, loaded as plain MXNet does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXNet warns about the dtype of the input
        files = f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params"
        return gluon.SymbolBlock.imports(*files, ctx=mx.current_context())


# ---------------------------------------------------------------------- speed


# Measured with oneDNN limited to AVX2: 0.03 to 0.05 times float32's speed, minutes for this table.
NOT_TIMED = (
    "Speed is not measured here: without avx512, MXNet has no fast kernels for bfloat16 and "
    "float16. It computes both in float32 on rounded values, many times slower than float32."
)


def speeds() -> Any:
    """Return the times of a ResNet-18 with random weights."""
    net = vision.resnet18_v1()
    net.initialize()
    images = mx.nd.random.normal(shape=(IMAGES, 3, SIZE, SIZE))
    batch = images, mx.nd.zeros(IMAGES)
    return amp.benchmark(net, batch, gluon.loss.SoftmaxCrossEntropyLoss(), budget=BUDGET)


# ---------------------------------------------------------------------- the report


def table(title: str, *headings: str) -> Table:
    """Return an empty table with a column for names before the headings."""
    made = Table(title=title, box=SIMPLE_HEAD)
    made.add_column("", no_wrap=True)
    for heading in headings:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def show_speeds(found: Any, console: Console) -> None:
    """Print the times of `amp.benchmark`, without their spread, and its summary."""
    cores = "1 core" if threads() == 1 else f"{threads()} cores"
    title = f"amp.benchmark: ResNet-18, {IMAGES} images of {SIZE} x {SIZE}, {cores}"
    shown = table(title, "precision", "ms", "times as fast")
    for one in found.timings:
        times = one.precision, f"{one.milliseconds:.0f}", f"{one.speedup:.2f}"
        shown.add_row(f"{one.task}, {one.way}", *times)
    console.print(shown)
    console.print(found.summary(), highlight=False)
    console.print("float16 is not timed: MXNet computes it on CPUs correctly, but slowly.")


def show(rows: List[Row], console: Console) -> None:
    """Print the table of accuracies, and what its columns mean."""
    shown = table(
        "Handwritten digits, 899 test images", "accuracy", "scale", "skipped", "bytes", "max diff"
    )
    for row in rows:
        scaled = row.loss_scale is not None
        scale, skipped = (f"{row.loss_scale:,.0f}", f"{row.skipped}") if scaled else ("", "")
        size, difference = f"{row.parameter_bytes:,}", f"{row.difference:.2g}"
        shown.add_row(row.name, f"{row.accuracy:.2%}", scale, skipped, size, difference)
    console.print(shown)
    console.print(
        "scale: the final loss scale. skipped: steps without an update because gradients "
        "overflowed. bytes: of parameters. max diff: the largest difference of an output from "
        "float32's with the same weights."
    )


def failures(rows: List[Row]) -> List[str]:
    """Return a sentence for each row that is not accurate enough, and if no step was skipped."""
    plain, found = rows[0].accuracy, []
    for row in rows:
        if row.accuracy <= 0.97:
            found.append(f"{row.name}: {row.accuracy:.2%} is not above 97 %")
        if abs(row.accuracy - plain) > 0.005:
            found.append(
                f"{row.name}: {row.accuracy:.2%} is more than 0.5 points from float32's {plain:.2%}"
            )
    if not rows[1].skipped:
        found.append("float16: no step was skipped, although the first loss scale should overflow")
    return found


OUT = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option("--fast", is_flag=True, help="A third of the epochs: under 30 seconds.")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option("--json", "json_path", type=OUT, help="Write the table here.")
def main(fast: bool, device: str, json_path: Optional[Path]) -> None:
    """Train and convert in mixed precision on handwritten digits."""
    logging.getLogger("mxamp").setLevel(logging.ERROR)
    console = Console()
    if device == "cpu":
        console.print(
            f"{cpu_name()}: {', '.join(sorted(onednn_features())) or 'no avx512'}.", highlight=False
        )
    with tempfile.TemporaryDirectory() as name, Progress(
        console=console, transient=True
    ) as progress, mx.Context(device):
        data, test = digits()
        rows = trained_rows(data, test, 10 if fast else 30, Path(name), progress)
        rows += converted_rows(test, Path(name))
    show(rows, console)
    if device == "cpu" and "avx512" in onednn_features():
        show_speeds(speeds(), console)
    elif device == "cpu":
        console.print(NOT_TIMED, highlight=False)
    problems = failures(rows)
    if json_path is not None:
        found = {"device": device, "rows": [row._asdict() for row in rows], "problems": problems}
        json_path.write_text(json.dumps(found, indent=1) + "\n")
    for problem in problems:
        console.print(f"[red]failed:[/red] {problem}")
    if problems:
        raise SystemExit(1)
    console.print("All within 0.5 points of float32's accuracy, above 97 %.")
    console.print("Next: `source .venv/bin/activate`, and the commands of README.md.")


if __name__ == "__main__":
    main()
