"""`mxamp doctor`: its findings on installations that are made up, and where nothing else works."""

import json
import os
import sys

import pytest

import mxamp as amp
from helpers import ROOT, WITHOUT_MXNET, python, run_mxamp
from mxamp.backends.onednn import cpu
from mxamp.framework import machine
from mxamp.framework.compat import BROKEN
from mxamp.tools import doctor as module
from mxamp.tools.doctor import AUTOMATIC, NOTE, PROBLEM, examine, failure_reason

T4, UNKNOWN = (("Tesla T4", "525.60.13", capability) for capability in ("7.5", "[N/A]"))
H100 = ("NVIDIA H100 PCIe", "535.104.05", "9.0")
CPU_BUILD, CUDA_BUILD = {"mxnet": "1.9.1"}, {"mxnet-cu112": "1.9.1"}
BF16 = {"avx512", "avx512_bf16"}


@pytest.fixture
def install(monkeypatch, on_machine):
    """Return a function that makes up an installation: a healthy one, but for what is given."""

    def make_up(
        device="cpu", error="", wheels=CPU_BUILD, gpus=(), gpu_error="", cpu=BF16,
        processors=8, quota=8, threads=4, hook=False, **variables,
    ):  # fmt: skip
        for name in filter(module._VARIABLES.fullmatch, [*os.environ]):
            monkeypatch.delenv(name)
        on_machine(features=cpu, processors=processors, threads_per_core=2, threads=threads)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        found = {
            "import_mxnet": ("" if error else device, error),
            "installed_wheels": wheels,
            "query_gpus": (list(gpus), gpu_error),
            "processors": quota,
        }
        for name, value in found.items():
            monkeypatch.setattr(module, name, lambda value=value: value)
        monkeypatch.delitem(sys.modules, "mxamp_startup", raising=False)
        if hook:
            monkeypatch.setitem(sys.modules, "mxamp_startup", module)

    return make_up


ON_T4 = {"wheels": CUDA_BUILD, "gpus": [T4], "device": "gpu"}


@pytest.mark.parametrize("changes", [
    {}, ON_T4, {AUTOMATIC: "1", "hook": True}, {AUTOMATIC: "off"},
    {"CUDA_VISIBLE_DEVICES": "", "wheels": CUDA_BUILD, "gpus": [T4]},
    {"OMP_NUM_THREADS": "4", "processors": 16}, {"DNNL_DEFAULT_FPMATH_MODE": "STRICT"},
    {"MXNET_ENGINE_TYPE": "ThreadedEngine"}, {"MXNET_MKLDNN_ENABLED": "1"},
    {**ON_T4, "gpus": [UNKNOWN]},
])  # fmt: skip
def test_nothing_is_found_where_nothing_is_wrong(install, changes):
    install(**changes)
    assert examine()[1] == []


