"""The models of the proof: their families, input shapes, and measures of agreement.

This module must not import MXNet: the command that starts the worker processes imports it.
"""

import re
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

Shape = Tuple[int, ...]

DTYPES = ("float16", "bfloat16")
#: One rounding, relatively.
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Family:
    """A family's title, and which answers are compared: a key of `_ANSWERS`, boxes or values."""

    title: str
    measure: str


#: The largest relative L2 error of an output, or of the inputs of box selection.
TOLERANCE = {"float16": 0.02, "bfloat16": 0.15}
#: By measure: the smallest share of equal answers (pixels, joints, boxes). Others have no limit.
LEAST_AGREEMENT = {
    "boxes": {"float16": 0.9, "bfloat16": 0.7},
    "pixels": {"float16": 0.97, "bfloat16": 0.85},
    "joints": {"float16": 0.85, "bfloat16": 0.7},
}

FAMILIES = {
    "classification": Family("Classification", "classes"),
    "ssd": Family("Detection, SSD", "boxes"),
    "yolo": Family("Detection, YOLO3", "boxes"),
    "rcnn": Family("Detection, R-CNN", "boxes"),
    "center_net": Family("Detection, CenterNet", "boxes"),
    "segmentation": Family("Segmentation", "pixels"),
    "pose": Family("Pose", "joints"),
    "action": Family("Action recognition", "classes"),
    "tracking": Family("Tracking", "values"),
    "depth": Family("Depth", "values"),
    "language": Family("Language, GluonNLP", "values"),
    "numpy": Family("NumPy-style networks", "values"),
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

#: Input shapes by a pattern of the name: nearly always the smallest that the network accepts. The
#: first matching pattern counts; its shapes are tried in order.
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

#: Models that the proof leaves out: (pattern, reason).
LEFT_OUT = (
    (r"_int8$", "a quantized graph, whose integer weights and scales are downloads"),
)  # fmt: skip


#: Large models, and variants that differ only in their classes: they run last.
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
    """Return the case of a model, by patterns of its name."""
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


def select_cases(names: List[str], only: Tuple[str, ...]) -> List[Case]:
    """Return the cases of the models whose name or family `only` lists; all if it is empty.

    Small ones come first: a run that is cut short has then seen all architectures.
    """
    cases = [case_of(name) for name in sorted(names, key=lambda n: bool(_LATER.search(n)))]
    if not only:
        return cases
    return [c for c in cases if any(c.family == o or re.fullmatch(o, c.name) for o in only)]


# ---------------------------------------------------------------------- agreement with float32

#: Detections that count: their least score, and how many of the best at most.
_SCORE, _MOST = 0.01, 20
#: Boxes that overlap so much are the same.
_OVERLAP = 0.7


def flat(outputs: Any) -> List[Any]:
    """Return a network's nested outputs as a flat list of float32 NumPy arrays."""
    if isinstance(outputs, (list, tuple)):
        return [array for one in outputs for array in flat(one)]
    return [] if outputs is None else [outputs.astype("float32").asnumpy()]


def relative(expected: List[Any], outputs: List[Any]) -> float:
    """Return the largest relative L2 error among a network's outputs."""
    errors = []
    for a, b in zip(expected, outputs):
        both = np.isfinite(a) & np.isfinite(b)
        norm = np.linalg.norm(a[both].astype("float64"))
        errors.append(float(np.linalg.norm((b - a)[both].astype("float64")) / max(norm, 1e-30)))
    return max(errors)


def lost(expected: List[Any], outputs: List[Any]) -> int:
    """Return the number of elements that are finite in `expected` and not in `outputs`."""
    return sum(int((np.isfinite(a) & ~np.isfinite(b)).sum()) for a, b in zip(expected, outputs))


def agreement(measure: str, expected: List[Any], outputs: List[Any]) -> Optional[float]:
    """Return the share of equal answers, or None if the measure or the image has no answers."""
    if measure == "boxes":
        return _equal_boxes(expected, outputs)
    if measure not in _ANSWERS:
        return None
    answers = _ANSWERS[measure]
    return float((answers(expected[0]) == answers(outputs[0])).mean())


def detections(outputs: List[Any]) -> List[Any]:
    """Return for each image an array of the detections that count: class, score, four corners."""
    parts = [a.reshape(len(a), -1, width) for a, width in zip(outputs, (1, 1, 4))]
    rows = np.concatenate(parts, -1)
    return [image[(image[:, 0] >= 0) & (image[:, 1] > _SCORE)] for image in rows]


def _equal_boxes(expected: List[Any], outputs: List[Any]) -> Optional[float]:
    """Return the share of the best expected detections that the outputs have too."""
    matched = total = 0
    for image, other in zip(detections(expected), detections(outputs)):
        best = image[image[:, 1].argsort()[::-1][:_MOST]]
        total += len(best)
        matched += sum(_has_box(other, box) for box in best)
    return matched / total if total else None


def _has_box(detected: Any, box: Any) -> bool:
    """Return whether detections hold one that overlaps with `box` and has its class."""
    same = detected[detected[:, 0] == box[0]]
    width = np.minimum(same[:, 4], box[4]) - np.maximum(same[:, 2], box[2])
    height = np.minimum(same[:, 5], box[5]) - np.maximum(same[:, 3], box[3])
    shared = width.clip(0) * height.clip(0)
    areas = (same[:, 4] - same[:, 2]) * (same[:, 5] - same[:, 3])
    own = (box[4] - box[2]) * (box[5] - box[3])
    return bool((shared >= _OVERLAP * (areas + own - shared)).any())


#: By measure: the answers in a network's first output.
_ANSWERS: Dict[str, Any] = {
    "classes": lambda output: output.argmax(-1),
    "pixels": lambda output: output.argmax(1),
    "joints": lambda output: output.reshape(*output.shape[:2], -1).argmax(-1),
}
