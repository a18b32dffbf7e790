"""Which models are proven: their families, the shapes of their inputs, and what counts as agreeing.

Nothing here imports MXNet: the command that starts the processes reads it too.
"""

import re
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

Shape = Tuple[int, ...]

DTYPES = ("float16", "bfloat16")
#: One rounding, relatively.
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Family:
    """How models of a family are measured, and within what.

    `measure` names a function of `outputs`. `tolerance` is the largest relative L2 error of an
    output, or of what goes into the selection of boxes; `agreement` the least share of answers
    (largest class, pixel, joint, box) that have to stay the same.
    """

    title: str
    measure: str
    tolerance: Dict[str, float]
    agreement: Dict[str, float]


def _within(low: float, bf: float) -> Dict[str, float]:
    return {"float16": low, "bfloat16": bf}


FAMILIES = {
    "classification": Family("Classification", "classes", _within(0.02, 0.15), _within(0.0, 0.0)),
    "ssd": Family("Detection, SSD", "boxes", _within(0.02, 0.15), _within(0.9, 0.7)),
    "yolo": Family("Detection, YOLO3", "boxes", _within(0.02, 0.15), _within(0.9, 0.7)),
    "rcnn": Family("Detection, R-CNN", "boxes", _within(0.02, 0.15), _within(0.9, 0.7)),
    "center_net": Family("Detection, CenterNet", "boxes", _within(0.02, 0.15), _within(0.9, 0.7)),
    "segmentation": Family("Segmentation", "pixels", _within(0.02, 0.15), _within(0.97, 0.85)),
    "pose": Family("Pose", "joints", _within(0.02, 0.15), _within(0.85, 0.7)),
    "action": Family("Action recognition", "classes", _within(0.02, 0.15), _within(0.0, 0.0)),
    "tracking": Family("Tracking", "values", _within(0.02, 0.15), _within(0, 0)),
    "depth": Family("Depth", "values", _within(0.02, 0.15), _within(0, 0)),
    "language": Family("Language, GluonNLP", "values", _within(0.02, 0.15), _within(0, 0)),
    "numpy": Family("NumPy-style networks", "values", _within(0.02, 0.15), _within(0, 0)),
}

#: Families by a pattern of the name; the first that matches.
_FAMILY_OF = (
    (r"^monodepth2", "depth"), (r"^np:", "numpy"), (r"^nlp:", "language"),
    (r"^ssd_", "ssd"), (r"^yolo3_", "yolo"),
    (r"rcnn", "rcnn"), (r"^center_net", "center_net"), (r"pose", "pose"),
    (r"^(fcn|psp|deeplab|icnet|fastscnn|danet)_?|^hrnet_.*_s$", "segmentation"),
    (r"^siamrpn", "tracking"),
    (r"ucf101|hmdb51|kinetics|sthsth|^(i3d|slowfast|c3d|p3d|r2plus1d)_|v1b_custom$", "action"),
    (r"", "classification"),
)  # fmt: skip

