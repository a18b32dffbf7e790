"""Installations that are made up, for tests of `mxamp doctor`."""

from dataclasses import replace

from mxamp.tools.doctor.facts import Build, Cpu, Facts, Gpu, Speed, Wheel

CPU = Cpu(
    name="AMD EPYC 9R45", instructions=("avx2", "avx512", "avx512_bf16"),
    usable=("avx512", "avx512_bf16"), processors=8, physical=4, quota=None, threads=4, virtual=False,
)  # fmt: skip
BUILD = Build("1.9.1", {"MKLDNN": True}, gpus=0, policies_error="", on=None, patched=())
HEALTHY = Facts(
    mxamp="1.0.0", python="3.11.7", numpy="1.23.5", system="Linux", cpu=CPU,
    wheels=(Wheel("mxnet", "1.9.1"),), mxnet=BUILD, fast_dtype="bfloat16",
)  # fmt: skip
T4, H100 = Gpu("Tesla T4", "7.5", "470.57.02"), Gpu("NVIDIA H100 PCIe", "9.0", "535.104.05")
CU112 = (Wheel("mxnet-cu112", "1.9.1"),)
SEES_ONE = replace(BUILD, gpus=1)


def cpu(**changes):
    return {"cpu": replace(CPU, **changes)}


def speeds(device, low, ratio):
    return {"speed": (Speed(device, "float32", 100.0), Speed(device, low, 100.0 * ratio))}
