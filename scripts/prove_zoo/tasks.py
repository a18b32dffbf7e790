"""What one model of each family is trained on: its loss, and one batch that can be learned."""

from typing import Any, Callable, Dict, NamedTuple, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon, nd

import detection_tasks
from building import build, initialize, inputs_of
from detection_tasks import Trained
from zoo import Shape, case_of


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


def _labels(count: int, classes: int) -> Any:
    return nd.array(np.arange(count) % classes)


def classes(net: Any, data: Any) -> Trained:
    """Return a classifier with softmax's cross entropy."""
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    labels = _labels(len(net(data)), 10)
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
    "ssd_512_resnet18_v1_voc": Plan(detection_tasks.ssd, (1, 3, 256, 256), 0.001),
    "yolo3_mobilenet1.0_voc": Plan(detection_tasks.yolo, (2, 3, 96, 96), 0.0001),
    "faster_rcnn_fpn_resnet18_v1b": Plan(detection_tasks.rcnn, (1, 3, 128, 160), 0.00001),
    "center_net_resnet18_v1b_voc": Plan(detection_tasks.center_net, (1, 3, 128, 128), 0.0001),
    "fcn_resnet50_voc": Plan(segmentation, (2, 3, 64, 64), 0.001),
    "simple_pose_resnet18_v1b": Plan(pose, (2, 3, 128, 96), 0.01),
    "resnet18_v1b_kinetics400": Plan(classes, (4, 3, 64, 64), 0.01),
    "c3d_kinetics400": Plan(classes, (2, 3, 16, 112, 112), 0.0001),
    "re-identification": Plan(re_identification, (4, 3, 128, 64), 0.001),
}


def made(name: str) -> Tuple[Any, Callable[[], Any], float]:
    """Return a representative, hybridized, the losses of its batch, and its learning rate."""
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
