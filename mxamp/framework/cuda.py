"""MXNet's CUDA wheels: what each needs, and CUDA's libraries loaded before MXNet looks for them."""

import ctypes
import importlib.util
import struct
from importlib import metadata
from pathlib import Path
from typing import BinaryIO, List, Mapping, NamedTuple, Optional, Tuple

from ..errors import InstallError
from .versions import NEWEST

__all__ = [
    "CUDA_LIBRARIES",
    "CUDA_WHEELS",
    "NEWEST_WHEEL",
    "CudaWheel",
    "missing_libraries",
    "needed_libraries",
    "preload",
]


class CudaWheel(NamedTuple):
    """What one of MXNet's CUDA builds needs."""

    driver: str  #: the oldest on Linux
    majors: Tuple[int, ...]  #: code runs on its compute capability's later minors, no other majors


#: By the part of their names; MXNet 1.9.1, config/distribution/linux_cu*.cmake; drivers by CUDA's
#: release notes.
CUDA_WHEELS: Mapping[str, CudaWheel] = {
    "cu101": CudaWheel("418.39", (3, 5, 6, 7)),
    "cu102": CudaWheel("440.33", (3, 5, 6, 7)),
    "cu110": CudaWheel("450.36.06", (5, 6, 7, 8)),
    "cu112": CudaWheel("450.80.02", (5, 6, 7, 8)),
}
NEWEST_WHEEL = "cu112"

#: What the nvidia-*-cu11 wheels hold. In this order each resolves the next one's symbols.
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
#: What the names of CUDA's libraries begin with, the driver's among them.
_CUDA_NAMES = ("libcu", "libnv", "libnccl")
#: Those that CUDA's own libraries need.
_INDIRECT = {
    "libcublas.so.11": "libcublasLt.so.11", "libcusolver.so.11": "libcusparse.so.11",
}  # fmt: skip

_DRIVER = "libcuda.so.1"
_DYNAMIC, _NEEDED = 6, 1  # as ELF numbers them
NO_DRIVER = (
    "mxnet-{cuda} is installed, but the NVIDIA driver's libcuda.so.1 can't be loaded here. Install "
    "the driver ({driver} or later), or on a machine without an NVIDIA GPU install the CPU build: "
    f"pip uninstall mxnet-{{cuda}} && pip install mxnet=={NEWEST}"
)


def preload() -> None:
    """Load CUDA 11 from the nvidia-*-cu11 wheels, so that mxnet-cu112 needs no CUDA on the system.

    Raises `InstallError` where one of MXNet's CUDA wheels is installed without the driver that all
    of them need.
    """
    cuda = _installed()
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


def _installed() -> Optional[str]:
    """Return which of MXNet's CUDA wheels is installed, such as "cu112"; None for the CPU build."""
    for cuda in reversed(list(CUDA_WHEELS)):
        try:
            metadata.distribution(f"mxnet-{cuda}")
        except metadata.PackageNotFoundError:
            continue
        return cuda
    return None


def missing_libraries() -> List[str]:
    """Return which of CUDA's libraries the installed MXNet needs and nothing here has."""
    spec = importlib.util.find_spec("mxnet")
    library = Path(spec.origin).with_name("libmxnet.so") if spec and spec.origin else None
    if library is None or not library.is_file():
        return []
    needed = [name for name in needed_libraries(library) if name.startswith(_CUDA_NAMES)]
    needed += [_INDIRECT[name] for name in needed if name in _INDIRECT]
    folders = _wheel_folders()
    return [
        name
        for name in needed
        if not any((folder / name).exists() for folder in folders) and not _loads(name)
    ]


def needed_libraries(library: Path) -> List[str]:
    """Return the names of the libraries that a library (ELF, 64 bits) is linked with."""
    with library.open("rb") as file:
        header = file.read(64)
        if header[:5] != b"\x7fELF\x02":
            return []
        (at,), (size, count) = (
            struct.unpack_from("<Q", header, 40),
            struct.unpack_from("<HH", header, 58),
        )
        file.seek(at)
        table = file.read(size * count)
        # Of each section: its type, where it begins, its length, and the section of its names.
        sections = [struct.unpack_from("<4xI16xQQI", table, i * size) for i in range(count)]
        dynamic = next((one for one in sections if one[0] == _DYNAMIC), None)
        if dynamic is None:
            return []
        entries, names = (_section(file, one) for one in (dynamic, sections[dynamic[3]]))
    offsets = [value for tag, value in struct.iter_unpack("<qQ", entries) if tag == _NEEDED]
    return [names[start : names.index(b"\0", start)].decode() for start in offsets]


def _section(file: BinaryIO, section: Tuple[int, int, int, int]) -> bytes:
    _, start, length, _ = section
    file.seek(start)
    return file.read(length)


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
