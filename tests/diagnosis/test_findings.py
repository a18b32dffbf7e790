"""Each diagnosis, from facts that are made up."""

from dataclasses import replace

import pytest

from installations import BUILD, CU112, H100, HEALTHY, SEES_ONE, T4, cpu, speeds
from mxamp.framework.versions import lacking
from mxamp.tools.doctor.facts import Gpu, Setting, Wheel
from mxamp.tools.doctor.findings import findings
from mxamp.tools.doctor.variables import AUTOMATIC


def test_nothing_is_found_where_nothing_is_wrong():
    assert findings(HEALTHY) == ()
    assert findings(replace(HEALTHY, wheels=CU112, gpus=(T4,), mxnet=SEES_ONE)) == ()
    assert findings(replace(HEALTHY, **speeds("cpu", "bfloat16", 2.0))) == ()
    on = {
        "variables": {AUTOMATIC: Setting("1", "")},
        "mxnet": replace(BUILD, on="bfloat16", patched=("dot",)),
    }
    assert findings(replace(HEALTHY, **on)) == ()
    assert findings(replace(HEALTHY, variables={AUTOMATIC: Setting("off", "")})) == ()
    auto = {"variables": {AUTOMATIC: Setting("auto", "")}, "fast_dtype": "float32"}
    assert findings(replace(HEALTHY, **auto)) == ()
    assert findings(replace(HEALTHY, **{**on, "variables": auto["variables"]})) == ()


@pytest.mark.parametrize(
    "changes, name, what, advice",
    [
        ({"mxnet": None, "mxnet_error": "MXNet is not installed."}, "mxnet_import", "not installed", "mxamp[cpu]"),
        ({"mxnet": None, "mxnet_error": "libcudnn.so.8: cannot open shared object file"}, "mxnet_import", "libcudnn", "mxamp[cu112]"),
        ({"mxnet": None, "mxnet_error": "the driver's libcuda.so.1 can't be loaded"}, "mxnet_import", "libcuda", "driver"),
        ({"mxnet": None, "mxnet_error": "Invalid Parameter format for X expect int"}, "mxnet_import", "X", "unset it"),
        ({"mxnet": None, "mxnet_error": "the process died of SIGILL"}, "mxnet_import", "SIGILL", "from source"),
        ({"mxnet": None, "mxnet_error": "it took longer than 60 s"}, "mxnet_import", "60 s", "nvidia-smi"),
        ({"mxnet": None, "mxnet_error": "no idea"}, "mxnet_import", "no idea", "new virtual environment"),
        ({"python": "3.14.0"}, "python_version", "3.14.0", "3.11"),
        ({"python": "3.7.9"}, "python_version", "3.7.9", "3.11"),
        ({"mxnet": None, "mxnet_error": "MXNet 2.0.0b1 is installed, and mxamp runs on 1.7.0.post2, 1.8.0.post0, 1.9.0 and 1.9.1"}, "mxnet_import", "2.0.0b1", "install one of these"),
        ({"mxnet": replace(BUILD, policies_error="unknown operator")}, "policies", "unknown operator", "wheel"),
        ({"wheels": (Wheel("mxnet", "1.9.1"), *CU112), "mxnet": SEES_ONE, "gpus": (T4,)}, "two_wheels", "mxnet and mxnet-cu112", "uninstall"),
        ({"wheels": CU112, "gpus": (H100,), "mxnet": SEES_ONE}, "gpu_without_code", "NVIDIA H100 PCIe", "CPU"),
        ({"wheels": CU112, "gpus": (Gpu("Tesla K80", "3.7", "470.1"),), "mxnet": SEES_ONE}, "gpu_without_code", "3.7", "CPU"),
        ({"wheels": (Wheel("mxnet-cu102", "1.9.1"),), "gpus": (Gpu("NVIDIA A100", "8.0", "535.1"),), "mxnet": SEES_ONE}, "gpu_without_code", "mxnet-cu102", "mxamp[cu112]"),
        ({"wheels": CU112, "gpus": (replace(T4, driver="440.33.01"),), "mxnet": SEES_ONE}, "gpu_driver", "440.33.01", "450.80.02"),
        ({"gpus": (T4,)}, "gpu_not_used", "Tesla T4", "pip uninstall mxnet && pip install"),
        ({"wheels": CU112, "gpu_error": "nvidia-smi failed"}, "nvidia_smi", "failed", "driver"),
        ({"wheels": CU112, "gpus": (T4,), "mxnet": SEES_ONE, "missing_libraries": ("libcudnn.so.8",)}, "cuda_libraries", "libcudnn.so.8", "cu112"),
        ({"wheels": CU112, "gpus": (T4, T4), "mxnet": SEES_ONE}, "gpu_not_seen", "2 GPUs, and MXNet 1", "container"),
        ({"variables": {"MXNET_MKLDNN_ENABLED": Setting("0", "oneDNN is off", "unset it")}}, "variable", "MXNET_MKLDNN_ENABLED=0: oneDNN is off", "unset"),
        ({"variables": {AUTOMATIC: Setting("1", "")}}, "automatic", "start-up hook", "mxamp run"),
        ({"variables": {AUTOMATIC: Setting("auto", "")}}, "automatic", "start-up hook", "mxamp run"),
        ({"variables": {AUTOMATIC: Setting("si", "")}, "start_up_hook": True}, "automatic", "stays off", "float16 or bfloat16"),
        ({"mxnet": replace(BUILD, features={"MKLDNN": False})}, "no_onednn", "without oneDNN", "wheel"),
        (cpu(threads=16), "too_many_threads", "16 threads", "OMP_NUM_THREADS=4"),
        (cpu(quota=2.0), "too_many_threads", "2 processors' time", "OMP_NUM_THREADS=2"),
        (cpu(usable=()), "limited_instructions", "avx512, avx512_bf16", "DNNL_MAX_CPU_ISA"),
        ({"speed_error": "Unsupported type 12", **speeds("cpu", "bfloat16", 2.0)}, "measuring", "Unsupported", "too slow, or fail"),
        ({"speed_error": "no kernel image is available"}, "measuring", "no kernel image", "fail"),
    ],
)  # fmt: skip
def test_problems(changes, name, what, advice):
    found = {finding.name: finding for finding in findings(replace(HEALTHY, **changes))}
    assert found[name].level == "problem"
    assert what in found[name].what
    assert advice in found[name].advice
    problems = [finding.name for finding in found.values() if finding.level == "problem"]
    assert problems == [name]


