"""Each diagnosis, from facts that are made up."""

from dataclasses import replace

import pytest

from installations import CU112, H100, HEALTHY, ON_T4, T4
from mxamp.framework.compat import WRONG_MXNET
from mxamp.tools.doctor.collect import Gpu
from mxamp.tools.doctor.findings import AUTOMATIC, findings, verdict


def broken(why):
    return {"mxnet": "", "mxnet_error": why}


def variable(name, value, **changes):
    return {"variables": {name: value}, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {}, ON_T4, {"speedup": 2.0}, variable(AUTOMATIC, "1", start_up_hook=True),
        variable(AUTOMATIC, "off"), variable("CUDA_VISIBLE_DEVICES", "", wheels=CU112, gpus=(T4,)),
        variable("OMP_NUM_THREADS", "4", physical=8), variable("DNNL_DEFAULT_FPMATH_MODE", "STRICT"),
        variable("MXNET_ENGINE_TYPE", "ThreadedEngine"), variable("MXNET_MKLDNN_ENABLED", "1"),
        {"gpus": (Gpu("Graphics Device", "535.1", "[N/A]"),), "wheels": CU112, "mxnet_gpus": 1},
    ],
)  # fmt: skip
def test_nothing_is_found_where_nothing_is_wrong(changes):
    assert findings(replace(HEALTHY, **changes)) == []


PROBLEM, NOTE = "problem", "note"


@pytest.mark.parametrize(
    "changes, level, what, advice",
    [
        (broken("MXNet is not installed"), PROBLEM, "MXNet can't be imported: MXNet is not installed", "mxamp[cpu]"),
        (broken("libcudnn.so.8: cannot open shared object file"), PROBLEM, "libcudnn", "mxamp[cu112]"),
        (broken("Invalid Parameter format for X expect int"), PROBLEM, "X", "unset it"),
        (broken("it took longer than 60 s"), PROBLEM, "60 s", "nvidia-smi"),
        (broken(WRONG_MXNET.format("1.8.0")), PROBLEM, "MXNet 1.8.0 is installed", "new virtual environment"),
        ({"mxnet_error": "Unsupported type 12"}, PROBLEM, "measuring failed: Unsupported", ""),
        ({**ON_T4, "wheels": {"mxnet": "1.9.1", **CU112}}, PROBLEM, "mxnet and mxnet-cu112", "uninstall"),
        ({**ON_T4, "gpus": (H100,)}, PROBLEM, "no code for NVIDIA H100 PCIe", "CPU"),
        ({"gpus": (H100,)}, NOTE, "9.0", "CPU"),
        ({**ON_T4, "gpus": (replace(T4, driver="440.33.01"),)}, PROBLEM, "440.33.01", "450.80.02"),
        ({"gpus": (T4,)}, PROBLEM, "Tesla T4 is not used", "pip uninstall mxnet && pip install"),
        ({"wheels": CU112, "gpu_error": "nvidia-smi failed"}, PROBLEM, "failed", "driver"),
        ({"gpu_error": "nvidia-smi failed"}, NOTE, "failed", "driver"),
        ({**ON_T4, "gpus": (T4, T4)}, PROBLEM, "2 GPUs, and MXNet 1", "container"),
        (variable(AUTOMATIC, "auto"), PROBLEM, "start-up hook", "mxamp run"),
        ({"threads": 16}, PROBLEM, "16 threads", "OMP_NUM_THREADS=4"),
        ({"processors": 2.0}, PROBLEM, "use 2 processors", "OMP_NUM_THREADS=2"),
        ({"physical": 8}, NOTE, "4 of 8 cores", "OMP_NUM_THREADS=8"),
        ({"usable": ()}, PROBLEM, "avx512, avx512_bf16", "DNNL_MAX_CPU_ISA"),
        ({"instructions": ("avx512",), "usable": ("avx512",)}, NOTE, "no bfloat16 instructions", "float32"),
        (variable("MXNET_ENGINE_TYPE", "NaiveEngine"), PROBLEM, "one by one", "unset"),
        (variable("DNNL_DEFAULT_FPMATH_MODE", "BF16"), PROBLEM, "less exact", "unset"),
        (variable("MXNET_MKLDNN_ENABLED", "False"), PROBLEM, "bfloat16 fails", "unset"),
    ],
)  # fmt: skip
def test_each_finding(changes, level, what, advice):
    (found,) = findings(replace(HEALTHY, **changes))
    assert found.level == level and what in found.what and advice in found.advice


@pytest.mark.parametrize(
    "changes, gains, words",
    [
        ({}, True, "bfloat16 on the CPU"),
        ({"speedup": 3.5}, True, "3.5 times"),
        ({"speedup": 0.9}, False, "0.9 times"),
        ({"usable": ("avx512",)}, False, "float32"),
        (ON_T4, True, "float16 on the GPU"),
        (broken("no idea"), False, "can't be imported"),
    ],
)
def test_the_verdict_says_whether_mixed_precision_is_fast(changes, gains, words):
    said = verdict(replace(HEALTHY, **changes))
    assert said.startswith("This machine gains") == gains
    assert words in said
