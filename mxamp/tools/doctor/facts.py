"""Facts about an installation, as values. Nothing here imports MXNet, or looks at the machine."""

import re
from dataclasses import dataclass, field
from typing import Mapping, Optional, Tuple

__all__ = [
    "MARK",
    "Build",
    "Cpu",
    "Facts",
    "Gpu",
    "PolicyCounts",
    "Setting",
    "Speed",
    "Wheel",
    "numbers",
    "without_folders",
]

#: What the probe's lines begin with: oneDNN and MXNet print lines of their own.
MARK = "mxamp-probe "


def numbers(version: str) -> Tuple[int, ...]:
    """Return a version's leading numbers, to compare with others.

    >>> numbers("450.80.02"), numbers("1.9.1.post0")
    ((450, 80, 2), (1, 9, 1))
    """
    found = []
    for part in version.split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def without_folders(text: str) -> str:
    """Return a text with paths cut to their last part: facts are made to be shown to others.

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
        """The part of the name that says which CUDA it is for, such as "cu112"; None for CPUs."""
        _, _, suffix = self.name.partition("-cu")
        return f"cu{suffix[:3]}" if suffix[:3].isdigit() else None


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver's nvidia-smi describes it."""

    name: str
    capability: Optional[str]  #: such as "8.6"; None where the driver does not tell
    driver: str


@dataclass(frozen=True)
class Cpu:
    """The CPU, and what of it this process may use."""

    name: str
    instructions: Tuple[str, ...]  #: of those that matter here, what the CPU has
    usable: Tuple[str, ...]  #: which of avx512, avx512_bf16 and amx_bf16 oneDNN may use
    processors: int  #: logical ones that this process may run on
    physical: int  #: cores behind them
    quota: Optional[float]  #: processors' worth of time that a container gets
    threads: int  #: that MXNet's kernels run on
    virtual: bool

    @property
    def computes_bfloat16(self) -> bool:
        """Whether oneDNN may use arithmetic for bfloat16."""
        return bool({"avx512_bf16", "amx_bf16"} & set(self.usable))


@dataclass(frozen=True)
class Setting:
    """An environment variable that is set, and what it does here."""

    value: str
    effect: str
    advice: str = ""  #: what to do about it; empty where it does no harm


@dataclass(frozen=True)
class PolicyCounts:
    """How many operators have each class in one of mxamp's own policies."""

    dtype: str
    device: str
    classes: Mapping[str, int]
    missing: int  #: operators of the class low that have no kernel here


@dataclass(frozen=True)
class Build:
    """MXNet, as a fresh process has imported it."""

    version: str
    features: Mapping[str, bool]
    gpus: int
    policies: Tuple[PolicyCounts, ...]
    policies_error: str  #: why they can't be read
    on: Optional[str]  #: the target dtype, where mixed precision is on after the import
    patched: Tuple[str, ...]  #: functions that are patched after the import


@dataclass(frozen=True)
class Speed:
    """How fast a dense layer's product is on a device in a dtype."""

    device: str
    dtype: str
    gflops: float


@dataclass(frozen=True)
class Facts:
    """All that is known of an installation."""

    mxamp: str
    python: str
    numpy: str
    system: str
    cpu: Cpu
    wheels: Tuple[Wheel, ...] = ()
    mxnet: Optional[Build] = None
    mxnet_error: str = ""  #: why MXNet can't be imported, or died
    gpus: Tuple[Gpu, ...] = ()
    gpu_error: str = ""  #: why nvidia-smi can't tell
    missing_libraries: Tuple[str, ...] = ()  #: CUDA libraries that the wheel needs
    fast_dtype: str = "float32"  #: what "auto" means here
    start_up_hook: bool = False  #: whether Python loaded mxamp's hook when it started
    variables: Mapping[str, Setting] = field(default_factory=dict)
    speed: Tuple[Speed, ...] = ()
    speed_error: str = ""  #: why it is not measured, where it should have been

    @property
    def cuda(self) -> Optional[str]:
        """What CUDA the installed MXNet is for, such as "cu112"; None for the CPU build."""
        return next((wheel.cuda for wheel in self.wheels if wheel.cuda), None)
