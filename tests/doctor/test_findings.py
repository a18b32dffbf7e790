"""Each diagnosis, from facts that are made up."""

from dataclasses import replace

import pytest

from installations import BUILD, CU112, H100, HEALTHY, ON_T4, T4, cpu, speeds
from mxamp.framework.compat import WRONG_MXNET
from mxamp.tools.doctor.facts import Gpu, lacks_code_for
from mxamp.tools.doctor.findings import AUTOMATIC, findings, verdict


def broken(why):
    return {"mxnet": None, "mxnet_error": why}


def variable(name, value, **changes):
    return {"variables": {name: value}, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {}, ON_T4, speeds("cpu", "bfloat16", 2.0), variable(AUTOMATIC, "1", start_up_hook=True),
        variable(AUTOMATIC, "off"), variable("CUDA_VISIBLE_DEVICES", "", wheels=CU112, gpus=(T4,)),
        variable("OMP_NUM_THREADS", "4", **cpu(physical=8)), variable("DNNL_MAX_CPU_ISA", "AVX512_CORE"),
        variable("DNNL_MAX_CPU_ISA", ""), variable("DNNL_DEFAULT_FPMATH_MODE", "STRICT"),
        variable("MXNET_ENGINE_TYPE", "ThreadedEngine"), variable("MXNET_MKLDNN_ENABLED", "1"),
        variable("MXNET_USE_FUSION", "0"), variable("MXNET_CPU_TEMP_COPY", "1"),
    ],
)  # fmt: skip
def test_nothing_is_found_where_nothing_is_wrong(changes):
    assert findings(replace(HEALTHY, **changes)) == ()


@pytest.mark.parametrize(
    "changes, name, what, advice",
    [
        (broken("MXNet is not installed."), "mxnet_import", "not installed", "mxamp[cpu]"),
        ({**broken("MXNet is not installed."), "python": "3.13.0"}, "mxnet_import", "not installed", "--no-deps mxnet==1.9.1"),
        (broken("libcudnn.so.8: cannot open shared object file"), "mxnet_import", "libcudnn", "mxamp[cu112]"),
        (broken("the driver's libcuda.so.1 can't be loaded"), "mxnet_import", "libcuda", "driver"),
        (broken("Invalid Parameter format for X expect int"), "mxnet_import", "X", "unset it"),
        (broken("the process died of SIGILL"), "mxnet_import", "SIGILL", "from source"),
        (broken("it took longer than 60 s"), "mxnet_import", "60 s", "nvidia-smi"),
        (broken("no idea"), "mxnet_import", "no idea", "new virtual environment"),
        (broken(WRONG_MXNET.format("1.8.0")), "mxnet_import", "MXNet 1.8.0 is installed", "uninstall that MXNet"),
        ({"python": "3.7.9"}, "python_version", "3.7.9", "3.11"),
        ({**ON_T4, "wheels": {"mxnet": "1.9.1", **CU112}}, "two_wheels", "mxnet and mxnet-cu112", "uninstall"),
        ({**ON_T4, "gpus": (H100,)}, "gpu_without_code", "NVIDIA H100 PCIe", "CPU"),
        ({**ON_T4, "gpus": (Gpu("Tesla K80", "3.7", "470.1"),)}, "gpu_without_code", "3.7", "CPU"),
        ({**ON_T4, "wheels": {"mxnet-cu102": "1.9.1"}, "gpus": (Gpu("A100", "8.0", "535.1"),)}, "cuda_version", "mxnet-cu102", "mxamp[cu112]"),
        ({**ON_T4, "gpus": (replace(T4, driver="440.33.01"),)}, "gpu_driver", "440.33.01", "450.80.02"),
        ({"gpus": (T4,)}, "gpu_not_used", "Tesla T4", "pip uninstall mxnet && pip install"),
        ({"wheels": CU112, "gpu_error": "nvidia-smi failed"}, "nvidia_smi", "failed", "driver"),
        ({**ON_T4, "missing_libraries": ("libcudnn.so.8",)}, "cuda_libraries", "libcudnn.so.8", "cu112"),
        ({**ON_T4, "gpus": (T4, T4)}, "gpu_not_seen", "2 GPUs, and MXNet 1", "container"),
        (variable(AUTOMATIC, "auto"), "automatic", "start-up hook", "mxamp run"),
        ({"mxnet": replace(BUILD, onednn=False)}, "no_onednn", "without oneDNN", "wheel"),
        (cpu(threads=16), "too_many_threads", "16 threads", "OMP_NUM_THREADS=4"),
        (cpu(quota=2.0), "too_many_threads", "use 2 processors", "OMP_NUM_THREADS=2"),
        (cpu(usable=(), virtual=True), "limited_instructions", "avx512, avx512_bf16", "DNNL_MAX_CPU_ISA"),
        ({"speed_error": "Unsupported type 12"}, "measuring", "Unsupported", "too slow, or fail"),
        (variable("MXNET_ENGINE_TYPE", "NaiveEngine"), "variable", "one by one", "unset"),
        (variable("DNNL_MAX_CPU_ISA", "avx2"), "variable", "capitals", "unset"),
        (variable("DNNL_DEFAULT_FPMATH_MODE", "BF16"), "variable", "less exact", "unset"),
        (variable("MXNET_MKLDNN_ENABLED", "False"), "variable", "bfloat16 fails", "unset"),
        (variable("MXNET_CPU_TEMP_COPY", "0"), "variable", "the process ends", "unset"),
        (variable("MXNET_CUDA_ALLOW_TENSOR_CORE", "0", **ON_T4), "variable", "no tensor cores", "unset"),
    ],
)  # fmt: skip
def test_problems(changes, name, what, advice):
    (found,) = findings(replace(HEALTHY, **changes))
    assert (found.name, found.level) == (name, "problem")
    assert what in found.what
    assert advice in found.advice


