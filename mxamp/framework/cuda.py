"""MXNet's CUDA wheels: what each needs, and CUDA's libraries loaded before MXNet looks for them."""

import ctypes
import importlib.util
from importlib import metadata
from pathlib import Path
from typing import List, Mapping, NamedTuple, Optional, Tuple

from ..errors import InstallError
from .versions import NEWEST

__all__ = ["CUDA_WHEELS", "NEWEST_WHEEL", "CudaWheel", "missing_libraries", "preload"]


class CudaWheel(NamedTuple):
    """What one of MXNet's CUDA builds needs."""

    driver: str  #: the oldest on Linux
    majors: Tuple[int, ...]  #: code runs on its compute capability's later minors, no other majors
    libraries: Tuple[str, ...]  #: loaded in this order, each resolves the next one's symbols


_BEGIN = "libcudart.so.{} libnvrtc.so.{} libnvToolsExt.so.1"
_CUDA_10 = f"{_BEGIN} libcublas.so.10 libcusolver.so.10 libcufft.so.10 libcurand.so.10"
_CUDA_11 = f"{_BEGIN} libcublasLt.so.11 libcublas.so.11 libcusparse.so.11 libcusolver.so.{{}}"
_CUDA_11 += " libcufft.so.10 libcurand.so.10"
_OTHERS = " libcudnn.so.{} libnccl.so.2"


def _libraries(names: str, *versions: str) -> Tuple[str, ...]:
    return tuple((names + _OTHERS).format(*versions).split())


#: By the part of their names; MXNet 1.9.1, config/distribution/linux_cu*.cmake; drivers by CUDA's
#: release notes.
CUDA_WHEELS: Mapping[str, CudaWheel] = {
    "cu101": CudaWheel("418.39", (3, 5, 6, 7), _libraries(_CUDA_10, "10.1", "10.1", "7")),
    "cu102": CudaWheel("440.33", (3, 5, 6, 7), _libraries(_CUDA_10, "10.2", "10.2", "7")),
    "cu110": CudaWheel("450.36.06", (5, 6, 7, 8), _libraries(_CUDA_11, "11.0", "11.0", "10", "8")),
    "cu112": CudaWheel("450.80.02", (5, 6, 7, 8), _libraries(_CUDA_11, "11.0", "11.2", "11", "8")),
}
NEWEST_WHEEL = "cu112"

_DRIVER = "libcuda.so.1"
NO_DRIVER = (
    "mxnet-{cuda} is installed, but the NVIDIA driver's libcuda.so.1 can't be loaded here. Install "
    "the driver ({driver} or later), or on a machine without an NVIDIA GPU install the CPU build: "
    f"pip uninstall mxnet-{{cuda}} && pip install mxnet=={NEWEST}"
)


def preload() -> None:
    """Load CUDA from the nvidia-* wheels, so that MXNet's CUDA wheels need none on the system.

    Raises `InstallError` where such a wheel is installed without the driver that all of them need.
    """
    cuda = _installed()
    if cuda is None:
        return
    wheel = CUDA_WHEELS[cuda]
    try:
        ctypes.CDLL(_DRIVER, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise InstallError(NO_DRIVER.format(cuda=cuda, driver=wheel.driver)) from error
    folders = _wheel_folders()
    for name in wheel.libraries:
        for folder in folders:
            if (folder / name).exists():
                ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
                break


def _installed() -> Optional[str]:
    """Return which of MXNet's CUDA wheels is installed, such as "cu112"; None for the CPU build."""
    for cuda in reversed(list(CUDA_WHEELS)):
        try:
            metadata.distribution(f"mxnet-{cuda}")
        except metadata.PackageNotFoundError:
            continue
        return cuda
    return None


def missing_libraries(cuda: str) -> List[str]:
    """Return which of the libraries that a wheel needs are neither in wheels nor on the system."""
    folders = _wheel_folders()
    needed = CUDA_WHEELS[cuda].libraries if cuda in CUDA_WHEELS else ()
    return [
        name
        for name in (_DRIVER, *needed)
        if not any((folder / name).exists() for folder in folders) and not _loads(name)
    ]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _wheel_folders() -> List[Path]:
    """Where the nvidia-* wheels keep their libraries: site-packages/nvidia/*/lib."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except ValueError:
        return []
    places = spec.submodule_search_locations if spec is not None else None
    return sorted(lib for place in places or () for lib in Path(place).glob("*/lib"))
