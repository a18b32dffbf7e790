"""Trains a network on handwritten digits in three precisions, and converts the saved model.

    scripts/quickstart [--fast]
    main_job.py [--fast] [--device gpu] [--json FILE]

A small convolutional net with BatchNorm, hybridized, same seed each time: in float32, in float16
with dynamic loss scaling, in bfloat16. The float32 model is then exported, its files are converted
to either precision, and loaded again by plain MXNet with mxamp switched off.

That net is too small to say anything about speed, so a ResNet-18 with random weights is timed last,
in float32 and in bfloat16, for inference and for training, on CPUs with avx512. On a GPU the job is
done in float32 and float16, and nothing is timed: scripts/bench/models does that.
"""

import json
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import AbstractSet, Any, Callable, Dict, List, NamedTuple, Optional, Tuple

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

from mxamp.framework.machine import cpu_name, dtype_name, features, threads

BATCH = 64
# High enough that the first steps overflow: the scaler has to find its way down.
FIRST_SCALE = 2.0**24
# The timed net's batch, its rounds, and up to where two speeds count as the same.
IMAGES, ROUNDS, SAME = 2, 3, 0.05

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
    """Return 898 images to train on and 899 to test on, 8x8, in a fixed order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(images))
    images = (images[order].reshape(-1, 1, 8, 8) / 16).astype("float32")
    labels = labels[order].astype("float32")
    cut = len(images) // 2
    return (
        (mx.nd.array(images[:cut]), mx.nd.array(labels[:cut])),
        (mx.nd.array(images[cut:]), mx.nd.array(labels[cut:])),
    )


def network() -> nn.HybridBlock:
    mx.random.seed(7)
    np.random.seed(7)
    net = nn.HybridSequential(prefix="digits_")
    with net.name_scope():
        for channels in (16, 32):
            net.add(
                nn.Conv2D(channels, 3, padding=1, use_bias=False),
                nn.BatchNorm(),
                nn.Activation("relu"),
                nn.MaxPool2D(2),
            )
        net.add(nn.Dense(64, activation="relu"), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True)
    return net


def train(dtype: Optional[str], data: Data, epochs: int, advance: Any) -> Tuple[Any, Any]:
    """Return the trained net and its trainer."""
    images, labels = data
    net = network()
    steps = epochs * (len(images) // BATCH)
    schedule = mx.lr_scheduler.CosineScheduler(steps, base_lr=0.05, final_lr=0)
    settings = {"lr_scheduler": schedule, "momentum": 0.9, "wd": 1e-4}
    trainer = gluon.Trainer(net.collect_params(), "nag", settings)
    if dtype == "float16":
        amp.init_trainer(trainer, amp.LossScaler(init_scale=FIRST_SCALE))
    elif dtype is not None:
        amp.init_trainer(trainer)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    rng = np.random.RandomState(1)
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for start in range(0, len(images) - BATCH + 1, BATCH):
            index = mx.nd.array(order[start : start + BATCH])
            x, y = images.take(index), labels.take(index)
            with autograd.record():
                loss = loss_function(net(x), y).mean()
                if dtype is None:
                    autograd.backward(loss)
                else:
                    with amp.scale_loss(loss, trainer) as scaled:
                        autograd.backward(scaled)
            trainer.step(1)
            mx.nd.waitall()
            advance()
    return net, trainer


def accuracy(outputs: mx.nd.NDArray, data: Data) -> float:
    return float((outputs.asnumpy().argmax(1) == data[1].asnumpy()).mean())


def parameter_bytes(net: Any) -> int:
    return sum(
        param.data().size * (4 if dtype_name(param.dtype) == "float32" else 2)
        for param in net.collect_params().values()
    )


#: The dtypes that a kind of device has kernels for.
DTYPES = {"cpu": ("float16", "bfloat16"), "gpu": ("float16",)}


def trained_rows(
    data: Data, test: Data, epochs: int, folder: Path, progress: Progress
) -> List[Row]:
    """Train in each precision; leaves the exported float32 model in `folder`."""
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
        rows.append(
            Row(
                f"trained {dtype or 'float32'}", accuracy(outputs, test),
                hook and hook.loss_scale, hook and hook.skips, parameter_bytes(net),
                float(abs(outputs - again).max().asscalar()),
            )
        )  # fmt: skip
    return rows


def converted_rows(test: Data, folder: Path) -> List[Row]:
    """Convert the exported files, load the result with mxamp off, compare."""
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
        rows.append(
            Row(
                f"converted {dtype}", accuracy(outputs, test), None, None,
                parameter_bytes(net), float(abs(outputs - expected).max().asscalar()),
            )
        )  # fmt: skip
    return rows


def load(prefix: Path) -> gluon.SymbolBlock:
    """Load a saved model the way any MXNet program does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXNet wonders about the dtype of its input
        files = f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params"
        return gluon.SymbolBlock.imports(*files, ctx=mx.current_context())


