"""What the experiments share: runs over seeds, progress, numbers, a verdict, a plot."""

import argparse
import json
import platform
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

#: Okabe and Ito's colours, told apart by colour-blind readers.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
DYNAMIC = "dynamic"


@dataclass(frozen=True)
class Config:
    """One way to train: a precision and a loss scale, which are all that differs within a seed."""

    name: str
    dtype: str = "float32"
    scale: object = 1  # a number, or DYNAMIC
    variant: str = ""

    @contextmanager
    def precision(self):
        """Switch mixed precision on, after the net has its weights: all start from the same."""
        if self.dtype == "float32":
            yield
            return
        amp.init(self.dtype, ctx=mx.cpu())
        try:
            yield
        finally:
            amp.shutdown()

    def trainer(self, net, optimizer, settings):
        """Return a trainer, with this config's loss scale in mixed precision."""
        trainer = gluon.Trainer(
            net.collect_params(), optimizer, dict(settings), update_on_kvstore=False
        )
        if self.dtype != "float32":
            amp.init_trainer(trainer, self.scaler())
        return trainer

    def scaler(self):
        """Return what scales the loss."""
        if self.scale == DYNAMIC:
            return amp.LossScaler()
        return amp.NoScaler() if self.scale == 1 else amp.StaticLossScaler(self.scale)

    def backward(self, loss, trainer):
        """Compute gradients: of the scaled loss in mixed precision."""
        if self.dtype == "float32":
            loss.backward()
            return
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)


@dataclass
class Run:
    """What one config reached with one seed."""

    config: str
    seed: int
    metric: float
    curve: list  # of (step, value)
    facts: dict = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Check:
    """One expectation of the paper, and whether the numbers meet it."""

    claim: str
    holds: bool
    numbers: str


@dataclass
class Experiment:
    """One experiment: what it trains, and what the paper says comes out."""

    name: str
    paper: str  # its claim, and where it is in the paper
    metric: str
    configs: tuple
    sizes: dict  # the settings, by whether it is the fast version
    train: object  # (config, seed, size, tick) -> Run
    verdict: object  # (Results) -> checks
    draw: object  # (figure, Results)
    digits: int = 2

    def ticks(self, fast):
        """Return how many steps a run takes."""
        return self.sizes[fast]["steps"]


class Results:
    """The runs of an experiment."""

    def __init__(self, experiment, runs, fast):
        self.experiment, self.runs, self.fast = experiment, runs, fast
        for run in runs:
            run.curve = [(step, float(f"{value:.5g}")) for step, value in run.curve]

    def of(self, config):
        """Return the runs of a config, by seed."""
        return [run for run in self.runs if run.config == config]

    def metrics(self, config):
        """Return what a config reached, by seed."""
        return np.array([run.metric for run in self.of(config)])

    def mean(self, config):
        """Return the mean over seeds."""
        return float(self.metrics(config).mean())

    def spread(self, config):
        """Return the standard deviation over seeds."""
        values = self.metrics(config)
        return float(values.std(ddof=1)) if len(values) > 1 else 0.0

    def text(self, config):
        """Return mean and standard deviation, as the table has them."""
        digits = self.experiment.digits
        return f"{self.mean(config):.{digits}f} ± {self.spread(config):.{digits}f}"

    def differences(self, config, reference):
        """Return, seed by seed, how far one config lies above another."""
        return self.metrics(config) - self.metrics(reference)

    def matches(self, config, reference, tolerance):
        """Check that the mean difference over the seeds is at most `tolerance`."""
        mean = float(self.differences(config, reference).mean())
        return Check(
            f"{config} matches {reference}",
            bool(abs(mean) <= tolerance),
            f"differs by {mean:+.{self.experiment.digits}f}, at most {tolerance:g} allowed",
        )

    def worse(self, config, reference, margin, higher_is_better=True):
        """Check that every seed is worse by more than `margin`; NaN is."""
        loss = self.differences(config, reference) * (-1 if higher_is_better else 1)
        least = float(np.where(np.isfinite(loss), loss, np.inf).min())
        return Check(
            f"{config} is worse than {reference}",
            bool(least > margin),
            f"by {least:.{self.experiment.digits}f} or more, over {margin:g} expected",
        )


