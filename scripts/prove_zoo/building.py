"""Networks without their weights' downloads, with weights that keep activations in range."""

import sys
from typing import Any, Dict, List, Sequence, Tuple

import mxnet as mx

from zoo import Case, Shape

#: What a constructor is given as the path of weights that it insists on.
_NO_FILE = "no download"
#: Proposals a R-CNN looks at: 300 cost minutes on a CPU.
_PROPOSALS = 32
#: Attributes that hold how many.
_LIMITS = ("_rpn_test_post_nms", "_test_post_nms", "_rcnn_max_dets")
#: How R-CNNs with a feature pyramid pool: by ROIPooling. For ROIAlign, GluonCV gives boxes of other
#: levels the batch index -1, and MXNet's CPU kernel reads memory before the array: outputs differ
#: from run to run, and become infinite.
_POOLED = "pool"
#: A Faster R-CNN with a small base, which is trained: GluonCV's settings, but fewer boxes.
SMALL_RCNN = "faster_rcnn_fpn_resnet18_v1b"
_CUSTOM_RCNN = {
    "base_network_name": "resnet18_v1b", "short": 800, "max_size": 1333, "min_stage": 2,
    "max_stage": 6, "nms_thresh": 0.5, "nms_topk": -1, "post_nms": -1, "roi_mode": _POOLED,
    "roi_size": (7, 7), "strides": (4, 8, 16, 32, 64), "clip": 4.14, "rpn_channel": 256,
    "base_size": 16, "scales": (2, 4, 8, 16, 32), "ratios": (0.5, 1, 2), "alloc_size": (384, 384),
    "rpn_nms_thresh": 0.7, "rpn_train_pre_nms": 256, "rpn_train_post_nms": 64,
    "rpn_test_pre_nms": 256, "rpn_test_post_nms": _PROPOSALS, "rpn_min_size": 1,
    "per_device_batch_size": 1, "num_sample": 32, "pos_iou_thresh": 0.5, "pos_ratio": 0.25,
}  # fmt: skip
_CLASSES = ("apple", "orange", "pear", "quince", "plum")


def _without_downloads() -> None:
    """Make constructors that fetch weights, whatever they are told, leave them at random."""

    def get_model_file(*_: Any, **__: Any) -> str:
        return _NO_FILE

    for name, module in list(sys.modules.items()):
        if name.startswith("gluoncv") and "get_model_file" in vars(module):
            module.get_model_file = get_model_file  # type: ignore[attr-defined]
    load = mx.gluon.Block.load_parameters

    def load_parameters(self: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        if filename == _NO_FILE:
            self.initialize(force_reinit=True)
        else:
            load(self, filename, *args, **kwargs)

    mx.gluon.Block.load_parameters = load_parameters


def model_names() -> List[str]:
    """Return the names of GluonCV's models."""
    from gluoncv import model_zoo

    return list(model_zoo.get_model_list())


def _options(case: Case, shapes: Sequence[Shape]) -> List[Dict[str, Any]]:
    """Return keyword arguments to try in turn: not all constructors take all of them."""
    options: Dict[str, Any] = {"pretrained": False, "pretrained_base": False}
    more: Dict[str, Any] = {}
    if case.family == "segmentation":
        more["crop_size"] = shapes[0][-1]
    if "_custom" in case.name and case.family != "action":
        more["classes"] = _CLASSES
    if case.name.endswith("_custom") and case.family == "action":
        more["use_kinetics_pretrain"] = False  # weights that would be copied from a download
    if case.name.startswith("custom_"):
        return [{"pretrained_base": False, "classes": _CLASSES}]
    alone = {"pretrained": False}
    return [{**options, **more}, options, {**alone, **more}, alone]


def build(case: Case, shapes: Sequence[Shape]) -> Any:
    """Return the network, not initialized."""
    if case.name.startswith("np:"):
        import numpy_networks

        return numpy_networks.build(case.name)
    if case.name.startswith("nlp:"):
        import language_models

        return language_models.build(case.name)
    from gluoncv import model_zoo

    _without_downloads()
    if case.name == SMALL_RCNN:
        from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import custom_faster_rcnn_fpn

        return custom_faster_rcnn_fpn(_CLASSES, pretrained_base=False, **_CUSTOM_RCNN)
    failure = None
    for options in _options(case, shapes):
        try:
            net = model_zoo.get_model(case.name, **options)
            break
        except (TypeError, ValueError, Warning) as error:  # an option that it does not take
            failure = failure or error
    else:
        raise failure or RuntimeError(case.name)
    _limit_proposals(net)
    if "_fpn_" in case.name:
        net._roi_mode = _POOLED
    return net


def _limit_proposals(net: Any) -> None:
    for block in [net, *net._children.values()]:
        for name in _LIMITS:
            if hasattr(block, name):
                setattr(block, name, _PROPOSALS)


def initialize(net: Any) -> None:
    """Give all parameters values: He's for weights, which is right for the ReLUs behind them."""
    for name, param in net.collect_params().items():
        if name.endswith(("gamma", "_var")):
            param.init = mx.init.One()
        elif name.endswith(("beta", "_mean", "bias")):
            param.init = mx.init.Zero()
        elif name.endswith("weight"):
            # Layers of detectors ask for weights near zero, from which training starts.
            param.init = None
    net.initialize(mx.init.MSRAPrelu(slope=0.0), force_reinit=True)


def inputs_of(shapes: Sequence[Shape]) -> Tuple[Any, ...]:
    """Return random images, smooth as photographs are."""
    import numpy as np

    random = np.random.RandomState(0)
    made = []
    for shape in shapes:
        value = random.normal(size=shape)
        for axis in (-1, -2):
            for _ in range(2):
                value = value + np.roll(value, 1, axis)
        made.append(mx.nd.array((value / value.std()).astype("float32")))
    return tuple(made)
