"""Train an experiment in each precision, and compare the results with the paper's claims."""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Tuple

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

#: By name of a config: what it reached, one number a seed.
Metrics = Dict[str, np.ndarray]
#: A claim of the paper, and whether the numbers agree.
Check = Tuple[str, bool]


@dataclass(frozen=True)
class Config:
    """One way to train: runs of one seed differ in nothing else."""

    name: str
    dtype: str = "float32"
    scale: float = 0  #: of the loss; 0 is dynamic
    variant: str = ""

    def scaler(self) -> Any:
        """Return what scales the loss."""
        if self.scale == 0:
            return amp.LossScaler()
        return amp.NoScaler() if self.scale == 1 else amp.StaticLossScaler(self.scale)


@dataclass(frozen=True)
class Experiment:
    """What one experiment trains, and what the paper says comes out."""

    title: str
    paper: str  #: the claim, and where it is in the paper
    configs: Tuple[Config, ...]
    steps: Tuple[int, int]  #: of the whole and of the fast version
    task: Callable[[Config, Any, int], Any]
    verdict: Callable[[Metrics, bool], List[Check]]
    digits: int = 2
    measured: Tuple[float, ...] = (1.0,)  #: after which parts of the steps; the mean counts

    def train(self, config: Config, seed: int, fast: bool) -> float:
        """Train from a seed's weights and batches; return what is reached."""
        mx.random.seed(seed)
        steps = self.steps[fast]
        task = self.task(config, np.random.RandomState(seed), steps)
        mixed, found = config.dtype != "float32", []
        if mixed:
            amp.init(config.dtype, ctx=mx.cpu())
        trainers = [
            gluon.Trainer(net.collect_params(), *task.optimizer, update_on_kvstore=False)
            for net in task.nets
        ]
        for trainer in trainers if mixed else ():
            amp.init_trainer(trainer, config.scaler())
        for step in range(1, steps + 1):
            for trainer, loss_of in zip(trainers, task.losses()):
                with autograd.record():
                    loss = loss_of()
                    if mixed:
                        with amp.scale_loss(loss, trainer) as scaled:
                            autograd.backward(scaled)
                    else:
                        autograd.backward(loss)
                trainer.step(1)
            if step in [round(part * steps) for part in self.measured]:
                found.append(task.metric())
        amp.shutdown()
        return float(np.mean(found))


def matches(found: Metrics, name: str, reference: str, tolerance: float) -> Check:
    """Check that two configs differ by at most `tolerance`, in the mean over seeds."""
    mean = float((found[name] - found[reference]).mean())
    claim = f"{name} matches {reference}: {mean:+.2f}, at most {tolerance:.2f}"
    return claim, abs(mean) <= tolerance


def differs(found: Metrics, name: str, reference: str, least: float) -> Check:
    """Check that every seed lies above the reference by `least`, or below it by -`least`."""
    by = (found[name] - found[reference]) * np.sign(least)
    worst = float(np.where(np.isfinite(by), by, np.inf).min())
    claim = f"{name} is worse than {reference}: {worst:.2f}, over {abs(least):.2f}"
    return claim, worst > abs(least)


def initialized(net: Any, *inputs: Any, init: Any = None) -> Any:
    """Give a net its weights, in float32 and before mixed precision, and hybridize it."""
    net.initialize(init or mx.init.Xavier())
    net(*inputs)
    net.hybridize()
    return net


def handwritten() -> Tuple[Any, Any, Any, Any]:
    """Return scikit-learn's handwritten digits: images, labels, images and labels for testing."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 1, 8, 8)
    order = np.random.RandomState(0).permutation(len(images))
    train, test = order[:1200], order[1200:]
    return images[train], labels[train], images[test], labels[test]


class Classifier:
    """A task: a net learns handwritten digits."""

    def __init__(self, net: Any, rng: Any, batch: int, optimizer: Any, dtype: str = "float32"):
        *self.data, test, self.labels = handwritten()
        self.nets, self.optimizer = [net], optimizer
        self.rng, self.batch, self.dtype = rng, batch, dtype
        self.test = mx.nd.array(test, dtype=dtype)

    def losses(self) -> List[Any]:
        """Return the loss of a random batch."""
        images, labels = self.data
        chosen = self.rng.randint(0, len(images), self.batch)
        x, y = mx.nd.array(images[chosen], dtype=self.dtype), mx.nd.array(labels[chosen])
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        return [lambda: loss(self.nets[0](x).astype("float32"), y).mean()]

    def metric(self) -> float:
        """Return the accuracy on 597 images, in percent."""
        return 100 * float((self.nets[0](self.test).asnumpy().argmax(1) == self.labels).mean())
