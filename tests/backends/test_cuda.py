"""The CUDA libraries of mxnet-cu112, loaded from wheels and looked for on the system."""

import configparser
import os
import re
import shutil
import subprocess
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
