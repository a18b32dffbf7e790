"""Installations that are made up, for tests of `mxamp doctor`."""

from mxamp.tools.doctor.collect import Facts, Gpu

BF16 = ("avx512", "avx512_bf16")
HEALTHY = Facts(
    mxamp="1.0.0", python="3.11.7", numpy="1.23.5", system="Linux", wheels={"mxnet": "1.9.1"},
    cpu="AMD EPYC 9R45", instructions=BF16, usable=BF16, processors=8, physical=4, threads=4,
    start_up_hook=False, variables={}, mxnet="1.9.1",
)  # fmt: skip
T4 = Gpu("Tesla T4", "470.57.02", "7.5")
H100 = Gpu("NVIDIA H100 PCIe", "535.104.05", "9.0")
CU112 = {"mxnet-cu112": "1.9.1"}
ON_T4 = {"wheels": CU112, "gpus": (T4,), "mxnet_gpus": 1}