@pytest.mark.parametrize("changes, level, what, advice", [
    ({"error": "MXNet is not installed"}, PROBLEM, "MXNet can't be imported: MXNet is not installed", "pip install mxnet==1.9.1"),
    ({"error": "libcudnn.so.8: cannot open shared object file"}, PROBLEM, "libcudnn", 'pip install ".[cu112]" in a clone'),
    ({"error": "Invalid Parameter format for X expect int"}, PROBLEM, "X", "unset it"),
    ({"error": "it took longer than 60 s"}, PROBLEM, "60 s", "nvidia-smi"),
    ({**ON_T4, "wheels": {**CPU_BUILD, **CUDA_BUILD}}, PROBLEM, "mxnet and mxnet-cu112", "uninstall"),
    ({**ON_T4, "gpus": [H100]}, PROBLEM, "no code for NVIDIA H100 PCIe", "CPU"),
    ({"gpus": [H100]}, NOTE, "9.0", "CPU"),
    ({"gpus": [T4, T4]}, PROBLEM, "Tesla T4 is not used", "pip uninstall mxnet && pip install"),
    ({"wheels": CUDA_BUILD, "gpu_error": "nvidia-smi failed"}, PROBLEM, "failed", "driver"),
    ({"wheels": CUDA_BUILD, "gpu_error": "nvidia-smi failed", "device": "gpu"}, NOTE, "failed", "newer"),
    ({"gpu_error": "nvidia-smi failed"}, NOTE, "failed", "driver"),
    ({**ON_T4, "device": "cpu"}, PROBLEM, "Tesla T4, driver 525.60.13, and MXNet no GPU", "450.80.02"),
    ({"wheels": CUDA_BUILD}, NOTE, "mxnet-cu112 is installed, and MXNet sees no GPU", "450.80.02"),
    ({AUTOMATIC: "auto"}, PROBLEM, "start-up hook", "mxamp run"),
    ({"threads": 16}, PROBLEM, "16 threads", "OMP_NUM_THREADS=4"),
    ({"quota": 2.0}, PROBLEM, "4 threads, slower than on 2 here", "OMP_NUM_THREADS=2"),
    ({"processors": 16}, NOTE, "4 threads, slower than on 8 here", "OMP_NUM_THREADS=8"),
    ({"DNNL_MAX_CPU_ISA": "AVX2"}, PROBLEM, "keeps oneDNN from instructions", "unset DNNL_MAX_CPU_ISA"),
    ({"DNNL_DEFAULT_FPMATH_MODE": "BF16"}, PROBLEM, "less exact", "unset"),
    ({"MXNET_MKLDNN_ENABLED": "False"}, PROBLEM, "bfloat16 fails", "unset"),
])  # fmt: skip
def test_each_finding(install, changes, level, what, advice):
    install(**({"quota": 16} if changes.get("processors") else {}), **changes)
    (found,) = examine()[1]
    assert found.level == level and what in found.what and advice in found.advice


# ---------------------------------------------------------------------- looking at the machine


@pytest.mark.parametrize("script, gpus, error", [
    ("printf 'Tesla T4, 525.60.13, 7.5\\nNVIDIA H100 PCIe, 535.104.05, 9.0\\n'", [T4, H100], ""),
    ("echo 'Field \"compute_cap\" is not a valid field'; exit 2", [], "not a valid field"),
    ("echo No devices were found; exit 6", [], ""),
    (None, [], ""),
    ("exec sleep 5", [], "took longer"),
    ("echo it could not communicate >&2; exit 9", [], "nvidia-smi failed: it could not"),
])  # fmt: skip
def test_nvidia_smi(tmp_path, monkeypatch, script, gpus, error):
    monkeypatch.setattr(module, "_GPU_SECONDS", 0.3 if "longer" in error else 10)
    monkeypatch.setenv("PATH", str(tmp_path) if script is None else f"{tmp_path}:{os.defpath}")
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    found, why = module.query_gpus()
    assert found == gpus
    assert error in why and bool(error) == bool(why)


@pytest.mark.parametrize("text, limit", [(None, 8), ("max 100000", 8), ("150000 100000\n", 1.5)])
def test_the_quota_of_a_container(tmp_path, monkeypatch, on_machine, text, limit):
    monkeypatch.setattr(module, "_QUOTA", tmp_path / "cpu.max")
    on_machine(processors=8)
    if text:
        (tmp_path / "cpu.max").write_text(text)
    assert module.processors() == limit


@pytest.mark.parametrize("processor, threads", [("x86_64", [4, 1]), ("aarch64", [8, 1])])
def test_threads_of_a_kernel(monkeypatch, on_machine, processor, threads):
    def found(processors, **variables):
        on_machine(processors=processors)
        for name in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"):
            monkeypatch.setenv(name, variables.get(name, ""))
        return machine.threads()

    monkeypatch.setattr("platform.machine", lambda: processor)
    assert [found(processors) for processors in (8, 1)] == threads
    assert found(8, OMP_NUM_THREADS="2", MXNET_OMP_MAX_THREADS="3") == 2
    assert found(8, MXNET_OMP_MAX_THREADS="3") == 3
    assert found(8, OMP_NUM_THREADS="4,2") == threads[0]


