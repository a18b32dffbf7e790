"""What nvidia-smi says, in all the ways it says it."""

import subprocess

import pytest

from mxamp.tools.doctor.collect import query, runs_on
from mxamp.tools.doctor.facts import Gpu, Wheel

OLD_DRIVER = (2, 'Field "compute_cap" is not a valid field to query.\n')


def answers(*answered):
    left = list(answered)

    def run(command):
        assert command[0] == "nvidia-smi"
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return run


@pytest.mark.parametrize(
    "answered, gpus, error",
    [
        ([(0, "Tesla T4, 7.5, 470.57.02\nNVIDIA A10G, 8.6, 470.57.02\n")],
         (Gpu("Tesla T4", "7.5", "470.57.02"), Gpu("NVIDIA A10G", "8.6", "470.57.02")), ""),
        ([OLD_DRIVER, (0, "Tesla K80, 410.104\n")], (Gpu("Tesla K80", None, "410.104"),), ""),
        ([(0, "Graphics Device, [N/A], 535.1\n")], (Gpu("Graphics Device", None, "535.1"),), ""),
        ([(6, "No devices were found\n")], (), ""),
        ([(0, "")], (), ""),
        ([FileNotFoundError()], (), ""),
        ([PermissionError(13, "Permission denied")], (), "can't be run"),
        ([subprocess.TimeoutExpired("nvidia-smi", 10)], (), "no answer in 10 s"),
        ([(9, "NVIDIA-SMI has failed because it couldn't communicate\nwith the NVIDIA driver.")], (),
         "nvidia-smi failed with status 9: NVIDIA-SMI has failed"),
        ([OLD_DRIVER, (9, "other")], (), "compute_cap"),
    ],
)  # fmt: skip
def test_query(answered, gpus, error):
    found, reason = query(answers(*answered))
    assert found == gpus
    assert error in reason
    assert bool(error) == bool(reason)


def test_a_command_that_prints_to_both_streams(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho Tesla T4, 7.5, 470.57.02\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert query() == ((Gpu("Tesla T4", "7.5", "470.57.02"),), "")


@pytest.mark.parametrize(
    "capability, cuda, fits",
    [
        ("5.2", "cu112", True), ("8.9", "cu112", True), ("9.0", "cu112", False), ("3.7", "cu112", False),
        ("12.0", "cu112", False), ("8.0", "cu102", False), ("7.5", "cu101", True), (None, "cu112", None),
        ("7.5", "cu80", None),
    ],
)  # fmt: skip
def test_what_a_wheel_has_code_for(capability, cuda, fits):
    assert runs_on(Gpu("some", capability, "535.1"), cuda) is fits


def test_which_cuda_a_wheel_is_for():
    assert Wheel("mxnet-cu112", "1.9.1").cuda == "cu112"
    assert Wheel("mxnet-cu102mkl", "1.5").cuda == "cu102"
    assert Wheel("mxnet", "1.9.1").cuda is None
