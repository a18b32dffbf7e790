"""The CUDA libraries of mxnet-cu112, loaded from wheels and looked for on the system."""

import configparser
import os
import re
import shutil
import subprocess
import sysconfig

import pytest

from helpers import ROOT, run_python
from mxamp.backends.cuda import libraries as cuda
from mxamp.framework.compat import MXNET

COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]
with_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C compiler")
pytestmark = pytest.mark.slow  # programs that import MXNet

STUB = """
#include <stdio.h>
__attribute__((constructor)) static void loaded(void) {{ puts("{name}"); }}
int cuDriverGetVersion(int *version) {{ *version = {driver}; return 0; }}
int nvrtcVersion(int *major, int *minor) {{ *major = 11; *minor = 8; return 0; }}
"""
DRIVER = "libcuda.so.1"


@pytest.fixture
def imported(tmp_path):
    """Return a function that imports mxamp beside a wheel of MXNet and stubs of CUDA's libraries."""

    def run(*libraries, driver=11080, wheel=cuda.WHEEL, **variables):
        for name in libraries:
            folder = tmp_path if name == DRIVER else tmp_path / "nvidia" / name[3:7] / "lib"
            folder.mkdir(parents=True, exist_ok=True)
            (tmp_path / "stub.c").write_text(STUB.format(name=name, driver=driver))
            options = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name]
            subprocess.run([COMPILER, tmp_path / "stub.c", *options], check=True)
        metadata = tmp_path / f"{wheel.replace('-', '_')}-1.9.1.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Name: {wheel}\n")
        path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "LD_LIBRARY_PATH": str(tmp_path)}
        code = f"import os, mxamp; print('fusion', os.environ.get({cuda.FUSION!r}))"
        return run_python(code, env={**path, **variables})

    return run


def loaded(done):
    """Return the stubs that a process has loaded, in order."""
    return [line for line in done.stdout.splitlines() if line.startswith("lib")]


@with_compiler
def test_cuda_libraries_are_loaded_in_order(imported):
    done = imported(DRIVER, *reversed(cuda.CUDA_LIBRARIES))
    assert loaded(done) == [DRIVER, *cuda.CUDA_LIBRARIES], done.stderr
    assert "fusion None" in done.stdout


@with_compiler
@pytest.mark.parametrize("chosen", [None, "1"])
def test_fusion_is_off_where_the_driver_is_older_than_the_compiler(imported, chosen):
    variables = {cuda.FUSION: chosen} if chosen else {}
    done = imported(DRIVER, "libnvrtc.so.11.2", driver=11040, **variables)
    assert f"fusion {chosen or '0'}" in done.stdout
    assert done.stderr.count("driver is for CUDA 11.4") == (chosen is None)


@with_compiler
def test_a_missing_wheel_is_left_to_the_system(imported):
    assert loaded(imported(DRIVER)) == [DRIVER]


def test_no_driver_is_explained(imported):
    assert "InstallError" in (said := imported().stderr) and "pip install mxnet==1.9.1" in said


@with_compiler
def test_nothing_is_loaded_for_the_cpu_build(imported):
    assert loaded(imported(DRIVER, *cuda.CUDA_LIBRARIES, wheel="mxnet-of-nobody")) == []


def test_the_extra_installs_the_wheel_and_its_libraries():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = config["options.extras_require"]["cu112"].split("\n")
    assert f"{cuda.WHEEL}=={MXNET}" in wanted
    wheels = [line for line in wanted if line.startswith("nvidia")]
    assert all(re.fullmatch(r"nvidia-[\w-]+-cu11==[\d.]+", wheel) for wheel in wheels)
    # cublas and cublasLt come in one
    assert len(wheels) == len(cuda.CUDA_LIBRARIES) - 1
