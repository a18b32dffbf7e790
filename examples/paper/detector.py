"""A detector with small gradients: fails without loss scaling, matches float32 with a scale of 8.

    python examples/paper/detector.py [--fast] [--seeds 3] [--json FILE] [--png FILE]

Sections 3.2 and 4.2 of the paper: most gradients of Multibox SSD's activations lie below what
float16 holds. The detector here is SSD in small, and finds digits in larger images. Its gradients
are small because the loss is divided by the number of boxes in a batch of a detector of full size.
"""

from common import (
    DYNAMIC,
    Config,
    Experiment,
    Run,
    digits,
    draw_curves,
    draw_shares,
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
from mxnet.gluon import nn

SIDE, BATCH = 32, 16
SIZES = (0.25, 0.5)  # of the default boxes, as parts of the image
#: The loss is the mean over so many boxes: 32 images of 2^17 default boxes, as detectors with dense
#: boxes have on large images. There are 2^11 here; the learning rate makes up for the difference.
BOXES = 2.0**22
#: Mean average precision, in percentage points.
TOLERANCE, MARGIN = 5.0, 20.0
FAST_MARGIN = 1.5
LEARNING_RATE = 0.0003 * BOXES


def scenes(images, labels, count, seed):
    """Return images of one to three digits of 8 or 16 pixels, and their classes and boxes."""
    rng = np.random.RandomState(seed)
    data = 0.1 * rng.rand(count, 1, SIDE, SIDE)
    truth = -np.ones((count, 3, 5))
    for number in range(count):
        corners = rng.permutation(4)[: rng.randint(1, 4)]
        for place, corner in enumerate(corners):
            chosen = rng.randint(len(images))
            times = rng.randint(1, 3)
            side = 8 * times
            x, y = np.array([corner % 2, corner // 2]) * 16 + rng.randint(0, 17 - side, 2)
            digit = images[chosen, 0].repeat(times, 0).repeat(times, 1)
            data[number, 0, y : y + side, x : x + side] += digit
            box = np.array([x, y, x + side, y + side]) / SIDE
            truth[number, place] = [labels[chosen], *box]
    return data.astype("float32"), truth.astype("float32")


class Detector(gluon.HybridBlock):
    """Multibox SSD in small: classes and offsets for the default boxes of one feature map."""

    def __init__(self, classes=10):
        super().__init__()
        self.classes = classes
        with self.name_scope():
            self.body = nn.HybridSequential()
            for channels, stride in ((16, 2), (32, 2), (32, 1), (32, 1)):
                self.body.add(nn.Conv2D(channels, 3, stride, padding=1, activation="relu"))
            self.scores = nn.Conv2D(len(SIZES) * (classes + 1), 3, padding=1)
            self.offsets = nn.Conv2D(len(SIZES) * 4, 3, padding=1)

    def hybrid_forward(self, F, x):
        """Return the boxes, their scores by class (background first), and their offsets."""
        features = self.body(x)
        boxes = F.contrib.MultiBoxPrior(features, sizes=SIZES, ratios=(1,))
        scores = self.scores(features).transpose((0, 2, 3, 1)).reshape((0, -1, self.classes + 1))
        offsets = self.offsets(features).transpose((0, 2, 3, 1)).flatten()
        return boxes, scores, offsets


def loss_of(outputs, truth):
    """Return the loss of SSD: classes with hard negatives, and offsets of boxes that match."""
    boxes, scores, offsets = outputs
    with autograd.pause():
        wanted, mask, classes = mx.nd.contrib.MultiBoxTarget(
            boxes,
            truth,
            scores.astype("float32").transpose((0, 2, 1)),
            negative_mining_ratio=3,
            negative_mining_thresh=0.5,
            ignore_label=-1,
        )
    log = mx.nd.log_softmax(scores.astype("float32"))
    of_classes = -mx.nd.pick(log, mx.nd.maximum(classes, 0)) * (classes >= 0)
    of_offsets = mx.nd.smooth_l1((offsets.astype("float32") - wanted) * mask, scalar=1)
    return (of_classes.sum() + of_offsets.sum()) / BOXES


def overlap(boxes, box):
    """Return the intersection of boxes with one, over their union."""
    low, high = np.maximum(boxes[:, :2], box[:2]), np.minimum(boxes[:, 2:], box[2:])
    both = np.prod(np.maximum(high - low, 0), axis=1)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) + np.prod(box[2:] - box[:2])
    return both / (areas - both)


def average_precision(found, truth, category):
    """Return the area under precision over recall of a class; boxes match at an overlap of 0.5."""
    rows = [
        (row[1], image, row[2:])
        for image in range(len(found))
        for row in found[image]
        if row[0] == category
    ]
    rows.sort(key=lambda row: -row[0])
    wanted = [image[image[:, 0] == category, 1:] for image in truth]
    taken = [np.zeros(len(boxes), bool) for boxes in wanted]
    hits = np.zeros(len(rows))
    for number, (_, image, box) in enumerate(rows):
        if len(wanted[image]):
            overlaps = overlap(wanted[image], box)
            best = overlaps.argmax()
            hits[number] = overlaps[best] >= 0.5 and not taken[image][best]
            taken[image][best] |= bool(hits[number])
    total = sum(map(len, wanted))
    precision = hits.cumsum() / np.arange(1, len(rows) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1] if len(rows) else precision
    return float((best * hits).sum() / total)


def mean_average_precision(net, data, truth):
    boxes, scores, offsets = (array.astype("float32") for array in net(data))
    likely = mx.nd.softmax(scores).transpose((0, 2, 1))
    found = mx.nd.contrib.MultiBoxDetection(likely, offsets, boxes, nms_threshold=0.45, nms_topk=50)
    found = found.asnumpy()
    return 100 * float(np.mean([average_precision(found, truth, c) for c in range(10)]))


def train(config, seed, size, tick):
    images, labels, test_images, test_labels = digits()
    data, truth = scenes(images, labels, 800, seed=1)
    test_data, test_truth = scenes(test_images, test_labels, 200, seed=2)
    test_data = mx.nd.array(test_data)
    rng = seeded(seed)
    net = initialized(Detector(), test_data[:2])
    curve, every, facts = [], interval(size), {}
    with config.precision():
        trainer = config.trainer(net, "sgd", {"learning_rate": LEARNING_RATE, "momentum": 0.9})
        for step in range(1, size["steps"] + 1):
            if step == size["steps"] * 3 // 4:
                trainer.set_learning_rate(LEARNING_RATE / 10)
            chosen = rng.randint(0, len(data), BATCH)
            x, y = mx.nd.array(data[chosen]), mx.nd.array(truth[chosen])
            if config.dtype == "float32" and step == size["steps"] // 4:
                facts = exponents(net, x, y)
            with autograd.record():
                config.backward(loss_of(net(x), y), trainer)
            trainer.step(1)
            if step % every == 0:
                curve.append((step, mean_average_precision(net, test_data, test_truth)))
            tick()
        metric = mean_average_precision(net, test_data, test_truth)
    return Run(config.name, seed, metric, curve, {**facts, **facts_of(trainer)})


def exponents(net, x, y):
    """Count gradients by exponent, those of activations too, and what float16 rounds to zero."""
    zeros = []

    def plus_zero(layer):
        """Add a zero to the layer's output: its gradient is the gradient of that output."""
        forward = layer.forward

        def called(data):
            output = forward(data)
            with autograd.pause():
                zeros.append(output.zeros_like())
                zeros[-1].attach_grad()
            return output + zeros[-1]

        layer.forward = called

    layers = [*net.body, net.scores, net.offsets]
    net.hybridize(False)
    for layer in layers:
        plus_zero(layer)
    with autograd.record():
        loss = loss_of(net(x), y)
    for layer in layers:
        del layer.forward
    net.hybridize()
    params = [param.data() for param in net.collect_params().values()]
    gradients = [array.asnumpy() for array in autograd.grad(loss, [*params, *zeros])]
    sizes = np.concatenate([np.abs(gradient[gradient != 0]) for gradient in gradients])
    found, counts = np.unique(np.floor(np.log2(sizes)), return_counts=True)
    return {
        "exponents": found.tolist(),
        "counts": counts.tolist(),
        # float16 rounds up to half of its smallest number, 2^-24, to zero.
        "zero in float16": float((sizes <= 2.0**-25).mean()),
        "zero in float16, scaled by 8": float((sizes <= 2.0**-28).mean()),
    }


def verdict(results):
    tolerance = TOLERANCE * (2 if results.fast else 1)
    margin = FAST_MARGIN if results.fast else MARGIN
    return [
        results.worse("float16", "float32", margin),
        results.matches("float16, scaled by 8", "float32", tolerance),
        results.matches("float16, dynamic scale", "float32", tolerance),
    ]


def draw(figure, results):
    left, right = figure.subplots(1, 2)
    draw_curves(left, results)
    facts = results.of("float32")[0].facts
    exponents, counts = np.array(facts["exponents"]), np.array(facts["counts"])
    kinds = (
        # float16 rounds to zero what is at most half of its smallest number, 2^-24.
        (exponents < -28, "#BBBBBB", "zero at a scale of 8 too"),
        ((exponents >= -28) & (exponents < -25), "#D55E00", "kept by a scale of 8"),
        (exponents >= -25, "#0072B2", "kept without a scale"),
    )
    draw_shares(right, exponents, counts, kinds)
    right.set_xlabel("exponent of the gradient (base 2)")
    right.set_ylabel("% of gradients that are not zero")


EXPERIMENT = Experiment(
    name="detector",
    paper="fails without loss scaling, matches with a scale of 8 (3.2, 4.2, figure 3)",
    metric="mean average precision, %",
    configs=(
        Config("float32"),
        Config("float16", "float16"),
        Config("float16, scaled by 8", "float16", 8),
        Config("float16, dynamic scale", "float16", DYNAMIC),
    ),
    sizes={
        False: {"steps": 200, "evaluations": 10},
        True: {"steps": 60, "evaluations": 1},
    },
    train=train,
    verdict=verdict,
    draw=draw,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
