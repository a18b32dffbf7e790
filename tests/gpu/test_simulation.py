"""The simulated GPUs themselves: what they count, refuse, draw and run out of."""

import json
import os
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("simulated")]

#: Functions of the stand-ins' own; counts are launches, waits, copies, and bytes copied.
PRELUDE = """
import ctypes, json
import mxamp as amp
import mxnet as mx
from mxnet import nd
gpus = ctypes.CDLL("libsimulated_gpu.so")
gpus.simulated_gpu_set_memory.restype = ctypes.c_size_t
gpus.simulated_gpu_set_memory.argtypes = [ctypes.c_int, ctypes.c_size_t]
gpu = mx.gpu(0)
def counted(call):
    mx.nd.waitall()
    gpus.simulated_gpu_reset_counts()
    result = call()
    counts = (ctypes.c_long * 4)()
    gpus.simulated_gpu_counts(counts)
    return list(counts)
"""


def run(code, values=False, **environment):
    """Run code with simulated GPUs in a process of its own, and return what it prints, as JSON.

    Without `values` kernels do nothing and are counted.
    """
    environment = {**os.environ, **environment}
    if not values:
        environment.pop("MXNET_LIBRARY_PATH", None)
    command = [sys.executable, "-W", "ignore", "-c", PRELUDE + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def failing(code, *arguments, **environment):
    """Run code that ends in an MXNetError, and return the error's text."""
    caught = f"try:\n    {code}\n    print(json.dumps(None))\nexcept mx.base.MXNetError as error:\n    print(json.dumps(str(error)))"
    return run(caught, *arguments, **environment)


def test_launches_waits_copies_and_bytes_are_counted():
    code = """
x, y = nd.ones((8, 16), ctx=gpu), nd.ones((8, 16), ctx=gpu)
out = {
    "add": counted(lambda: nd.waitall() or (x + y).wait_to_read()),
    "twice": counted(lambda: ((x + y) * y).wait_to_read()),
    "read": counted(x.asnumpy),
    "write": counted(lambda: nd.array([1.0] * 10, ctx=gpu).wait_to_read()),
    "to the other": counted(lambda: x.as_in_context(mx.gpu(1)).wait_to_read()),
    "nothing": counted(lambda: None),
}
print(json.dumps(out))
"""
    found = run(code)
    assert found["nothing"] == [0, 0, 0, 0]
    assert (found["add"][0], found["twice"][0]) == (1, 2)
    assert found["read"][2:] == found["to the other"][2:] == [1, 8 * 16 * 4]
    assert found["write"][2:] == [1, 40]
    assert all(found[name][1] >= 1 for name in found if name != "nothing")


def test_how_many_gpus_and_of_which_capability():
    code = "print(json.dumps([mx.context.num_gpus(), mx.context.gpu_memory_info(0)]))"
    assert run(code, SIMULATED_GPUS="3", SIMULATED_GPU_MEMORY="512") == [3, [2**29, 2**29]]
    code = "print(json.dumps(mx.context.num_gpus()))"
    for environment, count in (
        ({}, 2), ({"SIMULATED_GPUS": "0"}, 0), ({"SIMULATED_GPU_DRIVER": "10.2"}, 0),
    ):  # fmt: skip
        assert run(code, **environment) == count, environment


def test_memory_runs_out():
    code = "nd.zeros((2**26,), ctx=gpu).wait_to_read()"
    assert failing(code) is None
    assert "out of memory" in failing(code, SIMULATED_GPU_MEMORY="64")


def test_fused_kernels_need_a_driver_for_their_ptx():
    code = """net = mx.gluon.nn.HybridLambda(lambda F, x: F.exp(x) * x + x)
    net.hybridize(static_alloc=True)
    net(nd.ones((4, 4), ctx=gpu)).wait_to_read()"""
    assert failing(code) is None
    old = {"SIMULATED_GPU_DRIVER": "11.2"}
    assert "unsupported toolchain" in failing(code, MXNET_USE_FUSION="1", **old)
    assert failing(code, **old) is None  # mxamp turns fusion off


def test_auto_is_float32_without_tensor_cores():
    code = """
amp.init("auto")
backend = amp.backends.backend_of("gpu")
print(json.dumps([str(amp.current_policy()), backend.fast_dtype(), backend.why_float32()]))
"""
    for capability, on in (("5.2", False), ("6.1", False), ("7.0", True), ("8.6", True)):
        policy, fast, why = run(code, SIMULATED_GPU_CAPABILITY=capability)
        assert ("float16" in policy) == on and (fast == "float16") == on
        assert on or f"compute capability {capability}, has no tensor cores" in why
    code = 'amp.init("float16"); print(json.dumps(amp.current_policy().target_dtype))'
    assert run(code, SIMULATED_GPU_CAPABILITY="6.1") == "float16"


def test_cudas_own_compiler_compiles_fused_kernels():
    code = 'print(json.dumps(sorted({line.split()[-1] for line in open("/proc/self/maps") if "nvrtc" in line})))'
    assert any("nvidia/cuda_nvrtc" in path for path in run(code))


def test_kernels_that_nobody_computes_are_errors_that_name_them():
    code = """module = mx.rtc.CudaModule('extern "C" __global__ void f(float *x) {}')
    kernel = module.get_kernel("f", "float *x")
    kernel.launch([nd.ones((2,), ctx=gpu)], gpu, (1, 1, 1), (1, 1, 1))
    nd.waitall()"""
    assert failing(code) is None
    assert "a kernel compiled at run time is not simulated" in failing(code, True)


def test_memory_that_nothing_wrote_is_not_a_number():
    assert np.isnan(nd.empty((1000003,), ctx=mx.gpu(1)).asnumpy()).all()


def test_row_sparse_gradients():
    found = []
    for ctx in (mx.gpu(0), mx.cpu()):
        weight = nd.array(np.arange(12).reshape(6, 2), ctx=ctx)
        with ctx:
            weight.attach_grad(stype="row_sparse")
        index = nd.array([1, 3, 1], ctx=ctx)
        with mx.autograd.record():
            out = nd.Embedding(index, weight, input_dim=6, output_dim=2, sparse_grad=True)
            (out * out).sum().backward()
        assert weight.grad.stype == "row_sparse"
        updater = mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9))
        for _ in range(2):
            updater(0, weight.grad, weight)
        found.append([weight.grad.tostype("default").asnumpy(), weight.asnumpy()])
    for mine, theirs in zip(*found):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_what_may_be_faster_on_hardware_is_accurate_with_safe_accumulation():
    """The policy of docs/gpus.md that follows float16 in softmax and LayerNorm."""
    code = """
import numpy as np
policy = amp.Policy.default("float16", "gpu").override(fp32=["RNN"], low=["softmax", "LayerNorm"])
x = nd.random.normal(shape=(4, 4096), ctx=gpu) * 3
gamma, beta = nd.ones((4096,), ctx=gpu), nd.zeros((4096,), ctx=gpu)
def run(on):
    x.attach_grad(), gamma.attach_grad()
    with mx.autograd.record(), amp.autocast(policy=policy, enabled=on):
        data = x.astype("float16") if on else x
        found = nd.softmax(data), nd.LayerNorm(data, gamma, beta)
        loss = (found[0] * 100).square().sum() + found[1].sigmoid().sum()
    loss.backward()
    assert not on or {one.dtype for one in found} == {np.float16}
    return [one.asnumpy().astype("float64") for one in (*found, x.grad, gamma.grad)]
print(json.dumps([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(run(True), run(False))]))
"""
    assert max(run(code, values=True, MXNET_SAFE_ACCUMULATION="1")) < 5e-3
    assert max(run(code, values=True, MXNET_SAFE_ACCUMULATION="0")) > 5e-2
