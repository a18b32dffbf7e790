"""A language model in the manner of bigLSTM, section 4.5 of the paper.

It reads the source of Python's standard library. The gradient of a word that does not come next is
its probability over the size of the batch: for most words that is zero in float16.
"""

import collections
import functools
import re
import sysconfig
from pathlib import Path

from common import Config, Experiment, differs, initialized, matches

# isort: split
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn, rnn

VOCABULARY, LENGTH, WIDTH, CELLS, BATCH = 2000, 20, 64, 128, 16
#: The loss is the mean over the words of a batch of bigLSTM's, of so many sequences. A batch here
#: has fewer. Adagrad divides by the size of past gradients: the factor hardly matters in float32.
AGGREGATE = 1024


@functools.lru_cache(None)
def text():
    """Return the words of nine modules in ten, and of the others, as numbers by frequency."""
    parts = [], []
    for number, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        if len(parts[0]) < 200_000:
            found = re.findall(r"[A-Za-z]+|[^\sA-Za-z]", path.read_text("utf-8"))
            parts[number % 10 == 9].extend(found)
    known = collections.Counter(parts[0]).most_common(VOCABULARY - 1)
    numbers = {word: number for number, (word, _) in enumerate(known, 1)}
    return [np.array([numbers.get(word, 0) for word in part]) for part in parts]


def sequences(numbers, rng, count):
    starts = rng.randint(0, len(numbers) - LENGTH - 1, count)
    rows = numbers[starts[:, None] + np.arange(LENGTH + 1)]
    return mx.nd.array(rows[:, :-1]), mx.nd.array(rows[:, 1:])


class LanguageModel:
    """A task: embedding, LSTM, projection and a softmax over many words."""

    optimizer = "adagrad", {"learning_rate": 0.05, "eps": 1e-10}

    def __init__(self, config, rng, steps):
        net = nn.HybridSequential()
        net.add(nn.Embedding(VOCABULARY, WIDTH), rnn.LSTM(CELLS, layout="NTC"))
        net.add(nn.Dense(WIDTH, flatten=False), nn.Dense(VOCABULARY, flatten=False))
        self.nets = [initialized(net, mx.nd.zeros((1, LENGTH)))]
        self.rng, self.loss = rng, gluon.loss.SoftmaxCrossEntropyLoss()

    def losses(self):
        """Return the loss of random sequences."""
        x, y = sequences(text()[0], self.rng, BATCH)
        return [lambda: self.loss(self.nets[0](x), y).sum() / AGGREGATE]

    def metric(self):
        """Return the perplexity on files that were left out."""
        x, y = sequences(text()[1], np.random.RandomState(0), 128)
        return float(np.exp(self.loss(self.nets[0](x), y).mean().asscalar()))


def verdict(found, fast):
    reference = found["float32"].mean()
    return [
        differs(found, "float16", "float32", (0.05 if fast else 0.25) * reference),
        matches(found, "float16, scaled by 128", "float32", 0.1 * reference),
    ]


EXPERIMENT = Experiment(
    title="Language model: perplexity on files that were left out",
    paper="falls behind without loss scaling, matches with a scale of 128 (4.5, figure 5)",
    configs=(
        Config("float32"),
        Config("float16", "float16", 1),
        Config("float16, scaled by 128", "float16", 128),
    ),
    steps=(120, 40),
    task=LanguageModel,
    verdict=verdict,
    digits=1,
)