@pytest.mark.parametrize(
    "changes, name, what",
    [
        ({"mxnet": replace(BUILD, version="1.8.0")}, "mxnet_version", "MXNet 1.8.0 has no float16 casts on CPUs"),
        ({"mxnet": replace(BUILD, version="1.7.0")}, "mxnet_version", "MXNet 1.7.0 has no operator for BatchNorm with relu"),
        ({"mxnet": replace(BUILD, version="1.9.0")}, "mxnet_version", "MXNet 1.9.0 has no int8 recurrent layers"),
        ({"numpy": "1.26.4"}, "numpy_restored", "np.asarray"),
        ({"python": "3.12.1"}, "distutils_restored", "distutils"),
        ({"numpy": "2.4.0"}, "numpy_tostring", "recordio"),
        ({"gpus": (H100,)}, "gpu_without_code", "9.0"),
        ({"gpu_error": "nvidia-smi failed"}, "nvidia_smi", "failed"),
        ({"wheels": CU112}, "no_gpu", "no GPU"),
        (cpu(physical=8), "few_threads", "4 of 8 cores"),
        (cpu(instructions=("avx512",), usable=("avx512",), virtual=True), "no_bfloat16", "a virtual one"),
        ({**cpu(instructions=("avx512",), usable=("avx512",)), **speeds("cpu", "bfloat16", 0.27)}, "no_bfloat16", "0.27 times"),
        (cpu(instructions=("avx2",), usable=()), "no_bfloat16", "float32 on rounded values"),
        (speeds("cpu", "bfloat16", 0.9), "bfloat16_slow", "0.9 times"),
    ],
)  # fmt: skip
def test_notes_are_no_problems(changes, name, what):
    found = findings(replace(HEALTHY, **changes))
    assert {finding.level for finding in found} == {"note"}
    note = next(finding for finding in found if finding.name == name)
    assert what in note.what
    assert note.advice


def test_hidden_instructions_are_not_said_to_be_missing():
    found = findings(replace(HEALTHY, **cpu(usable=("avx512",), virtual=True)))
    assert [finding.name for finding in found] == ["limited_instructions"]


def test_each_lack_of_an_older_mxnet_is_a_note_with_the_version_that_has_it():
    older = {
        "mxnet": replace(BUILD, version="1.7.0"),
        "wheels": (Wheel("mxnet-cu102", "1.7.0.post1"),),
    }
    found = findings(replace(HEALTHY, **older))
    said = [(one.what, one.advice) for one in found if one.name == "mxnet_version"]
    assert len(said) == sum(bool(one.without) for _, one in lacking("1.7.0")) == 6
    whats, advices = zip(*said)
    assert "MXNet 1.9.0 and later have it: pip install mxnet-cu102==1.9.1" in advices
    assert all(what.startswith("MXNet 1.7.0 has no ") for what in whats)


def test_problems_come_first():
    found = findings(replace(HEALTHY, numpy="1.26.4", mxnet=None, mxnet_error="no idea"))
    assert [finding.level for finding in found] == ["problem", "note"]


def test_fewer_visible_gpus_are_as_wished():
    wished = {"CUDA_VISIBLE_DEVICES": Setting("", "MXNet sees no GPU")}
    assert not findings(replace(HEALTHY, wheels=CU112, gpus=(T4,), variables=wished))


def test_threads_that_were_asked_for_are_not_too_few():
    asked = {"OMP_NUM_THREADS": Setting("4", "")}
    assert not findings(replace(HEALTHY, variables=asked, **cpu(physical=8)))
