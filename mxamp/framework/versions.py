"""The MXNet versions that mxamp runs on, and the features that older ones lack."""

import re
from typing import Iterator, Mapping, NamedTuple, Tuple

__all__ = [
    "FEATURES",
    "NEWEST",
    "SUPPORTED",
    "Feature",
    "has_feature",
    "is_supported",
    "lacking",
    "missing",
    "release",
    "why_not",
]

#: As on PyPI, oldest first.
SUPPORTED = ("1.7.0.post2", "1.8.0.post0", "1.9.0", "1.9.1")
NEWEST = SUPPORTED[-1]


class Feature(NamedTuple):
    """A feature that came with a version of MXNet."""

    since: str
    without: str  #: the limit of older versions, for messages; empty if mxamp works around it
    operators: Tuple[str, ...] = ()  #: new operators, canonical names
    one_dtype: Tuple[str, ...] = ()  #: operators that need inputs of one dtype in older versions
    bfloat16: Tuple[str, ...] = ()  #: operators without bfloat16 kernels in older versions


#: Every feature by its name, as `has_feature` and `why_not` take it.
FEATURES: Mapping[str, Feature] = {
    "mixed_broadcast_like": Feature("1.8.0", "", one_dtype=("broadcast_like",)),
    "skipped_updates": Feature("1.8.0", ""),  # trainers ask whether gradients overflowed
    "norm_relu": Feature(
        "1.8.0", "no operator for BatchNorm with relu",
        ("_contrib_BatchNormWithReLU", "_backward_contrib_BatchNormWithReLU"),
    ),
    "float16_on_cpus": Feature(
        "1.9.0", "no float16 casts on CPUs: float16 runs on GPUs only"
    ),
    "bfloat16_deconvolution": Feature(
        "1.9.0", "no bfloat16 for transposed convolutions: they compute in float32",
        bfloat16=("Deconvolution",),
    ),
    "deconvolution_3d": Feature(
        "1.9.0", "no 3-D transposed convolutions on CPUs: it refuses to make them"
    ),
    "fused_attention": Feature(
        "1.9.0", "no fused operators for self-attention: graphs that hold them do not load",
        ("_sg_mkldnn_selfatt_qk", "_sg_mkldnn_selfatt_valatt"),
    ),
    "quantized_rnn": Feature(
        "1.9.1", "no int8 recurrent layers: graphs that hold them do not load",
        ("_contrib_quantize_asym", "_contrib_quantized_rnn"),
    ),
}  # fmt: skip


def release(version: str) -> Tuple[int, ...]:
    """Return the first one to three numbers of a version string.

    >>> release("1.7.0.post2"), release("2.0.0b1"), release("1.9")
    ((1, 7, 0), (2, 0, 0), (1, 9))
    """
    found = re.match(r"\d+(\.\d+){0,2}", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def is_supported(version: str) -> bool:
    """Return whether mxamp runs on a version of MXNet.

    >>> is_supported("1.7.0"), is_supported("1.6.0"), is_supported("2.0.0b1")
    (True, False, False)
    """
    return release(SUPPORTED[0]) <= release(version) <= release(NEWEST)


def lacking(version: str) -> Iterator[Tuple[str, Feature]]:
    """Yield the name and `Feature` of each of `FEATURES` that came after MXNet `version`.

    >>> [name for name, _ in lacking("1.9.0")]
    ['quantized_rnn']
    """
    given = release(version)
    for name, feature in FEATURES.items():
        if given < release(feature.since):
            yield name, feature


def missing() -> Mapping[str, Feature]:
    """Return those of `FEATURES` that the loaded MXNet lacks."""
    return dict(lacking(_loaded_version()))


def has_feature(name: str) -> bool:
    """Return whether the loaded MXNet has one of `FEATURES`."""
    return name not in missing()


def why_not(name: str) -> str:
    """Return the sentence for messages that the loaded MXNet lacks a feature of `FEATURES`."""
    feature = FEATURES[name]
    return (
        f"MXNet {_loaded_version()} has {feature.without} (MXNet {feature.since} and later have it)"
    )


def _loaded_version() -> str:
    """Return the version of the imported MXNet."""
    import mxnet as mx  # not above: compat reads versions before MXNet is imported

    return str(mx.__version__)
