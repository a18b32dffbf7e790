"""How far a network's outputs are from those in float32, by what they mean."""

from typing import Any, Dict, List, Optional

import numpy as np

#: Detections that count: their least score, and how many of the best at most.
_SCORE, _MOST = 0.01, 20
#: Boxes that overlap so much are the same.
_OVERLAP = 0.7


def flat(outputs: Any) -> List[Any]:
    """Return nested outputs as a list of float32 arrays of NumPy's."""
    if isinstance(outputs, (list, tuple)):
        return [array for one in outputs for array in flat(one)]
    return [] if outputs is None else [outputs.astype("float32").asnumpy()]


def relative(ours: List[Any], theirs: List[Any]) -> float:
    """Return the largest relative L2 error of an output."""
    errors = []
    for a, b in zip(ours, theirs):
        both = np.isfinite(a) & np.isfinite(b)
        norm = np.linalg.norm(a[both].astype("float64"))
        errors.append(float(np.linalg.norm((b - a)[both].astype("float64")) / max(norm, 1e-30)))
    return max(errors)


def lost(ours: List[Any], theirs: List[Any]) -> int:
    """Return how many elements are finite in the first and not in the second."""
    return sum(int((np.isfinite(a) & ~np.isfinite(b)).sum()) for a, b in zip(ours, theirs))


def agreement(measure: str, ours: List[Any], theirs: List[Any]) -> Optional[float]:
    """Return the share of answers that are the same, or None where an output is no answer."""
    found = _MEASURES[measure](ours, theirs)
    return None if found is None else float(found)


def _classes(ours: List[Any], theirs: List[Any]) -> Any:
    return (ours[0].argmax(-1) == theirs[0].argmax(-1)).mean()


def _pixels(ours: List[Any], theirs: List[Any]) -> Any:
    return (ours[0].argmax(1) == theirs[0].argmax(1)).mean()


def _joints(ours: List[Any], theirs: List[Any]) -> Any:
    a, b = (o[0].reshape(o[0].shape[:2] + (-1,)).argmax(-1) for o in (ours, theirs))
    return (a == b).mean()


def detections(outputs: List[Any]) -> List[Any]:
    """Return for each image rows of (class, score, four corners), those that are found."""
    parts = [a.reshape(len(a), -1, width) for a, width in zip(outputs, (1, 1, 4))]
    rows = np.concatenate(parts, -1)
    return [image[(image[:, 0] >= 0) & (image[:, 1] > _SCORE)] for image in rows]


def _boxes(ours: List[Any], theirs: List[Any]) -> Any:
    matched = total = 0
    for a, b in zip(detections(ours), detections(theirs)):
        best = a[a[:, 1].argsort()[::-1][:_MOST]]
        total += len(best)
        matched += sum(_found(one, b) for one in best)
    return matched / total if total else None


def _found(one: Any, among: Any) -> bool:
    same = among[among[:, 0] == one[0]]
    width = np.minimum(same[:, 4], one[4]) - np.maximum(same[:, 2], one[2])
    height = np.minimum(same[:, 5], one[5]) - np.maximum(same[:, 3], one[3])
    shared = width.clip(0) * height.clip(0)
    areas = (same[:, 4] - same[:, 2]) * (same[:, 5] - same[:, 3])
    own = (one[4] - one[2]) * (one[5] - one[3])
    return bool((shared >= _OVERLAP * (areas + own - shared)).any())


def _values(ours: List[Any], theirs: List[Any]) -> None:
    return None


_MEASURES: Dict[str, Any] = {
    "classes": _classes, "pixels": _pixels, "joints": _joints, "boxes": _boxes, "values": _values,
}  # fmt: skip