# ---------------------------------------------------------------------- speed


# Measured with oneDNN held to AVX2: 0.03 to 0.05 times float32's speed, minutes for this table.
NOT_TIMED = (
    "Speed is not measured here: without avx512 MXNet has no fast kernels for bfloat16 and "
    "float16. Both are computed in float32 on rounded values, for trying and testing, and are "
    "many times slower than float32."
)


class Speed(NamedTuple):
    """How long one way of running the timed net takes, and how many times as fast it is."""

    name: str
    milliseconds: float
    ratio: float  # the median over rounds of float32's time to this one's


def resnet(dtype: Optional[str]) -> Tuple[Callable[[], None], Callable[[], None]]:
    """Return what runs a ResNet-18 and what trains it a step, on nets of their own."""
    data, label = mx.nd.random.normal(shape=(IMAGES, 3, 224, 224)), mx.nd.zeros(IMAGES)
    running, trained = vision.resnet18_v1(), vision.resnet18_v1()
    for net in (running, trained):
        net.initialize()
        net.hybridize(static_alloc=True, static_shape=True)
    # mxamp's trainers update outside the kvstore; so does float32's here: the same work for both.
    settings = {"learning_rate": 1e-3, "momentum": 0.9}
    trainer = gluon.Trainer(trained.collect_params(), "sgd", settings, update_on_kvstore=False)
    if dtype is not None:
        amp.init_trainer(trainer, amp.NoScaler())
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()

    def infer() -> None:
        with amp.autocast(dtype, enabled=dtype is not None):
            running(data).wait_to_read()

    def step() -> None:
        with amp.autocast(dtype, enabled=dtype is not None):
            with autograd.record():
                loss = loss_function(trained(data), label)
                if dtype is None:
                    autograd.backward(loss)
                else:
                    with amp.scale_loss(loss, trainer) as scaled:
                        autograd.backward(scaled)
            trainer.step(IMAGES)
            mx.nd.waitall()

    return infer, step


def converted_resnet() -> Callable[[], None]:
    data = mx.nd.random.normal(shape=(IMAGES, 3, 224, 224))
    net = vision.resnet18_v1()
    net.initialize()
    net.hybridize()
    net(data)
    net = amp.convert_hybrid_block(net, "bfloat16", cast_optional_params=True, example_inputs=data)
    net.hybridize(static_alloc=True, static_shape=True)
    return lambda: net(data).wait_to_read()


