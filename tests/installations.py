"""Installations that are made up, for tests of `mxamp doctor`."""

from dataclasses import replace

from mxamp.tools.doctor.facts import Build, Cpu, Facts, Gpu, Speed

CPU = Cpu(
    name="AMD EPYC 9R45", instructions=("avx512", "avx512_bf16"), usable=("avx512", "avx512_bf16"),
    processors=8, physical=4, quota=None, threads=4, virtual=False,
)  # fmt: skip
BUILD = Build("1.9.1", onednn=True, gpus=0)
HEALTHY = Facts(
    mxamp="1.0.0", python="3.11.7", numpy="1.23.5", system="Linux", cpu=CPU,
    wheels={"mxnet": "1.9.1"}, mxnet=BUILD, fast_dtype="bfloat16",
)  # fmt: skip
T4, H100 = Gpu("Tesla T4", "7.5", "470.57.02"), Gpu("NVIDIA H100 PCIe", "9.0", "535.104.05")
CU112 = {"mxnet-cu112": "1.9.1"}
ON_T4 = {"wheels": CU112, "gpus": (T4,), "mxnet": replace(BUILD, gpus=1)}


def cpu(**changes):
    return {"cpu": replace(CPU, **changes)}


def speeds(device, low, ratio):
    return {"speed": (Speed(device, "float32", 100.0), Speed(device, low, 100.0 * ratio))}
