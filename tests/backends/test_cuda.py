"""The CUDA libraries of mxnet-cu112, loaded from wheels and looked for on the system."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest

from helpers import ROOT
from mxamp.backends.cuda import libraries as cuda
from mxamp.errors import InstallError
from mxamp.framework.compat import MXNET

COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]
with_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C compiler")


@pytest.fixture
def gpu_build(monkeypatch, tmp_path):
    """mxnet-cu112 as far as Python can tell, with the nvidia wheels made of stub libraries."""

    def stub(folder, name):
        folder.mkdir(parents=True, exist_ok=True)
        command = [COMPILER, "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(folder / name)]
        subprocess.run(command, check=True)

    monkeypatch.setattr(cuda, "_has_wheel", lambda: True)
    monkeypatch.setattr(cuda, "driver_version", lambda: (11, 8))
    monkeypatch.setattr(cuda, "compiler_version", lambda: (11, 8))
    loaded = []
    real = cuda.ctypes.CDLL

    def load(name, mode=0):
        loaded.append((Path(name).name, mode))
        if name == "libcuda.so.1":
            if not has_driver:
                raise OSError("libcuda.so.1: cannot open shared object file")
            return None
        return real(name, mode=mode)

    has_driver = True
    monkeypatch.setattr(cuda.ctypes, "CDLL", load)

    def without_driver():
        nonlocal has_driver
        has_driver = False

    return types.SimpleNamespace(
        folder=tmp_path / "nvidia", stub=stub, loaded=loaded, without_driver=without_driver
    )


@with_compiler
def test_cuda_libraries_are_loaded_in_order(gpu_build, monkeypatch):
    for i, name in enumerate(cuda.CUDA_LIBRARIES):
        gpu_build.stub(gpu_build.folder / f"part{9 - i % 5}" / "lib", name)
    monkeypatch.setattr(cuda, "_wheel_folders", lambda: sorted(gpu_build.folder.glob("*/lib")))
    cuda.preload()
    assert [name for name, _ in gpu_build.loaded] == ["libcuda.so.1", *cuda.CUDA_LIBRARIES]
    assert {mode for _, mode in gpu_build.loaded} == {cuda.ctypes.RTLD_GLOBAL}


@pytest.mark.parametrize("chosen", [None, "1"])
def test_fusion_is_off_where_the_driver_is_older_than_the_compiler(
    gpu_build, monkeypatch, caplog, chosen
):
    monkeypatch.setattr(cuda, "_wheel_folders", list)
    monkeypatch.setattr(cuda, "driver_version", lambda: (11, 4))
    monkeypatch.setenv("MXNET_USE_FUSION", chosen or "")
    if chosen is None:
        monkeypatch.delenv("MXNET_USE_FUSION")
    cuda.preload()
    assert os.environ["MXNET_USE_FUSION"] == (chosen or "0")
    assert caplog.text.count("driver is for CUDA 11.4") == (chosen is None)


def test_a_missing_wheel_is_left_to_the_system(gpu_build, monkeypatch):
    monkeypatch.setattr(cuda, "_wheel_folders", list)
    cuda.preload()
    assert [name for name, _ in gpu_build.loaded] == ["libcuda.so.1"]


def test_no_driver_is_explained(gpu_build):
    gpu_build.without_driver()
    with pytest.raises(InstallError, match="pip install mxnet==1.9.1"):
        cuda.preload()


def test_nothing_is_loaded_for_the_cpu_build(monkeypatch):
    monkeypatch.setattr(cuda.metadata, "distributions", lambda name: iter(()))
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda *a, **k: pytest.fail("loaded"))
    cuda.preload()


def test_the_extra_installs_the_wheel_and_its_libraries():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = config["options.extras_require"]["cu112"].split("\n")
    assert f"{cuda.WHEEL}=={MXNET}" in wanted
    wheels = [line for line in wanted if line.startswith("nvidia")]
    assert all(re.fullmatch(r"nvidia-[\w-]+-cu11==[\d.]+", wheel) for wheel in wheels)
    # cublas and cublasLt come in one
    assert len(wheels) == len(cuda.CUDA_LIBRARIES) - 1


# ---------------------------------------------------------------------- stand-ins

STUBS = ROOT / "scripts" / "cuda_stubs"


def stubs(*arguments, path=""):
    return subprocess.run(
        [sys.executable, str(STUBS), *arguments], capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(path)},
    )  # fmt: skip


@with_compiler
@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_stand_ins_answer_that_there_is_no_device(tmp_path):
    source = """
        int cudaGetDeviceCount(int *); int cudaDriverGetVersion(int *); int ncclCommCount(void);
        const char *cudaGetErrorString(int);
        int count(void) { int n; return cudaGetDeviceCount(&n); }
        int version(void) { int n = 1; int status = cudaDriverGetVersion(&n); return n + status; }
        int nccl(void) { return ncclCommCount(); }
        const char *error(void) { return cudaGetErrorString(100); }
    """
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").touch()
    (tmp_path / "mxnet.c").write_text(source)
    for name in ("libcudart.so.11.0", "libnccl.so.2"):
        command = [COMPILER, "-shared", "-fPIC", "-x", "c", "/dev/null", f"-Wl,-soname,{name}"]
        subprocess.run([*command, "-o", str(real / name)], check=True)
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", str(tmp_path / "mxnet.c"), "-o", str(tmp_path / "mxnet" / "libmxnet.so"),
         "-Wl,--no-as-needed", f"-L{real}", "-l:libcudart.so.11.0", "-l:libnccl.so.2"], check=True,
    )  # fmt: skip
    done = stubs(str(tmp_path / "stubs"), path=tmp_path)
    assert done.stdout.strip() == str(tmp_path / "stubs"), done.stderr
    assert sorted(path.name for path in (tmp_path / "stubs").iterdir()) == [
        "libcudart.so.11.0",
        "libnccl.so.2",
    ]
    code = (
        f"import ctypes; it = ctypes.CDLL({str(tmp_path / 'mxnet' / 'libmxnet.so')!r}); "
        "it.error.restype = ctypes.c_char_p; "
        "print(it.count(), it.version(), it.nccl(), it.error().decode())"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"LD_LIBRARY_PATH": str(tmp_path / "stubs")},
    )  # fmt: skip
    assert asked.stdout == "100 0 100 no CUDA device: a stand-in library\n"