@pytest.mark.parametrize(
    "changes, name, what",
    [
        ({"numpy": "1.26.4"}, "numpy_restored", "np.asarray"),
        ({"python": "3.12.1"}, "numpy_restored", "Python 3.12.1"),
        ({"gpus": (H100,)}, "gpu_without_code", "9.0"),
        ({"gpu_error": "nvidia-smi failed"}, "nvidia_smi", "failed"),
        ({"wheels": CU112}, "no_gpu", "no GPU"),
        (cpu(physical=8), "few_threads", "4 of 8 cores"),
        (cpu(instructions=("avx512",), usable=("avx512",), virtual=True), "no_bfloat16", "may hide"),
        (cpu(instructions=(), usable=()), "no_bfloat16", "products run in float32"),
    ],
)  # fmt: skip
def test_notes_are_no_problems(changes, name, what):
    (found,) = findings(replace(HEALTHY, **changes))
    assert (found.name, found.level) == (name, "note")
    assert what in found.what and found.advice


def test_problems_come_first():
    found = findings(replace(HEALTHY, numpy="1.26.4", **broken("no idea")))
    assert [finding.level for finding in found] == ["problem", "note"]


def test_without_mxnet_nothing_else_is_said_of_it():
    changes = {
        "numpy": "2.1.3",
        "wheels": {},
        **cpu(physical=8),
        **broken("MXNet is not installed."),
    }
    assert [one.name for one in findings(replace(HEALTHY, **changes))] == ["mxnet_import"]


@pytest.mark.parametrize(
    "changes, gains, words",
    [
        ({}, True, "bfloat16 on the CPU"),
        (speeds("cpu", "bfloat16", 3.5), True, "3.5 times"),
        (speeds("cpu", "bfloat16", 0.9), False, "0.9 times"),
        (cpu(usable=("avx512",)), False, "float32"),
        (ON_T4, True, "float16 on the GPU"),
        ({**ON_T4, "gpus": (replace(T4, capability="6.1"),)}, False, "float16 on the GPU"),
        ({**ON_T4, **speeds("gpu", "float16", 3.5)}, True, "3.5 times"),
        (broken("no idea"), False, "can't be imported"),
    ],
)
def test_the_verdict_says_whether_mixed_precision_is_fast(changes, gains, words):
    said = verdict(replace(HEALTHY, **changes))
    assert said.startswith("This machine gains") == gains
    assert words in said


@pytest.mark.parametrize(
    "capability, lacks",
    [("5.2", False), ("8.9", False), ("9.0", True), ("3.7", True), ("12.0", True), (None, False)],
)
def test_the_wheel_has_code_for_some_gpus(capability, lacks):
    assert lacks_code_for(Gpu("some", capability, "535.1")) is lacks
