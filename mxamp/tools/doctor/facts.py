"""Facts about an installation, as values; this module reads nothing from the machine."""

import re
from dataclasses import dataclass, field
from typing import Mapping, Optional, Tuple

from ...framework.compat import release
from ...framework.cuda import MAJORS

__all__ = ["Build", "Cpu", "Facts", "Gpu", "Speed", "lacks_code_for", "without_folders"]


def without_folders(text: str) -> str:
    """Return `text` with each absolute path cut to its last part: reports are made to be shared.

    >>> without_folders("/home/ann/libmxnet.so: cannot open")
    'libmxnet.so: cannot open'
    """
    return re.sub(r"(?:~|(?<![\w/]))/(?:[^\s/'\":;,]+/)*(?=[^\s/])", "", text)


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it."""

    name: str
    capability: Optional[str]  #: such as "8.6"; None if the driver does not report it
    driver: str


def lacks_code_for(gpu: Gpu) -> bool:
    """Return whether mxnet-cu112 is known to have no code for a GPU."""
    return gpu.capability is not None and release(gpu.capability)[0] not in MAJORS


@dataclass(frozen=True)
class Cpu:
    """The CPU, and the part of it that this process may use."""

    name: str
    instructions: Tuple[str, ...]  #: of avx512, avx512_bf16 and amx_bf16, those that the CPU has
    usable: Tuple[str, ...]  #: of `instructions`, those that oneDNN may use
    processors: int  #: logical processors that this process may run on
    physical: int  #: the cores of these processors
    quota: Optional[float]  #: the container's limit, in processors
    threads: int  #: threads of one of MXNet's kernels
    virtual: bool

    @property
    def computes_bfloat16(self) -> bool:
        """Whether oneDNN may use this CPU's bfloat16 instructions."""
        return bool({"avx512_bf16", "amx_bf16"} & set(self.usable))


@dataclass(frozen=True)
class Build:
    """Version and features of the installed MXNet, read in a process that imports it."""

    version: str
    onednn: bool
    gpus: int


@dataclass(frozen=True)
class Speed:
    """The measured speed of a dense layer on a device in a dtype."""

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
    wheels: Mapping[str, str] = field(default_factory=dict)  #: of MXNet: versions by name
    mxnet: Optional[Build] = None
    mxnet_error: str = ""  #: why MXNet can't be imported
    gpus: Tuple[Gpu, ...] = ()
    gpu_error: str = ""  #: why nvidia-smi failed
    missing_libraries: Tuple[str, ...] = ()  #: CUDA libraries that the wheel needs
    fast_dtype: str = "float32"  #: the dtype of "auto" here
    start_up_hook: bool = False  #: whether Python loaded mxamp's hook when it started
    variables: Mapping[str, str] = field(default_factory=dict)
    speed: Tuple[Speed, ...] = ()
    speed_error: str = ""  #: why measuring failed

    @property
    def cuda_wheel(self) -> Optional[str]:
        """The installed CUDA build of MXNet, such as "mxnet-cu112"; None for the CPU build."""
        return next((name for name in self.wheels if "-cu" in name), None)

    @property
    def device(self) -> str:
        """The default device, "gpu" or "cpu"."""
        return "gpu" if self.mxnet and self.mxnet.gpus else "cpu"

    @property
    def speedup(self) -> float:
        """How many times as fast as float32 the default device's low dtype is; 0 if unknown."""
        gflops = {one.dtype: one.gflops for one in self.speed if one.device == self.device}
        low = [dtype for dtype in gflops if dtype != "float32"]
        return gflops[low[0]] / gflops["float32"] if low else 0.0
