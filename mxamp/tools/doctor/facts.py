"""Facts about an installation, as values; this module reads nothing from the machine."""

import re
from dataclasses import dataclass, field
from typing import Mapping, Optional, Tuple

__all__ = [
    "MARK",
    "Build",
    "Cpu",
    "Facts",
    "Gpu",
    "Setting",
    "Speed",
    "Wheel",
    "numbers",
    "without_folders",
]

#: The prefix of the probe's lines, among lines that oneDNN and MXNet print.
MARK = "mxamp-probe "


def numbers(version: str) -> Tuple[int, ...]:
    """Return a version's leading numbers, for comparisons.

    >>> numbers("450.80.02"), numbers("1.9.1.post0")
    ((450, 80, 2), (1, 9, 1))
    """
    leading = re.match(r"\d+(\.\d+)*(?![^.])", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def without_folders(text: str) -> str:
    """Return a text with each path cut to its last part, since reports are made to be shared.

    >>> without_folders("/home/ann/libmxnet.so: cannot open")
    'libmxnet.so: cannot open'
    """
    return re.sub(r"(?:~|(?<![\w/]))/(?:[^\s/'\":;,]+/)*(?=[^\s/])", "", text)


@dataclass(frozen=True)
class Wheel:
    """An installed distribution of MXNet."""

    name: str
    version: str

    @property
    def cuda(self) -> Optional[str]:
        """The CUDA version in the wheel's name, such as "cu112"; None for CPU builds."""
        found = re.search(r"-(cu\d{2,3})", self.name)
        return found[1] if found else None


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it."""

    name: str
    capability: Optional[str]  #: such as "8.6"; None if the driver does not report it
    driver: str


@dataclass(frozen=True)
class Cpu:
    """The CPU, and the part of it that this process may use."""

    name: str
    instructions: Tuple[str, ...]  #: of the instructions that kernels use, those of the CPU
    usable: Tuple[str, ...]  #: of avx512, avx512_bf16 and amx_bf16, those that oneDNN may use
    processors: int  #: logical processors that this process may run on
    physical: int  #: their cores
    quota: Optional[float]  #: the container's limit, in processors
    threads: int  #: of MXNet's kernels
    virtual: bool

    @property
    def computes_bfloat16(self) -> bool:
        """Whether oneDNN may use arithmetic for bfloat16."""
        return bool({"avx512_bf16", "amx_bf16"} & set(self.usable))


@dataclass(frozen=True)
class Setting:
    """An environment variable that is set, and its effect here."""

    value: str
    effect: str
    advice: str = ""  #: empty if the value does no harm


@dataclass(frozen=True)
class Build:
    """MXNet as imported by a new process."""

    version: str
    features: Mapping[str, bool]
    gpus: int
    policies_error: str  #: why mxamp's policies can't be made
    on: Optional[str]  #: the target dtype, if mixed precision is on after the import
    patched: Tuple[str, ...]  #: functions that are patched after the import


@dataclass(frozen=True)
class Speed:
    """The speed of a dense layer's product on a device in a dtype."""

    device: str
    dtype: str
    gflops: float


@dataclass(frozen=True)
class Facts:
    """All facts about an installation."""

    mxamp: str
    python: str
    numpy: str
    system: str
    cpu: Cpu
    wheels: Tuple[Wheel, ...] = ()
    mxnet: Optional[Build] = None
    mxnet_error: str = ""  #: why MXNet can't be imported
    gpus: Tuple[Gpu, ...] = ()
    gpu_error: str = ""  #: why nvidia-smi failed
    missing_libraries: Tuple[str, ...] = ()  #: CUDA libraries that the wheel needs
    fast_dtype: str = "float32"  #: the dtype of "auto" here
    start_up_hook: bool = False  #: whether Python loaded mxamp's hook when it started
    variables: Mapping[str, Setting] = field(default_factory=dict)
    speed: Tuple[Speed, ...] = ()
    speed_error: str = ""  #: why measuring failed

    @property
    def cuda(self) -> Optional[str]:
        """The CUDA version of the installed MXNet, such as "cu112"; None for the CPU build."""
        return next((wheel.cuda for wheel in self.wheels if wheel.cuda), None)

    def ratio(self, device: str, dtype: str) -> float:
        """Return a dtype's speed over float32's on a device, 0 if it was not measured."""
        gflops = {speed.dtype: speed.gflops for speed in self.speed if speed.device == device}
        return gflops[dtype] / gflops["float32"] if {dtype, "float32"} <= set(gflops) else 0.0
