"""MXNet's CUDA wheels: their requirements, and CUDA's libraries preloaded for them."""

import ctypes
import importlib.util
import subprocess
from importlib import metadata
from pathlib import Path
from typing import List, Mapping, NamedTuple, Optional, Tuple

from ..errors import InstallError
from .versions import NEWEST

__all__ = [
    "CUDA_LIBRARIES",
    "CUDA_WHEELS",
    "NEWEST_WHEEL",
    "CudaWheel",
    "missing_libraries",
    "preload",
]


class CudaWheel(NamedTuple):
    """The requirements of one of MXNet's CUDA builds."""

    driver: str  #: the oldest driver on Linux
    majors: Tuple[int, ...]  #: major compute capabilities that the build has machine code for


#: Sources: MXNet 1.9.1's config/distribution/linux_cu*.cmake, and CUDA's release notes for drivers.
CUDA_WHEELS: Mapping[str, CudaWheel] = {
    "cu101": CudaWheel("418.39", (3, 5, 6, 7)),
    "cu102": CudaWheel("440.33", (3, 5, 6, 7)),
    "cu110": CudaWheel("450.36.06", (5, 6, 7, 8)),
    "cu112": CudaWheel("450.80.02", (5, 6, 7, 8)),
}
NEWEST_WHEEL = "cu112"

#: The libraries in the nvidia-*-cu11 wheels, in an order in which each finds its symbols.
CUDA_LIBRARIES = (
    "libcudart.so.11.0",
    "libnvrtc.so.11.2",
    "libnvToolsExt.so.1",
    "libcublasLt.so.11",
    "libcublas.so.11",
    "libcusparse.so.11",
    "libcusolver.so.11",
    "libcufft.so.10",
    "libcurand.so.10",
    "libcudnn.so.8",
    "libnccl.so.2",
)
#: The prefixes of CUDA's libraries, driver included.
_CUDA_NAMES = ("libcu", "libnv", "libnccl")
#: Libraries that CUDA's own libraries need.
_INDIRECT = {
    "libcublas.so.11": "libcublasLt.so.11", "libcusolver.so.11": "libcusparse.so.11",
}  # fmt: skip

_DRIVER = "libcuda.so.1"
NO_DRIVER = (
    "mxnet-{cuda} is installed, but the NVIDIA driver's libcuda.so.1 can't be loaded here. Install "
    "the driver ({driver} or later), or on a machine without an NVIDIA GPU install the CPU build: "
    f"pip uninstall mxnet-{{cuda}} && pip install mxnet=={NEWEST}"
)


def preload() -> None:
    """Load CUDA 11 from the nvidia-*-cu11 wheels, so that mxnet-cu112 needs no CUDA on the system.

    Raises `InstallError` if a CUDA wheel of MXNet is installed without the NVIDIA driver.
    """
    cuda = _installed_wheel()
    if cuda is None:
        return
    try:
        ctypes.CDLL(_DRIVER, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        message = NO_DRIVER.format(cuda=cuda, driver=CUDA_WHEELS[cuda].driver)
        raise InstallError(message) from error
    folders = _wheel_folders()
    for name in CUDA_LIBRARIES if cuda == NEWEST_WHEEL else ():
        for folder in folders:
            if (folder / name).exists():
                ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
                break


def _installed_wheel() -> Optional[str]:
    """Return the installed CUDA wheel of MXNet, such as "cu112"; None for the CPU build."""
    for cuda in reversed(list(CUDA_WHEELS)):
        try:
            metadata.distribution(f"mxnet-{cuda}")
        except metadata.PackageNotFoundError:
            continue
        return cuda
    return None


def missing_libraries() -> List[str]:
    """Return the CUDA libraries that the installed MXNet needs and that are missing."""
    spec = importlib.util.find_spec("mxnet")
    library = Path(spec.origin).with_name("libmxnet.so") if spec and spec.origin else None
    if library is None or not library.is_file():
        return []
    try:
        done = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=False)
    except OSError:  # not Linux
        return []
    lines = done.stdout.splitlines()
    missing = [line.split()[0] for line in lines if line.endswith("not found")]
    missing += [_INDIRECT[name] for name in missing if name in _INDIRECT]
    folders = _wheel_folders()
    return [
        name
        for name in missing
        if name.startswith(_CUDA_NAMES) and not any((folder / name).exists() for folder in folders)
    ]


def _wheel_folders() -> List[Path]:
    """Return the folders of the nvidia-* wheels' libraries: site-packages/nvidia/*/lib."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except ValueError:
        return []
    places = spec.submodule_search_locations if spec is not None else None
    return sorted(lib for place in places or () for lib in Path(place).glob("*/lib"))
