"""What detectors are trained on: their own losses, and targets that can be learned."""

from typing import Any, Callable, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

#: A network, and a function that computes the losses of its one batch.
Trained = Tuple[Any, Callable[[], Any]]

_random = np.random.RandomState(1)


def _array(value: Any) -> Any:
    return nd.array(np.asarray(value, "float32"))


def ssd(net: Any, image: Any) -> Trained:
    """Return an SSD with its multi-box loss: ten anchors hold an object."""
    from gluoncv.loss import SSDMultiBoxLoss

    loss = SSDMultiBoxLoss()
    with autograd.train_mode():
        anchors = net(image)[0].shape[1]
    classes = np.zeros((len(image), anchors))
    classes[:, _random.permutation(anchors)[:10]] = _random.randint(1, 5, 10)
    boxes = _random.normal(size=(len(image), anchors, 4)) * 0.2
    targets = _array(classes), _array(boxes)

    def losses() -> Any:
        scores, offsets, _ = net(image)
        return loss(scores, offsets, *targets)[0][0]

    return net, losses


def yolo(net: Any, image: Any) -> Trained:
    """Return a YOLO3, which computes its own four losses, for two boxes an image."""
    from gluoncv.model_zoo.yolo.yolo_target import YOLOV3PrefetchTargetGenerator

    size = image.shape[-1]
    boxes = _array([[[4, 4, size / 2, size / 2], [size / 3, size / 4, size - 4, size - 8]]])
    boxes = boxes.repeat(len(image), axis=0)
    kinds = _array([[[1], [3]]]).repeat(len(image), axis=0)
    with autograd.train_mode():
        _, anchors, offsets, maps, *_ = net(image)
    generator = YOLOV3PrefetchTargetGenerator(len(net.classes))
    targets = generator(image, maps, anchors, offsets, boxes, kinds, None)
    return net, lambda: sum(net(image, boxes, *targets))


def rcnn(net: Any, image: Any) -> Trained:
    """Return a Faster R-CNN with the losses of its proposals and of its boxes."""
    entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    binary = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    huber = gluon.loss.HuberLoss()
    height, width = image.shape[-2:]
    boxes = _array(
        [[[8, 8, width / 2, height / 2], [width / 3, height / 3, width - 8, height - 8]]]
    )
    kinds = _array([[[1], [3]]])
    drawn: Any = {}

    def losses() -> Any:
        found = net(image, boxes, kinds)
        scores, offsets, _, _, _, raw_scores, raw_boxes, _, wanted, places, masks = found[:11]
        if not drawn:
            # A quarter of some anchors holds an object; the others are not looked at.
            looked = _random.uniform(size=raw_scores.shape) < 0.1
            holds = looked & (_random.uniform(size=raw_scores.shape) < 0.25)
            drawn.update(looked=_array(looked), holds=_array(holds))
        parts = [
            entropy(scores, wanted, nd.expand_dims(wanted >= 0, -1)),
            huber(offsets, places, masks) * 10,
            binary(raw_scores, drawn["holds"], drawn["looked"]) * 10,
            huber(raw_boxes, nd.zeros_like(raw_boxes), drawn["holds"]),
        ]
        return sum(part.mean() for part in parts)

    return net, losses


def center_net(net: Any, image: Any) -> Trained:
    """Return a CenterNet with the losses of its heatmap, sizes and offsets."""
    from gluoncv.loss import HeatmapFocalLoss, MaskedL1Loss

    focal, distance = HeatmapFocalLoss(from_logits=True), MaskedL1Loss()
    with autograd.train_mode():
        heat, sizes, _ = net(image)
    heatmap, mask = np.zeros(heat.shape), np.zeros(sizes.shape)
    rows = _random.randint(0, heat.shape[2], (2, 4))
    for k in range(4):
        heatmap[:, k, rows[0, k], rows[1, k]] = 1
        mask[:, :, rows[0, k], rows[1, k]] = 1
    wanted, looked = _array(heatmap), _array(mask)
    size, shift = looked * 6, looked * 0.5

    def losses() -> Any:
        heat, sizes, shifts = net(image)
        return (
            focal(heat, wanted)
            + 0.1 * distance(sizes, size, looked)
            + distance(shifts, shift, looked)
        )

    return net, losses


mx.random.seed(0)