#: Shapes of inputs by a pattern of the name: the smallest that the network takes, nearly always.
#: The first that matches; a list is tried from its start.
_SHAPES = (
    (r"^siamrpn", [((1, 3, 127, 127), (1, 3, 287, 287))]),
    (r"^monodepth2.*posenet", [((1, 6, 96, 160),)]), (r"^monodepth2", [((1, 3, 96, 160),)]),
    (r"^slowfast_4x16", [(1, 3, 36, 64, 64)]), (r"^slowfast_8x8", [(1, 3, 40, 64, 64)]),
    (r"^slowfast_16x8", [(1, 3, 80, 64, 64)]),
    (r"^c3d", [(1, 3, 16, 112, 112)]), (r"^p3d", [(1, 3, 16, 64, 64), (1, 3, 16, 112, 112)]),
    (r"^i3d_slow_", [(1, 3, 16, 64, 64)]),
    (r"^i3d_inception", [(1, 3, 16, 96, 96), (1, 3, 32, 224, 224)]),
    (r"^(i3d|r2plus1d)_", [(1, 3, 16, 64, 64), (1, 3, 32, 224, 224)]),
    (r"^ssd_300", [(1, 3, 300, 300)]), (r"^ssd_512", [(1, 3, 256, 256), (1, 3, 512, 512)]),
    (r"^yolo3", [(1, 3, 128, 128)]), (r"rcnn", [(1, 3, 128, 160), (1, 3, 256, 256)]),
    (r"^center_net", [(1, 3, 128, 128)]),
    (r"pose", [(1, 3, 128, 96), (1, 3, 256, 192)]),
    (r"^(icnet|fastscnn)", [(1, 3, 256, 256), (1, 3, 480, 480)]),
    (r"^danet", [(1, 3, 96, 96)]), (r"^(fcn|psp|deeplab)_", [(1, 3, 96, 96)]),
    (r"^hrnet_.*_s$", [(1, 3, 128, 128)]),
    (r"^cifar", [(2, 3, 32, 32)]),
    (r"inceptionv3", [(2, 3, 299, 299)]), (r"inceptionv1|^googlenet", [(2, 3, 224, 224)]),
    (r"^vgg.*_(ucf101|hmdb51|kinetics400|sthsthv2)", [(2, 3, 224, 224)]),
    (r"^residualattention|^nasnet|^densenet|^squeezenet|^hrnet", [(2, 3, 224, 224)]),
    (r"", [(2, 3, 96, 96), (2, 3, 224, 224)]),
)  # fmt: skip

#: Models that are not in the proof, and why: (pattern, reason).
LEFT_OUT = (
    (r"_int8$", "a quantized graph, whose integer weights and scales are downloads"),
)  # fmt: skip


#: Deep and wide ones, and those that differ from others in their classes alone.
_LATER = re.compile(
    r"1[0-9][0-9]_|101|110|128|152|164|200|236|269|452|wideresnet|154|nasnet_[67]|vgg1|vgg_1|161|169"
    r"|201|hrnet_w[346]|64x4d|_custom|_coco|hmdb51|sthsth|ucf101|xception71|resnest50|resnet34"
)


@dataclass(frozen=True)
class Case:
    """One model: its name, its family, and the shapes of inputs to try, one tuple a try."""

    name: str
    family: str
    tries: Tuple[Tuple[Shape, ...], ...]
    left_out: Optional[str] = None


def case_of(name: str) -> Case:
    """Return what is known of a model by its name."""
    family = next(found for pattern, found in _FAMILY_OF if re.search(pattern, name))
    tries = next(found for pattern, found in _SHAPES if re.search(pattern, name))
    shapes = tuple((one,) if isinstance(one[0], int) else one for one in tries)
    reason = next((why for pattern, why in LEFT_OUT if re.search(pattern, name)), None)
    return Case(name, family, shapes, reason)  # type: ignore[arg-type]


#: The models that train, one of each family.
REPRESENTATIVES = (
    "resnet18_v1b", "ssd_512_resnet18_v1_voc", "yolo3_mobilenet1.0_voc",
    "center_net_resnet18_v1b_voc", "fcn_resnet50_voc", "simple_pose_resnet18_v1b",
    "resnet18_v1b_kinetics400", "c3d_kinetics400", "re-identification",
    "faster_rcnn_fpn_resnet18_v1b",
)  # fmt: skip


def chosen(names: List[str], only: Tuple[str, ...]) -> List[Case]:
    """Return the models to prove: those of these names, families or patterns; all by default.

    Small ones come first: a run that is cut short has then seen all architectures.
    """
    cases = [case_of(name) for name in sorted(names, key=lambda n: bool(_LATER.search(n)))]
    if not only:
        return cases
    return [c for c in cases if any(c.family == o or re.fullmatch(o, c.name) for o in only)]
