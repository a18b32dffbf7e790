"""Train one model of each family for a few steps on one batch that can be learned.

    python training.py          # serves tasks in float32 and with mxamp
    python training.py stock    # serves tasks with mxnet.contrib.amp, and never imports mxamp

A task is a model's name and a way: "float32", or a library and a dtype ("mxamp float16").
"""

import logging
import sys
import warnings
from contextlib import nullcontext
from typing import Any, Callable, Dict, NamedTuple, Tuple

warnings.simplefilter("ignore")
if "stock" in sys.argv:
    from mxnet.contrib import amp
else:
    logging.disable(logging.CRITICAL)
    import mxamp as amp  # before mxnet

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402

from networks import build, initialize, inputs_of  # noqa: E402
from processes import serve  # noqa: E402
from zoo import Shape, case_of  # noqa: E402

# ---------------------------------------------------------------------- detectors

#: A network, and a function that computes the losses of its one batch.
Trained = Tuple[Any, Callable[[], Any]]

_random = np.random.RandomState(1)


def _array(value: Any) -> Any:
    """Return a float32 NDArray of anything that NumPy converts."""
    return nd.array(np.asarray(value, "float32"))


def ssd(net: Any, image: Any) -> Trained:
    """Return an SSD and its multi-box loss: ten anchors hold an object."""
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


# ---------------------------------------------------------------------- other families


class Plan(NamedTuple):
    """How a representative is trained."""

    make: Callable[[Any, Any], Trained]
    shape: Shape
    rate: float  #: the learning rate


class ReIdentification(gluon.HybridBlock):
    """GluonCV's baseline of person re-identification: features, a bottleneck, a classifier."""

    def __init__(self, base: Any, people: int) -> None:
        super().__init__()
        with self.name_scope():
            self.base = base
            self.bottleneck = gluon.nn.HybridSequential()
            self.bottleneck.add(gluon.nn.Dense(128), gluon.nn.BatchNorm())
            self.classifier = gluon.nn.Dense(people)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Return features and scores."""
        features = self.bottleneck(self.base(x))
        return features, self.classifier(features)


def classes(net: Any, data: Any) -> Trained:
    """Return a classifier with softmax's cross entropy."""
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    labels = nd.arange(len(net(data))) % 10
    return net, lambda: loss(net(data), labels)


def segmentation(net: Any, image: Any) -> Trained:
    """Return a segmentation network with GluonCV's loss of two outputs."""
    from gluoncv.loss import MixSoftmaxCrossEntropyLoss

    loss = MixSoftmaxCrossEntropyLoss(aux=True)
    # Bright places are of one class, dark ones of another.
    labels = image.mean(axis=1) > 0
    return net, lambda: loss(*net(image), labels)


def pose(net: Any, image: Any) -> Trained:
    """Return a pose network with the L2 loss of its heatmaps."""
    loss = gluon.loss.L2Loss()
    shape = net(image).shape
    wanted = np.zeros(shape, "float32")
    for joint in range(shape[1]):
        wanted[:, joint, joint % shape[2], joint % shape[3]] = 1
    target, weight = nd.array(wanted), nd.ones((shape[0], shape[1], 1, 1))
    return net, lambda: loss(net(image), target, weight)


def re_identification(net: Any, image: Any) -> Trained:
    """Return a re-identification network with softmax's cross entropy and the triplet loss."""
    whole = ReIdentification(net.features, 4)
    whole.initialize(mx.init.Xavier())
    entropy, triplet = gluon.loss.SoftmaxCrossEntropyLoss(), gluon.loss.TripletLoss(margin=0.3)
    whole.base.initialize(mx.init.MSRAPrelu(slope=0.0), force_reinit=True)
    labels = nd.array([0, 0, 1, 1])

    def losses() -> Any:
        features, scores = whole(image)
        features = nd.L2Normalization(features)
        other = nd.take(features, nd.array([2, 3, 0, 1]))
        same = nd.take(features, nd.array([1, 0, 3, 2]))
        return entropy(scores, labels) + triplet(features, same, other)

    return whole, losses


PLANS: Dict[str, Plan] = {
    "resnet18_v1b": Plan(classes, (4, 3, 64, 64), 0.01),
    "ssd_512_resnet18_v1_voc": Plan(ssd, (1, 3, 256, 256), 0.001),
    "yolo3_mobilenet1.0_voc": Plan(yolo, (2, 3, 96, 96), 0.0001),
    "faster_rcnn_fpn_resnet18_v1b": Plan(rcnn, (1, 3, 128, 160), 0.00001),
    "center_net_resnet18_v1b_voc": Plan(center_net, (1, 3, 128, 128), 0.0001),
    "fcn_resnet50_voc": Plan(segmentation, (2, 3, 64, 64), 0.001),
    "simple_pose_resnet18_v1b": Plan(pose, (2, 3, 128, 96), 0.01),
    "resnet18_v1b_kinetics400": Plan(classes, (4, 3, 64, 64), 0.01),
    "c3d_kinetics400": Plan(classes, (2, 3, 16, 112, 112), 0.0001),
    "re-identification": Plan(re_identification, (4, 3, 128, 64), 0.001),
}


def build_representative(name: str) -> Tuple[Any, Callable[[], Any], float]:
    """Return a representative hybridized, a function of its losses, and its learning rate."""
    plan = PLANS[name]
    mx.random.seed(0)
    case = case_of("resnet18_v1" if name == "re-identification" else name)
    net = build(case, (plan.shape,))
    (data,) = inputs_of((plan.shape,))
    initialize(net)
    # Detectors have another graph in training: not hybridized, they find out at each call.
    net, losses = plan.make(net, data)
    net.hybridize()
    return net, losses, plan.rate


# ---------------------------------------------------------------------- training

#: Updates, and steps at most: loss scaling leaves some out until the scale fits.
_UPDATES, _STEPS = 3, 24


def train(name: str, use_amp: bool) -> Dict[str, Any]:
    """Train a representative; return the losses before each update and after the last."""
    net, compute, rate = build_representative(name)

    def losses() -> Any:
        # What dropout and detectors draw is the same in each step: only the weights differ.
        mx.random.seed(0)
        return compute()

    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": rate}, update_on_kvstore=False
    )
    if use_amp:
        amp.init_trainer(trainer)
    with autograd.record():
        losses()  # parameters get their shapes
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    found, skipped = [], 0
    for _ in range(_STEPS):
        before = [p.data().copy() for p in trained]
        with autograd.record():
            loss = losses()
            with amp.scale_loss(loss, trainer) if use_amp else nullcontext(loss) as scaled:
                autograd.backward(scaled)
        trainer.step(loss.size, ignore_stale_grad=True)
        if all(np.array_equal(a.asnumpy(), p.data().asnumpy()) for a, p in zip(before, trained)):
            skipped += 1
            continue
        found.append(_mean(loss))
        if len(found) == _UPDATES:
            break
    with autograd.record():
        found.append(_mean(losses()))
    nd.waitall()
    return {"losses": found, "left_out": skipped}


def _mean(loss: Any) -> float:
    """Return the mean of a loss in float32."""
    return float(loss.astype("float32").asnumpy().mean())


def perform_task(name: str, way: str) -> Dict[str, Any]:
    """Return the losses of a model trained in float32, or as a library and a dtype say."""
    if way != "float32":
        amp.init(way.split()[1])
    found = train(name, way != "float32")
    assert "stock" not in way or "mxamp" not in sys.modules, "mxamp was imported"
    return found


if __name__ == "__main__":
    serve(perform_task)
