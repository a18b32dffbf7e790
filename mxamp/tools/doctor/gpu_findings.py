"""What is wrong with GPUs, their driver and CUDA's libraries: pure functions of the facts."""

from typing import Callable, Iterator, Tuple

from ...framework.cuda import CUDA_WHEELS, NEWEST_WHEEL
from .facts import Facts, Gpu, numbers
from .finding import Finding, note, problem
from .gpus import runs_on

__all__ = ["GPU_DIAGNOSES"]


def _gpu_wheels(facts: Facts) -> Iterator[Finding]:
    for gpu in sorted(set(facts.gpus), key=str):
        if facts.cuda is None:
            yield from _cpu_wheel(gpu, facts)
        elif runs_on(gpu, facts.cuda) is False:
            yield from _no_code(gpu, facts.cuda)
        if facts.cuda is not None and facts.cuda in CUDA_WHEELS:
            needed = CUDA_WHEELS[facts.cuda].driver
            if numbers(gpu.driver) < numbers(needed):
                what = (
                    f"driver {gpu.driver} is too old for mxnet-{facts.cuda}, which needs {needed}"
                )
                yield problem("gpu_driver", what, f"install driver {needed} or later")


def _cpu_wheel(gpu: Gpu, facts: Facts) -> Iterator[Finding]:
    if runs_on(gpu, NEWEST_WHEEL) is False:
        what = f"{gpu.name}: {_lacks_code(gpu)}"
        yield note("gpu_without_code", what, "compute on the CPU, as the installed MXNet does")
    elif facts.wheels:
        what = f"{gpu.name} is not used: the installed MXNet is a CPU build"
        advice = f'pip uninstall {facts.wheels[0].name} && pip install "mxamp[{NEWEST_WHEEL}]"'
        yield problem("gpu_not_used", what, advice)


def _no_code(gpu: Gpu, cuda: str) -> Iterator[Finding]:
    if runs_on(gpu, NEWEST_WHEEL):
        what = f"mxnet-{cuda} has no code for {gpu.name} (compute capability {gpu.capability})"
        advice = f'pip uninstall mxnet-{cuda} && pip install "mxamp[{NEWEST_WHEEL}]"'
        yield problem("gpu_without_code", what, advice)
        return
    what = f"no kernel starts on {gpu.name}: {_lacks_code(gpu)}"
    advice = "compute on the CPU (ctx=mx.cpu()), use another GPU, or build MXNet from source"
    yield problem("gpu_without_code", what, advice)


def _lacks_code(gpu: Gpu) -> str:
    return (
        f"it has compute capability {gpu.capability}, and MXNet's wheels have code for 5.0 to 8.6 "
        "(8.9 runs the code of 8.6)"
    )


def _gpus_seen(facts: Facts) -> Iterator[Finding]:
    build, cuda = facts.mxnet, facts.cuda
    if facts.gpu_error:
        level = "problem" if cuda else "note"
        advice = "check the NVIDIA driver: nvidia-smi has to work before MXNet can use a GPU"
        yield Finding("nvidia_smi", level, facts.gpu_error, advice)
    if facts.missing_libraries:
        what = "CUDA libraries are missing: " + ", ".join(facts.missing_libraries)
        advice = f'pip install "mxamp[{NEWEST_WHEEL}]"; libcuda.so.1 comes with the driver'
        if cuda != NEWEST_WHEEL:
            advice = f"install the CUDA that mxnet-{cuda} is for, its cuDNN and NCCL, or {advice}"
        yield problem("cuda_libraries", what, advice)
    if cuda is None or build is None or facts.gpu_error:
        return
    if not facts.gpus:
        what = f"mxnet-{cuda} is installed, and nvidia-smi finds no GPU: all computes on the CPU"
        yield note("no_gpu", what, "install mxnet==1.9.1, which is smaller, or look for the driver")
    elif build.gpus < len(facts.gpus) and "CUDA_VISIBLE_DEVICES" not in facts.variables:
        what = f"nvidia-smi finds {len(facts.gpus)} GPUs, and MXNet {build.gpus}"
        yield problem("gpu_not_seen", what, "check the driver, and the container's access to GPUs")


GPU_DIAGNOSES: Tuple[Callable[[Facts], Iterator[Finding]], ...] = (_gpu_wheels, _gpus_seen)
