"""The requirements of mxnet-cu112, and the CUDA libraries that are preloaded for it."""

import ctypes
import importlib.util
from importlib import metadata
from pathlib import Path
from typing import List

from ..errors import InstallError

WHEEL = "mxnet-cu112"
#: The oldest driver on Linux that runs the wheel, from CUDA's release notes.
DRIVER = "450.80.02"
#: The major compute capabilities that the wheel has machine code for, from MXNet 1.9.1's
#: config/distribution/linux_cu112.cmake.
MAJORS = (5, 6, 7, 8)

#: The libraries in the nvidia-*-cu11 wheels, in an order in which each finds its symbols.
CUDA_LIBRARIES = (
    "libcudart.so.11.0", "libnvrtc.so.11.2", "libnvToolsExt.so.1", "libcublasLt.so.11",
    "libcublas.so.11", "libcusparse.so.11", "libcusolver.so.11", "libcufft.so.10",
    "libcurand.so.10", "libcudnn.so.8", "libnccl.so.2",
)  # fmt: skip

NO_DRIVER = (
    f"{WHEEL} is installed, but the NVIDIA driver's libcuda.so.1 can't be loaded here. Install the "
    f"driver ({DRIVER} or later), or on a machine without an NVIDIA GPU install the CPU build: "
    f"pip uninstall {WHEEL} && pip install mxnet==1.9.1"
)


def preload() -> None:
    """Load CUDA 11 from the nvidia-*-cu11 wheels, so that mxnet-cu112 needs no CUDA on the system.

    Raises `InstallError` if mxnet-cu112 is installed without the NVIDIA driver.
    """
    if not _has_wheel():
        return
    if not _is_loaded("libcuda.so.1"):
        raise InstallError(NO_DRIVER)
    for name in CUDA_LIBRARIES:
        for folder in _wheel_folders():
            if (folder / name).exists():
                ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
                break


def _has_wheel() -> bool:
    return any(metadata.distributions(name=WHEEL))


def _is_loaded(name: str) -> bool:
    """Load a library of the system for all later ones; return whether that succeeded."""
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        return True
    except OSError:
        return False


def _wheel_folders() -> List[Path]:
    """Return the folders of the nvidia-* wheels' libraries: site-packages/nvidia/*/lib."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    return sorted(lib for place in places or () for lib in Path(place).glob("*/lib"))
