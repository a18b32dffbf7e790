"""Looking at the machine: GPUs, quotas, threads, and the process that imports MXNet."""

import json
import os

import mxnet as mx
import pytest

import mxamp as amp
from helpers import ROOT
from mxamp.framework import machine
from mxamp.framework.compat import BROKEN
from mxamp.tools.doctor import collect as module
from mxamp.tools.doctor import probe as inner
from mxamp.tools.doctor.collect import Gpu, collect, cpu_quota, failure_reason, probe, query_gpus

OLD_DRIVER = """case $1 in *compute_cap*) echo 'Field "compute_cap" is not a valid field'; exit 2;; esac
echo Tesla K80, 410.104"""
T4 = "Tesla T4, 470.57.02, 7.5\\nNVIDIA A10G, 470.57.02, 8.6"


@pytest.mark.parametrize(
    "script, gpus, error",
    [
        (f"printf '{T4}\\n'", (Gpu("Tesla T4", "470.57.02", "7.5"), Gpu("NVIDIA A10G", "470.57.02", "8.6")), ""),
        (OLD_DRIVER, (Gpu("Tesla K80", "410.104"),), ""),
        ("echo No devices were found; exit 6", (), ""),
        (None, (), ""),
        ("exec sleep 5", (), "took longer"),
        ("echo it could not communicate >&2; exit 9", (), "nvidia-smi failed: it could not"),
    ],
)  # fmt: skip
def test_nvidia_smi(tmp_path, monkeypatch, script, gpus, error):
    monkeypatch.setattr(module, "_GPU_SECONDS", 0.3 if "longer" in error else 10)
    monkeypatch.setenv("PATH", str(tmp_path) if script is None else f"{tmp_path}:{os.defpath}")
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    found, why = query_gpus()
    assert found == gpus
    assert error in why and bool(error) == bool(why)


@pytest.mark.parametrize("text, quota", [("max 100000", float("inf")), ("150000 100000\n", 1.5)])
def test_the_quota_of_a_container(tmp_path, monkeypatch, text, quota):
    monkeypatch.setattr(module, "_QUOTA", tmp_path / "cpu.max")
    assert cpu_quota() == float("inf")
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota() == quota


@pytest.mark.parametrize("processor, threads", [("x86_64", [4, 1]), ("aarch64", [8, 1])])
def test_threads_of_a_kernel(monkeypatch, processor, threads):
    def found(processors, **variables):
        monkeypatch.setattr(machine, "processors", lambda: processors)
        for name in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"):
            monkeypatch.setenv(name, variables.get(name, ""))
        return machine.threads()

    monkeypatch.setattr("platform.machine", lambda: processor)
    assert [found(processors) for processors in (8, 1)] == threads
    assert found(8, OMP_NUM_THREADS="2", MXNET_OMP_MAX_THREADS="3") == 2
    assert found(8, MXNET_OMP_MAX_THREADS="3") == 3
    assert found(8, OMP_NUM_THREADS="4,2") == threads[0]


@pytest.mark.parametrize(
    "status, errors, text",
    [
        (1, "Traceback ...\nmxamp.errors.InstallError: MXNet is not installed. Do it.", "MXNet is not installed. Do it"),
        (1, "mxamp.errors.InstallError: " + BROKEN.format(error="No module named 'requests'"), "No module named 'requests'"),
        (-6, "terminate called after throwing\n  what():  Invalid Parameter format for X\n", "Invalid Parameter format for X"),
        (1, "OSError: /home/ann/lib/libmxnet.so: cannot open shared object file", "libmxnet.so: cannot open shared object file"),
        (-4, "", "SIGILL"),
        (3, "", "it ended with status 3"),
    ],
)  # fmt: skip
def test_why_a_process_ended(status, errors, text):
    assert failure_reason(status, errors) == text


def test_products_are_timed(capsys, monkeypatch):
    monkeypatch.setattr(inner, "_SECONDS", 0)
    monkeypatch.setattr(inner, "_SIZES", {"cpu": (8, 16, 16)})
    inner.main()
    build, *speeds = (json.loads(line[12:]) for line in capsys.readouterr().out.splitlines())
    assert build == {"mxnet": mx.__version__, "mxnet_gpus": 0}
    missing = amp.Policy.default("bfloat16").rule("FullyConnected").missing
    assert all(one["speedup"] > 0 for one in speeds) and bool(speeds) == (not missing)


@pytest.mark.parametrize(
    "code, error",
    [
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("""print('mxamp-probe {"speedup": 0}', flush=True); import time; time.sleep(60)""", "longer than 1 s"),
        ("raise OSError('libcudart.so.11.0: cannot open shared object file')", "libcudart"),
    ],
)  # fmt: skip
def test_a_probe_that_dies_or_hangs(monkeypatch, code, error):
    monkeypatch.setattr(module, "_PROBE", code)
    monkeypatch.setattr(module, "_PROBE_SECONDS", 1 if "sleep" in code else 30)
    found = probe()
    assert error in found.pop("mxnet_error")
    assert found == ({"speedup": 0} if "sleep" in code else {})


def test_where_mxnet_is_dead_everything_else_is_known(monkeypatch):
    monkeypatch.setattr(module, "_PROBE", "raise ValueError('gone')")
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("MXNET_HOME_OF_MINE", "/home/ann/models")
    facts = collect()
    assert (facts.mxnet, facts.mxnet_error, facts.speedup) == ("", "gone", 0)
    assert facts.processors > 0 and facts.physical >= 1
    assert facts.variables["MXNET_HOME_OF_MINE"] == "models"
    assert str(ROOT) not in repr(facts)
