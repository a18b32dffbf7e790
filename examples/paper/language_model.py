"""A language model in the manner of bigLSTM: falls behind in float16 unless its loss is scaled.

    python examples/paper/language_model.py [--fast] [--seeds 3] [--json FILE] [--png FILE]

Section 4.5 of the paper: an embedding, an LSTM with a projection, a softmax over many words, and a
loss that is the mean over a large batch. The text is the source of Python's standard library. The
gradient of a word that does not come next is its probability over the size of the batch: for most
words that is zero in float16, and nothing tells them not to come.
"""

import collections
import re
import sysconfig
from pathlib import Path

from common import (
    Config,
    Experiment,
    Run,
    draw_curves,
    facts_of,
    initialized,
    interval,
    main,
    seeded,
)

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

STEPS = 20  # words that a sequence is long
#: Of float32's perplexity.
TOLERANCE, MARGIN, FAST_MARGIN = 0.1, 0.25, 0.05
#: The loss is the mean over the words of a batch of bigLSTM's, of so many sequences. A batch here
#: has fewer. Adagrad divides by the size of past gradients: the factor hardly matters in float32.
AGGREGATE = 1024
SCALE = 128  # the paper's


def words(limit):
    """Return words of the standard library: of nine modules in ten, and of the others."""
    parts = [], []
    for number, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        if len(parts[0]) > limit:
            break
        parts[number % 10 == 9].extend(
            re.findall(r"[A-Za-z]+|[^\sA-Za-z]", path.read_text("utf-8"))
        )
    return parts


def numbered(vocabulary, limit):
    """Return the words as numbers by frequency, and 0 for rare ones."""
    training, testing = words(limit)
    known = [word for word, _ in collections.Counter(training).most_common(vocabulary - 1)]
    numbers = {word: number for number, word in enumerate(known, 1)}
    return [np.array([numbers.get(word, 0) for word in part]) for part in (training, testing)]


class LanguageModel(gluon.HybridBlock):
    """Embedding, LSTM, projection and a softmax over many words."""

    def __init__(self, vocabulary, width, cells):
        super().__init__()
        with self.name_scope():
            self.embedding = nn.Embedding(vocabulary, width)
            self.lstm = rnn.LSTM(cells, layout="NTC", input_size=width)
            self.projection = nn.Dense(width, flatten=False, in_units=cells)
            self.scores = nn.Dense(vocabulary, flatten=False, in_units=width)

    def hybrid_forward(self, F, x):
        """Return a score for each word to come next."""
        return self.scores(self.projection(self.lstm(self.embedding(x))))


def sequences(numbers, rng, count):
    starts = rng.randint(0, len(numbers) - STEPS - 1, count)
    rows = numbers[starts[:, None] + np.arange(STEPS + 1)]
    return mx.nd.array(rows[:, :-1]), mx.nd.array(rows[:, 1:])


def perplexity(net, batches, loss_function):
    return float(np.exp(np.mean([loss_function(net(x), y).mean().asscalar() for x, y in batches])))


def train(config, seed, size, tick):
    training, testing = numbered(size["vocabulary"], size["words"])
    rng = seeded(seed)
    net = LanguageModel(size["vocabulary"], size["width"], size["cells"])
    initialized(net, mx.nd.zeros((1, STEPS)))
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    fixed = [sequences(testing, np.random.RandomState(i), 64) for i in range(size["tests"])]
    curve, every = [], interval(size)
    with config.precision():
        trainer = config.trainer(net, "adagrad", {"learning_rate": 0.05, "eps": 1e-10})
        for step in range(1, size["steps"] + 1):
            x, y = sequences(training, rng, size["batch"])
            with autograd.record():
                config.backward(loss_function(net(x), y).sum() / AGGREGATE, trainer)
            trainer.step(1)
            if step % every == 0:
                curve.append((step, perplexity(net, fixed, loss_function)))
            tick()
    return Run(config.name, seed, curve[-1][1], curve, facts_of(trainer))


def verdict(results):
    reference = results.mean("float32")
    margin = FAST_MARGIN if results.fast else MARGIN
    return [
        results.worse("float16", "float32", margin * reference, higher_is_better=False),
        results.matches(f"float16, scaled by {SCALE}", "float32", TOLERANCE * reference),
    ]


def draw(figure, results):
    axes = figure.subplots()
    draw_curves(axes, results)
    axes.set_yscale("log")


EXPERIMENT = Experiment(
    name="language model",
    paper="falls behind without loss scaling, matches with a scale of 128 (4.5, figure 5)",
    metric="perplexity on files that were left out",
    configs=(
        Config("float32"),
        Config("float16", "float16"),
        Config(f"float16, scaled by {SCALE}", "float16", SCALE),
    ),
    sizes={
        False: {
            "vocabulary": 2000,
            "words": 200_000,
            "width": 64,
            "cells": 128,
            "batch": 16,
            "steps": 120,
            "evaluations": 12,
            "tests": 2,
        },
        True: {
            "vocabulary": 2000,
            "words": 200_000,
            "width": 64,
            "cells": 128,
            "batch": 16,
            "steps": 40,
            "evaluations": 2,
            "tests": 1,
        },
    },  # fmt: skip
    train=train,
    verdict=verdict,
    draw=draw,
    digits=1,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