def in_turn(runs: Dict[str, Callable[[], None]], progress: Progress) -> Dict[str, Speed]:
    """Time all in turn, round after round; the first is what the others are compared with."""
    task = progress.add_task("timing a ResNet-18", total=(ROUNDS + 1) * len(runs))
    times: Dict[str, List[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
            progress.advance(task)
    base = next(iter(times.values()))[1:]  # the first round compiles
    return {
        name: Speed(
            name, statistics.median(spent[1:]) * 1e3,
            statistics.median(a / b for a, b in zip(base, spent[1:])),
        )
        for name, spent in times.items()
    }  # fmt: skip


def speeds(progress: Progress) -> Tuple[Dict[str, Speed], Dict[str, Speed]]:
    """Return how fast a ResNet-18 runs, and how fast it trains."""
    (infer, step), (infer_low, step_low) = resnet(None), resnet("bfloat16")
    inference = {
        "float32": infer, "bfloat16": infer_low, "converted to bfloat16": converted_resnet()
    }  # fmt: skip
    training = {"float32": step, "bfloat16": step_low}
    return in_turn(inference, progress), in_turn(training, progress)


def speed_of(ratio: float) -> str:
    """Return a ratio to float32 in words."""
    return (
        "about float32's speed" if abs(ratio - 1) < SAME else f"{ratio:.2f} times float32's speed"
    )


def verdict(inference: float, training: float, found: AbstractSet[str]) -> str:
    """Return what the two ratios say of bfloat16 on a CPU with these features."""
    says = (
        f"Here bfloat16 runs this net, converted, at {speed_of(inference)}, and trains it at "
        f"{speed_of(training)}."
    )
    arithmetic = bool(found & {"avx512_bf16", "amx_bf16"})
    slower, faster = min(inference, training) < 1 - SAME, max(inference, training) > 1 + SAME
    if slower and not arithmetic:
        return f"{says} bfloat16 is slower because this CPU has no bfloat16 arithmetic."
    if slower:
        return (
            f"{says} This CPU has bfloat16 arithmetic, so that is not expected: was it busy with "
            "something else? scripts/bench/models measures for longer."
        )
    if faster and not arithmetic:
        return (
            f"{says} This CPU has no bfloat16 arithmetic: the gain comes from mxamp's equivalents "
            "of operators, and other nets may be slower."
        )
    if faster:
        return f"{says} This CPU has bfloat16 arithmetic."
    return says


def show_speeds(inference: Dict[str, Speed], training: Dict[str, Speed], console: Console) -> None:
    cores = "1 core" if threads() == 1 else f"{threads()} cores"
    table = Table(title=f"ResNet-18, {IMAGES} images of 224 x 224, {cores}", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("ms", "speed against float32"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind, found in (("inference", inference), ("training step", training)):
        for row in found.values():
            table.add_row(f"{kind}, {row.name}", f"{row.milliseconds:.0f}", f"{row.ratio:.2f}")
    console.print(table)
    inferred = inference["converted to bfloat16"].ratio
    console.print(verdict(inferred, training["bfloat16"].ratio, features()), highlight=False)
    console.print("float16 is not timed: on CPUs its values are true and its speed is not.")


# ---------------------------------------------------------------------- the report


def describe_cpu() -> str:
    found = features()
    if found & {"avx512_bf16", "amx_bf16"}:
        says = "it has bfloat16 arithmetic"
    elif "avx512" in found:
        says = "it has avx512 and no bfloat16 arithmetic"
    else:
        says = "it has no avx512: bfloat16 is computed in float32 on rounded values"
    return f"{cpu_name()}: {says}."


def show(rows: List[Row], console: Console) -> None:
    table = Table(title="Handwritten digits, 899 test images", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in (
        "accuracy", "scale", "skipped", "bytes", "max diff",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)

    def text(value: Any, form: str) -> str:
        return "" if value is None else format(value, form)

    for row in rows:
        table.add_row(
            row.name, f"{row.accuracy:.2%}", text(row.loss_scale, ",.0f"), text(row.skipped, "d"),
            f"{row.parameter_bytes:,}", f"{row.difference:.2g}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "scale: the loss scale at the end. skipped: steps without an update, as gradients "
        "overflowed. bytes: of parameters. max diff: the largest difference of an output to "
        "that of the same weights in float32."
    )


def failures(rows: List[Row]) -> List[str]:
    """Return what is not as it should be."""
    plain = rows[0].accuracy
    found = [
        f"{row.name}: {row.accuracy:.2%} is not above 97 %" for row in rows if row.accuracy <= 0.97
    ]
    found += [
        f"{row.name}: {row.accuracy:.2%} is more than 0.5 points from float32's {plain:.2%}"
        for row in rows
        if abs(row.accuracy - plain) > 0.005
    ]
    if not rows[1].skipped:
        found.append("float16: the starting scale was to overflow, and no step was skipped")
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
    timed = None
    if device == "cpu":
        console.print(describe_cpu(), highlight=False)
    with tempfile.TemporaryDirectory() as name, Progress(
        console=console, transient=True
    ) as progress, mx.Context(device):
        data, test = digits()
        rows = trained_rows(data, test, 10 if fast else 30, Path(name), progress)
        rows += converted_rows(test, Path(name))
        if device == "cpu" and "avx512" in features():
            timed = speeds(progress)
    show(rows, console)
    if timed is not None:
        show_speeds(*timed, console)
    elif device == "cpu":
        console.print(NOT_TIMED, highlight=False)
    problems = failures(rows)
    if json_path is not None:
        found = {"device": device, "rows": [row._asdict() for row in rows], "problems": problems}
        json_path.write_text(json.dumps(found, indent=1) + "\n")
    for problem in problems:
        console.print(f"[red]not as it should be:[/red] {problem}")
    if problems:
        raise SystemExit(1)
    console.print("All within 0.5 points of float32's accuracy, above 97 %.")
    console.print("Next: README.md, whose commands are there after `source .venv/bin/activate`.")


if __name__ == "__main__":
    main()