@pytest.mark.parametrize("status, errors, text", [
    (1, "Traceback ...\nmxamp.errors.InstallError: MXNet is not installed. Do it.", "MXNet is not installed. Do it"),
    (1, "mxamp.errors.InstallError: " + BROKEN.format(error="No module named 'requests'"), "No module named 'requests'"),
    (-6, "terminate called after throwing\n  what():  Invalid Parameter format for X\n", "Invalid Parameter format for X"),
    (1, "OSError: /home/ann/lib/libmxnet.so: cannot open shared object file", "libmxnet.so: cannot open shared object file"),
    (-4, "", "SIGILL"),
    (3, "", "it ended with status 3"),
])  # fmt: skip
def test_why_a_process_ended(status, errors, text):
    assert failure_reason(status, errors) == text


@pytest.mark.parametrize("code, error", [
    ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
    ("import time; time.sleep(60)", "longer than 1 s"),
    ("print('mxamp cpu'); raise SystemExit(3)", "status 3"),
])  # fmt: skip
def test_where_mxnet_is_dead_everything_else_is_known(monkeypatch, code, error):
    monkeypatch.setattr(module, "_IMPORT", code)
    monkeypatch.setattr(module, "_IMPORT_SECONDS", 1 if "sleep" in code else 30)
    monkeypatch.setenv("MXNET_HOME_OF_MINE", "/home/ann/models")
    facts, found = examine()
    assert error in found[0].what and "mxnet 1.9.1" in facts["MXNet"]
    assert facts["MXNET_HOME_OF_MINE"] == "models"
    assert not {str(ROOT), "ann"} & {*repr((facts, found)).split("/")}


# ---------------------------------------------------------------------- the command


def run_command(**env):
    """Return the exit status and the report of the command, which imports no MXNet itself."""
    done = python("-m", "mxamp", "doctor", "--json", **env)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_the_report_of_this_machine_has_its_versions():
    status, data = run_command()
    assert data["facts"]["mxamp"] == amp.__version__ and "mxnet 1.9.1" in data["facts"]["MXNet"]
    assert status == any(one["level"] == PROBLEM for one in data["findings"])
    assert all(set(one) == {"level", "what", "advice"} for one in data["findings"])


@pytest.mark.parametrize("changes, status, words", [
    ({}, 0, "with avx512, avx512_bf16 processors 8; MXNet computes on 4 threads fastest dtype bfloat16 No problem found."),
    ({"cpu": (), "threads": 1}, 0, "1. note: MXNet's kernels run on 1 thread, slower than on 4 here"),
    ({"threads": 16}, 1, "1. problem: MXNet's kernels run on 16 threads"),
    ({"cpu": ("avx512",)}, 0, f"fastest dtype float32: this CPU ({machine.cpu_name()}) computes no bfloat16 in hardware; 'auto' is float32 with faster equivalents"),
    ({"cpu": ("avx512", "avx512_bf16", "amx_bf16")}, 0, f"is fast in bfloat16 if {cpu.FOR_AMX}"),
    ({"wheels": {}, "error": "no"}, 1, "no wheel is installed"),
    (ON_T4, 0, "Tesla T4, 525.60.13, 7.5 fastest dtype float16"),
    ({"MXNET_A_VERY_LONG_NAME_OF_A_VARIABLE": "x" * 90}, 0, "MXNET_A_VERY_LONG_NAME_OF_A_VARIABLE x"),
])  # fmt: skip
def test_the_exit_status_counts_problems_alone(install, changes, status, words):
    install(**changes)
    output = run_mxamp("doctor", status=status).output
    assert words in " ".join(output.split())
    assert max(map(len, output.splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("variable, value, what, advice", [
    ("OMP_NUM_THREADS", "4,2", "Invalid Parameter format for OMP_NUM_THREADS", "set that environment variable"),
    ("PYTHONPATH", None, "MXNet is not installed", "pip"),
])  # fmt: skip
def test_where_the_import_fails_or_kills_the_process(tmp_path, variable, value, what, advice):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MXNET)
    status, data = run_command(**{variable: value or str(tmp_path)})
    found = data["findings"][0]
    assert status == 1 and f"MXNet can't be imported: {what}" in found["what"]
    assert advice in found["advice"]
