"""CUDA for mxnet-cu112: preload the libraries, and read driver version and GPU capability."""

import ctypes
import importlib.util
import logging
import os
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import List, Optional, Tuple

from ...errors import InstallError

logger = logging.getLogger("mxamp")

WHEEL = "mxnet-cu112"
#: The oldest driver on Linux that runs the wheel, from CUDA's release notes.
DRIVER = "450.80.02"
#: The oldest one that loads what CUDA 11.8's compiler NVRTC makes of fused operators, for messages:
#: `preload` compares the versions of driver and compiler. CUDA promises older drivers for machine
#: code, but not for PTX.
FUSION_DRIVER = "520.61.05"
#: The environment variable of MXNet's fusion of operators on GPUs.
FUSION = "MXNET_USE_FUSION"
#: The first compute capability with tensor cores. Before it float16 is slower than float32, or, on
#: 6.0, as fast in convolutions.
TENSOR_CORES = (7, 0)
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


SLOW_GPU = (
    "this GPU, of compute capability {}.{}, has no tensor cores: float16 is fast from {}.{} on"
)
NO_FUSION = (
    "the driver is for CUDA %d.%d, and can't load what NVRTC %d.%d compiles: MXNet's fusion of "
    f"operators is off ({FUSION}=0). Driver {FUSION_DRIVER} or later can"
)


def preload() -> None:
    """Load CUDA 11's libraries from the nvidia-*-cu11 wheels, in place of a system-wide CUDA.

    Turns MXNet's fusion of operators off if the driver can't load fused kernels. Raises
    `InstallError` if mxnet-cu112 is installed without the NVIDIA driver.
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
    driver, compiler = driver_version(), compiler_version()
    if driver < compiler and FUSION not in os.environ:
        os.environ[FUSION] = "0"
        logger.warning(NO_FUSION, *driver, *compiler)


def driver_version() -> Tuple[int, int]:
    """Return the newest CUDA version that the NVIDIA driver supports, as (major, minor)."""
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def compiler_version() -> Tuple[int, int]:
    """Return the version of NVRTC, CUDA's runtime compiler; (0, 0) if it can't be loaded."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        ctypes.CDLL("libnvrtc.so.11.2").nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    except OSError:
        return 0, 0
    return major.value, minor.value


@lru_cache(maxsize=None)
def capability() -> Optional[Tuple[int, int]]:
    """Return the compute capability of the first GPU; None without a GPU."""
    if not _is_loaded("libcuda.so.1"):
        return None
    driver, found = ctypes.CDLL("libcuda.so.1"), (ctypes.c_int(), ctypes.c_int())
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and MINOR.
    failed = driver.cuInit(0) or any(
        driver.cuDeviceGetAttribute(ctypes.byref(one), attribute, 0)
        for one, attribute in zip(found, (75, 76))
    )
    return None if failed else (found[0].value, found[1].value)


def fast_dtype() -> str:
    """Return float16 if the GPU has tensor cores or its capability is unknown, else float32."""
    return "float32" if (capability() or TENSOR_CORES) < TENSOR_CORES else "float16"


def why_float32() -> str:
    """Return a text that says why "auto" is float32 on this GPU, for a log line."""
    return SLOW_GPU.format(*capability() or (), *TENSOR_CORES)


def _has_wheel() -> bool:
    return any(metadata.distributions(name=WHEEL))


def _is_loaded(name: str) -> bool:
    """Try to load a shared library with global symbols; return whether it succeeded."""
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        return True
    except OSError:
        return False


def _wheel_folders() -> List[Path]:
    """Return the library folders of the nvidia-* wheels: site-packages/nvidia/*/lib."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    return sorted(lib for place in places or () for lib in Path(place).glob("*/lib"))