def interval(size):
    """Return after how many steps to evaluate."""
    return max(1, size["steps"] // size["evaluations"])


def seeded(seed):
    mx.random.seed(seed)
    np.random.seed(seed)
    return np.random.RandomState(seed)


def initialized(net, *inputs, init=None):
    """Give a net its weights, in float32 and before mixed precision, and hybridize it."""
    net.initialize(init or mx.init.Xavier())
    net(*inputs)
    net.hybridize()
    return net


def digits(seed=0):
    """Return scikit-learn's handwritten digits: images, labels, images and labels for testing."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 1, 8, 8)
    order = np.random.RandomState(seed).permutation(len(images))
    train, test = order[:1200], order[1200:]
    return images[train], labels[train], images[test], labels[test]


def facts_of(trainer):
    """Return what the loss scaling did: nothing in float32."""
    if not hasattr(trainer, "amp_skips"):
        return {}
    return {"skipped": trainer.amp_skips, "last scale": float(trainer.amp_loss_scale)}


def measure(experiment, seeds, fast, console=None):
    """Train every config with every seed."""
    console = console or Console(stderr=True)
    total = len(seeds) * len(experiment.configs) * experiment.ticks(fast)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    runs = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(experiment.name, total=total)
        for seed in seeds:
            for config in experiment.configs:
                progress.update(task, description=f"{config.name}, seed {seed}")
                start = time.perf_counter()
                run = experiment.train(
                    config, seed, experiment.sizes[fast], lambda: progress.advance(task)
                )
                run.seconds = time.perf_counter() - start
                runs.append(run)
                console.print(
                    f"{config.name}, seed {seed}: {run.metric:.{experiment.digits}f} "
                    f"({run.seconds:.0f} s)",
                    highlight=False,
                )
    return Results(experiment, runs, fast)


def as_dict(results, checks):
    experiment = results.experiment
    return {
        "experiment": experiment.name,
        "paper": experiment.paper,
        "metric": experiment.metric,
        "fast": results.fast,
        "settings": experiment.sizes[results.fast],
        "versions": {
            "Python": platform.python_version(),
            "MXNet": mx.__version__,
            "mxamp": amp.__version__,
        },
        "summary": {config.name: results.text(config.name) for config in experiment.configs},
        "checks": [vars(check) for check in checks],
        "runs": [
            {key: value for key, value in vars(run).items() if key != "seconds"}
            for run in results.runs
        ],
    }


def figure_of(results):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), dpi=100, layout="constrained")
    results.experiment.draw(figure, results)
    return figure


def draw_curves(axes, results, names=None, xlabel="step", ylabel=None, floor=None):
    """Draw each config's curve: the mean over seeds, and a band from the least to the most."""
    for number, config in enumerate(results.experiment.configs):
        if names is not None and config.name not in names:
            continue
        curves = [np.array(run.curve) for run in results.of(config.name)]
        values = np.stack([curve[:, 1] for curve in curves])
        colour = COLOURS[number % len(COLOURS)]
        style = "-" if config.dtype == "float32" else "--"
        axes.plot(curves[0][:, 0], values.mean(0), style, color=colour, label=config.name)
        axes.fill_between(
            curves[0][:, 0], values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0
        )
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel or results.experiment.metric)
    if floor is not None:
        axes.set_ylim(bottom=floor)
    axes.legend(frameon=False, fontsize=8)


def draw_shares(axes, places, counts, kinds):
    """Draw counts in percent of their sum: bars, of kinds (which of them, colour, label)."""
    shares = 100 * counts / counts.sum()
    for chosen, colour, label in kinds:
        axes.bar(places[chosen], shares[chosen], 0.85, color=colour, label=label)
    axes.legend(frameon=False, fontsize=8)


def show(results, checks):
    print(f"{results.experiment.metric}, mean and standard deviation over seeds:")
    for config in results.experiment.configs:
        print(f"  {config.name:<40} {results.text(config.name)}")
    for check in checks:
        print(f"{'yes' if check.holds else 'NO':>4}  {check.claim}: {check.numbers}")


def main(experiment, doc):
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="smaller, in seconds")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a plot")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds must be 1 or more, not {options.seeds}")
    results = measure(experiment, range(options.seeds), options.fast)
    checks = experiment.verdict(results)
    if options.json:
        text = json.dumps(as_dict(results, checks), indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    if options.png:
        figure_of(results).savefig(options.png)
    show(results, checks)
    sys.exit(not all(check.holds for check in checks))
