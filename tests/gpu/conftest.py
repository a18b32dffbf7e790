"""Fixtures of the tests for GPUs."""

import faulthandler
import json
import os

import mxnet as mx
import pytest

import mxamp as amp
from mxamp.framework.machine import default_device


@pytest.fixture
def devices(request):
    """Two GPUs, or the one there is twice."""
    if request.config.getoption("--gpu-tests-on-cpu"):
        return [mx.cpu(0), mx.cpu(1)]
    if default_device() != "gpu":
        pytest.skip("needs a GPU")
    return [mx.gpu(i % mx.context.num_gpus()) for i in range(2)]


@pytest.fixture
def device(devices):
    with devices[0]:
        yield devices[0]


@pytest.fixture
def policy(device):
    return amp.Policy.default("float16", device.device_type)


@pytest.fixture
def simulated(devices):
    """Skip where GPUs are real, or where there are none."""
    if "libmxnet_values" not in os.environ.get("MXNET_LIBRARY_PATH", ""):
        pytest.skip("needs simulated GPUs: scripts/test --gpu")


@pytest.fixture(params=["fused", "unfused"])
def fusion(request, monkeypatch):
    """MXNet's pointwise fusion on, as it is by default, and off."""
    monkeypatch.setenv("MXNET_USE_FUSION", "1" if request.param == "fused" else "0")


@pytest.fixture(autouse=True)
def limited():
    """End the process of a test that takes longer than scripts/check_gpu gives it."""
    seconds = os.environ.get("MXAMP_TEST_SECONDS")
    if seconds:
        faulthandler.dump_traceback_later(float(seconds), exit=True)
    yield
    if seconds:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report):
    """Write each test's outcome to the file of scripts/check_gpu, as it ends."""
    path = os.environ.get("MXAMP_TEST_LOG")
    ends = report.when not in ("setup", "teardown") or report.outcome != "passed"
    if path and ends and "PYTEST_XDIST_WORKER" not in os.environ:
        row = {"test": report.nodeid, "outcome": report.outcome, "text": str(report.longrepr or "")}
        with open(path, "a") as log:
            log.write(json.dumps(row) + "\n")
