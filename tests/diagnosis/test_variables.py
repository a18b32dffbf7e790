import pytest

from mxamp.tools.doctor.variables import EMPTY, GPU_ONLY, UNKNOWN, settings


@pytest.mark.parametrize(
    "name, value, effect, harmful",
    [
        ("MXNET_ENGINE_TYPE", "NaiveEngine", "one by one", True),
        ("MXNET_ENGINE_TYPE", "", "no such engine", True),
        ("MXNET_ENGINE_TYPE", "Naive", "no such engine", True),
        ("MXNET_ENGINE_TYPE", "ThreadedEngine", "one pool", False),
        ("DNNL_MAX_CPU_ISA", "avx2", "capitals", True),
        ("DNNL_MAX_CPU_ISA", "AVX512_CORE", "no bfloat16 instructions", False),
        ("DNNL_MAX_CPU_ISA", "", EMPTY, False),
        ("DNNL_DEFAULT_FPMATH_MODE", "BF16", "less exact", True),
        ("DNNL_DEFAULT_FPMATH_MODE", "STRICT", "nothing", False),
        ("MXNET_MKLDNN_ENABLED", "0", "bfloat16 fails", True),
        ("MXNET_MKLDNN_ENABLED", "False", "bfloat16 fails", True),
        ("MXNET_MKLDNN_ENABLED", "off", "0, 1, true or false", True),
        ("OMP_NUM_THREADS", "4", "threads of each", False),
        ("OMP_NUM_THREADS", "4,2", "whole number", True),
        ("MXNET_CPU_TEMP_COPY", "1", "least memory", False),
        ("MXNET_CPU_TEMP_COPY", "0", "the process ends", True),
        ("MXNET_SUBGRAPH_BACKEND", "NONE", "not fused", False),
        ("MXNET_ENABLE_AUTO_MIXED_PRECISION", "off", "stays off", False),
        ("MXNET_ENABLE_AUTO_MIXED_PRECISION", "auto", "where that is fast", False),
        ("MXNET_ENABLE_AUTO_MIXED_PRECISION", "1", "on when MXNet is imported", False),
        ("CUDA_VISIBLE_DEVICES", "", GPU_ONLY, False),
        ("MXNET_USE_FUSION", "on", GPU_ONLY, False),
        ("MXNET_HOME_OF_MINE", "/home/ann/models", UNKNOWN, False),
    ],
)
def test_the_effect_of_a_value(name, value, effect, harmful):
    found = settings({name: value, "HOME": "/home/ann"}, None)
    assert list(found) == [name]
    assert effect in found[name].effect
    assert bool(found[name].advice) == harmful
    assert "ann" not in found[name].value


@pytest.mark.parametrize(
    "name, value, effect, harmful",
    [
        ("CUDA_VISIBLE_DEVICES", "", "no GPU", False),
        ("CUDA_VISIBLE_DEVICES", "0,1", "these GPUs only", False),
        ("MXNET_USE_FUSION", "on", "0, 1, true or false", True),
        ("MXNET_CUDA_ALLOW_TENSOR_CORE", "0", "no tensor cores", True),
    ],
)
def test_variables_for_gpus_count_with_a_gpu_build(name, value, effect, harmful):
    found = settings({name: value}, "cu112")[name]
    assert effect in found.effect
    assert bool(found.advice) == harmful
