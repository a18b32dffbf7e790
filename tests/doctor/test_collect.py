"""Looking at the machine: GPUs, quotas, threads, and the process that imports MXNet."""

import json
import os
import sys
import time

import mxnet as mx
import pytest

import mxamp as amp
from helpers import ROOT
from mxamp.framework import machine
from mxamp.framework.compat import BROKEN
from mxamp.tools.doctor import collect as module
from mxamp.tools.doctor import probe as inner
from mxamp.tools.doctor.collect import (
    collect,
    cpu_quota,
    failure_reason,
    probe,
    query_gpus,
)
from mxamp.tools.doctor.facts import Gpu

OLD_DRIVER = """case $1 in *compute_cap*) echo 'Field "compute_cap" is not a valid field'; exit 2;; esac
echo Tesla K80, 410.104"""
T4 = "Tesla T4, 470.57.02, 7.5\\nNVIDIA A10G, 470.57.02, 8.6"


@pytest.mark.parametrize(
    "script, gpus, error",
    [
        (f"printf '{T4}\\n'",
         (Gpu("Tesla T4", "7.5", "470.57.02"), Gpu("NVIDIA A10G", "8.6", "470.57.02")), ""),
        (OLD_DRIVER, (Gpu("Tesla K80", None, "410.104"),), ""),
        ("echo 'Graphics Device, 535.1, [N/A]'", (Gpu("Graphics Device", None, "535.1"),), ""),
        ("echo No devices were found; exit 6", (), ""),
        ("exit 0", (), ""),
        (None, (), ""),
        ("", (), "can't be run"),
        ("exec sleep 5", (), "timed out"),
        ("echo it could not communicate >&2; exit 9", (), "failed with status 9: it could not"),
    ],
)  # fmt: skip
def test_nvidia_smi(tmp_path, monkeypatch, script, gpus, error):
    monkeypatch.setattr(module, "_GPU_SECONDS", 0.3 if error == "timed out" else 10)
    monkeypatch.setenv("PATH", str(tmp_path) if script is None else f"{tmp_path}:{os.defpath}")
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n" if script else "no program\0")
        tool.chmod(0o755)
    found, why = query_gpus()
    assert found == gpus
    assert error in why and bool(error) == bool(why)
    assert str(tmp_path) not in why


@pytest.mark.parametrize(
    "files, quota",
    [
        ({}, None), ({"cpu.max": "max 100000"}, None), ({"cpu.max": "150000 100000\n"}, 1.5), ({"cpu.max": "what"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
    ],
)  # fmt: skip
def test_the_quota_of_a_container(tmp_path, files, quota):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


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
        (-4, "", "the process died of SIGILL"),
        (-77, "", "the process died of signal 77"),
        (3, "", "it ended with status 3"),
        (3, "out of luck", "out of luck"),
    ],
)  # fmt: skip
def test_why_a_process_ended(status, errors, text):
    assert failure_reason(status, errors) == text


def test_products_are_timed(capsys, monkeypatch):
    monkeypatch.setattr(inner, "_SECONDS", 0)
    monkeypatch.setattr(inner, "_SIZES", {"cpu": (8, 16, 16)})
    monkeypatch.setattr(sys, "argv", ["-c"])
    inner.main()
    build, first, last = (json.loads(line[12:]) for line in capsys.readouterr().out.splitlines())
    assert build == {"mxnet": {"version": mx.__version__, "onednn": True, "gpus": 0}}
    assert [one[:2] for one in first["speed"]] == [["cpu", "float32"]]
    low = not amp.Policy.default("bfloat16").rule("FullyConnected").missing
    assert [one[1] for one in last["speed"]] == ["float32", "bfloat16"][: 1 + low]
    assert all(gflops > 0 for *_, gflops in last["speed"])


@pytest.mark.parametrize(
    "code, limit, error",
    [
        ("import os; os.kill(os.getpid(), 11)", 30, "SIGSEGV"),
        ("""print('mxamp-probe {"speed": []}', flush=True); import time; time.sleep(60)""", 1, "longer than 1 s"),
        ("raise OSError('libcudart.so.11.0: cannot open shared object file')", 30, "libcudart"),
    ],
)  # fmt: skip
def test_a_probe_that_dies_or_hangs(monkeypatch, code, limit, error):
    monkeypatch.setattr(module, "_PROBE", code)
    start = time.perf_counter()
    found = probe(measure=True, limit=limit)
    assert time.perf_counter() - start < 20
    assert error in found.pop("error")
    assert found == ({"speed": []} if limit == 1 else {})


def test_facts_without_a_process(monkeypatch):
    """Where MXNet is dead, everything else is known."""
    monkeypatch.setattr(module, "_PROBE", "raise SystemExit('gone')")
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("MXNET_HOME_OF_MINE", "/home/ann/models")
    facts = collect()
    assert (facts.mxnet, facts.mxnet_error, facts.speed) == (None, "gone", ())
    assert facts.cpu.processors >= facts.cpu.physical >= 1
    assert facts.variables["MXNET_HOME_OF_MINE"] == "models"
    assert str(ROOT) not in repr(facts)
