"""Looking at the machine: control groups, threads, and the process that imports MXNet."""

import json
import os
import sys
import time

import mxnet as mx
import pytest

import mxamp as amp
from helpers import ROOT
from mxamp.framework.compat import BROKEN
from mxamp.tools.doctor import collect as module
from mxamp.tools.doctor.collect import collect, cpu_quota, kernel_threads, probe, probed, reason
from mxamp.tools.doctor.facts import MARK, Speed
from mxamp.tools.doctor.probe import main, report


@pytest.mark.parametrize(
    "files, quota",
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "what"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "200000 100000",
          "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 2.0),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
        ({"proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/docker/c\n",
          "sys/fs/cgroup/cpu/docker/c/cpu.cfs_quota_us": "400000\n",
          "sys/fs/cgroup/cpu/docker/c/cpu.cfs_period_us": "100000\n"}, 4.0),
    ],
)  # fmt: skip
def test_the_quota_of_a_container(tmp_path, files, quota):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    "environ, threads",
    [
        ({}, 4),
        ({"OMP_NUM_THREADS": "8"}, 8),
        ({"OMP_NUM_THREADS": "2", "MXNET_OMP_MAX_THREADS": "3"}, 2),
        ({"MXNET_OMP_MAX_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
    ],
)
def test_threads_of_a_kernel(environ, threads):
    assert kernel_threads(environ, 8, x86=True) == threads
    assert kernel_threads({}, 8, x86=False) == 8
    assert kernel_threads({}, 1, x86=True) == 1


@pytest.mark.parametrize(
    "status, errors, text",
    [
        (1, "Traceback ...\nmxamp.errors.InstallError: MXNet is not installed. Do it.", "MXNet is not installed. Do it"),
        (1, "mxamp.errors.InstallError: " + BROKEN.format(error="No module named 'requests'"), "No module named 'requests'"),
        (-6, "terminate called after throwing\n  what():  Invalid Parameter format for X\n", "Invalid Parameter format for X"),
        (1, "OSError: /home/ann/lib/libmxnet.so: cannot open shared object file", "libmxnet.so: cannot open shared object file"),
        (-4, "", "the process died of SIGILL"),
        (-77, "", "the process died of signal 77"),
        (3, "", "it ended with status 3, and printed nothing"),
        (3, "out of luck", "out of luck"),
    ],
)  # fmt: skip
def test_why_a_process_ended(status, errors, text):
    assert reason(status, errors) == text


def test_what_a_probe_printed_counts_as_far_as_it_goes():
    speeds = [["cpu", "float32", 50.0], ["cpu", "float32", 60.0]]
    lines = [MARK + json.dumps({"mxnet": report()}), "dnnl_verbose,info"]
    lines += [MARK + json.dumps({"speed": speed}) for speed in speeds]
    found = probed("\n".join(lines), "it took longer than 60 s")
    assert found.speed == (Speed("cpu", "float32", 60.0),)
    assert found.error == "it took longer than 60 s"
    assert found.mxnet.version == mx.__version__
    assert found.mxnet.on is None
    assert found.mxnet.patched == ()


def test_a_process_in_mixed_precision_is_seen():
    with amp.autocast("bfloat16"):
        found = report()
    assert found["on"] == "bfloat16"
    assert "HybridBlock._call_cached_op" in found["patched"]


def test_products_are_timed(capsys, monkeypatch):
    from mxamp.tools.doctor import probe as inner

    monkeypatch.setattr(inner, "_SECONDS", 0)
    monkeypatch.setattr(inner, "_SIZES", {"cpu": (8, 16, 16)})
    monkeypatch.setattr(sys, "argv", ["-c"])
    main()
    speeds = probed(capsys.readouterr().out, "").speed
    low = not amp.Policy.default("bfloat16").rule("FullyConnected").missing
    assert [speed.dtype for speed in speeds] == ["float32", "bfloat16"][: 1 + low]
    assert all(speed.gflops > 0 for speed in speeds)


@pytest.mark.parametrize(
    "code, limit, error",
    [
        ("import os; os.kill(os.getpid(), 11)", 30, "SIGSEGV"),
        ("import time; time.sleep(60)", 0.2, "longer than 0.2 s"),
        ("raise OSError('libcudart.so.11.0: cannot open shared object file')", 30, "libcudart"),
    ],
)
def test_a_probe_that_dies_or_hangs(monkeypatch, code, limit, error):
    monkeypatch.setattr(module, "_PROBE", code)
    start = time.perf_counter()
    found = probe(measure=True, limit=limit)
    assert time.perf_counter() - start < 20
    assert found.mxnet is None
    assert error in found.error


def test_facts_without_a_process(monkeypatch):
    """Where MXNet is dead, everything else is known."""
    monkeypatch.setattr(module, "_PROBE", "raise SystemExit('gone')")
    monkeypatch.setenv("PATH", os.defpath)
    facts = collect()
    assert facts.mxnet is None
    assert facts.mxnet_error == "gone"
    assert facts.speed == ()
    assert facts.cpu.processors >= facts.cpu.physical >= 1
    assert str(ROOT) not in repr(facts)


@pytest.mark.slow
def test_mixed_precision_from_the_start_is_seen(tmp_path, monkeypatch):
    startup = ROOT / "mxamp" / "startup"
    hook = "import os\nif 'MXNET_ENABLE_AUTO_MIXED_PRECISION' in os.environ:\n    __import__('mxamp_startup').install()"
    (tmp_path / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, startup, ROOT))))
    monkeypatch.setenv("MXNET_ENABLE_AUTO_MIXED_PRECISION", "bfloat16")
    found = probe(measure=False)
    assert found.error == ""
    assert found.mxnet.on == "bfloat16"
    assert found.mxnet.patched
