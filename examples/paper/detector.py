"""A detector with small gradients, sections 3.2 and 4.2 of the paper.

Most gradients of the activations of Multibox SSD lie below what float16 holds. The detector here is
SSD in small, and finds digits in larger images. Its gradients are small because the loss is divided
by the number of boxes in a batch of a detector of full size.
"""

from common import Config, Experiment, differs, handwritten, initialized, matches

# isort: split
import mxnet as mx
import numpy as np
from gluoncv.utils.metrics.voc_detection import VOCMApMetric
from mxnet import autograd, gluon
from mxnet.gluon import nn

SIDE, BATCH, CLASSES = 32, 16, 10
SIZES = (0.25, 0.5)  # of the default boxes, as parts of the image
#: The loss is the mean over so many boxes: 32 images of 2^17 default boxes, as detectors with dense
#: boxes have on large images. There are 2^11 here; the learning rate makes up for the difference.
BOXES = 2.0**22


def scenes(images, labels, count, seed):
    """Return images of one to three digits of 8 or 16 pixels, and their classes and boxes."""
    rng = np.random.RandomState(seed)
    data = 0.1 * rng.rand(count, 1, SIDE, SIDE)
    truth = -np.ones((count, 3, 5))
    for number in range(count):
        corners = rng.permutation(4)[: rng.randint(1, 4)]
        for place, corner in enumerate(corners):
            chosen, times = rng.randint(len(images)), rng.randint(1, 3)
            side = 8 * times
            x, y = np.array([corner % 2, corner // 2]) * 16 + rng.randint(0, 17 - side, 2)
            digit = images[chosen, 0].repeat(times, 0).repeat(times, 1)
            data[number, 0, y : y + side, x : x + side] += digit
            box = np.array([x, y, x + side, y + side]) / SIDE
            truth[number, place] = [labels[chosen], *box]
    return data.astype("float32"), truth.astype("float32")


class Detector(gluon.HybridBlock):
    """Multibox SSD in small: classes and offsets for the default boxes of one feature map."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            for channels, stride in ((16, 2), (32, 2), (32, 1), (32, 1)):
                self.body.add(nn.Conv2D(channels, 3, stride, padding=1, activation="relu"))
            self.scores = nn.Conv2D(len(SIZES) * (CLASSES + 1), 3, padding=1)
            self.offsets = nn.Conv2D(len(SIZES) * 4, 3, padding=1)

    def hybrid_forward(self, F, x):
        """Return the boxes, their scores by class (background first), and their offsets."""
        features = self.body(x)
        boxes = F.contrib.MultiBoxPrior(features, sizes=SIZES, ratios=(1,))
        scores = self.scores(features).transpose((0, 2, 3, 1)).reshape((0, -1, CLASSES + 1))
        offsets = self.offsets(features).transpose((0, 2, 3, 1)).flatten()
        return boxes, scores, offsets


def loss_of(boxes, scores, offsets, truth):
    """Return the loss of SSD: classes with hard negatives, and offsets of boxes that match."""
    with autograd.pause():
        options = {"negative_mining_ratio": 3, "negative_mining_thresh": 0.5, "ignore_label": -1}
        by_class = scores.astype("float32").transpose((0, 2, 1))
        wanted, mask, classes = mx.nd.contrib.MultiBoxTarget(boxes, truth, by_class, **options)
    log = mx.nd.log_softmax(scores.astype("float32"))
    of_classes = -mx.nd.pick(log, mx.nd.maximum(classes, 0)) * (classes >= 0)
    of_offsets = mx.nd.smooth_l1((offsets.astype("float32") - wanted) * mask, scalar=1)
    return (of_classes.sum() + of_offsets.sum()) / BOXES


class Detection:
    """A task: the detector finds digits."""

    def __init__(self, config, rng, steps):
        images, labels, *test = handwritten()
        self.data, self.truth = scenes(images, labels, 800, seed=1)
        self.test = [mx.nd.array(part) for part in scenes(*test, 200, seed=2)]
        self.rng, self.nets = rng, [initialized(Detector(), self.test[0][:2])]
        rate = mx.lr_scheduler.FactorScheduler(steps * 3 // 4, factor=0.1, base_lr=0.0003 * BOXES)
        self.optimizer = "sgd", {"momentum": 0.9, "lr_scheduler": rate}

    def losses(self):
        """Return the loss of a random batch of scenes."""
        chosen = self.rng.randint(0, len(self.data), BATCH)
        x, y = mx.nd.array(self.data[chosen]), mx.nd.array(self.truth[chosen])
        return [lambda: loss_of(*self.nets[0](x), y)]

    def metric(self):
        """Return the mean average precision at an overlap of 0.5, in percent."""
        data, truth = self.test
        boxes, scores, offsets = (array.astype("float32") for array in self.nets[0](data))
        likely = mx.nd.softmax(scores).transpose((0, 2, 1))
        found = mx.nd.contrib.MultiBoxDetection(
            likely, offsets, boxes, nms_threshold=0.45, nms_topk=50
        )
        metric = VOCMApMetric(iou_thresh=0.5, class_names=[str(c) for c in range(CLASSES)])
        metric.update(
            found[:, :, 2:], found[:, :, :1], found[:, :, 1:2], truth[:, :, 1:], truth[:, :, :1]
        )
        return 100 * float(metric.get()[1][-1])


def verdict(found, fast):
    return [
        differs(found, "float16", "float32", -1.5 if fast else -20),
        matches(found, "float16, scaled by 8", "float32", 10 if fast else 5),
        matches(found, "float16, dynamic scale", "float32", 10 if fast else 5),
    ]


EXPERIMENT = Experiment(
    title="Detector with small gradients: mean average precision, %",
    paper="fails without loss scaling, matches with a scale of 8 (3.2, 4.2, figure 3)",
    configs=(
        Config("float32"),
        Config("float16", "float16", 1),
        Config("float16, scaled by 8", "float16", 8),
        Config("float16, dynamic scale", "float16"),
    ),
    steps=(200, 60),
    task=Detection,
    verdict=verdict,
)
