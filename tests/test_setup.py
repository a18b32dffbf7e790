"""How scripts/quickstart and scripts/test make and keep .venv, mostly with a Python made of bash."""

import re
import signal

import pytest

from clones import Clone


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


@pytest.mark.parametrize("name", ["quickstart", "test", "docs"])
@pytest.mark.parametrize("python, words", [
    ("no-such-python", "no Python at 'no-such-python'"),
    ("3.7", "is Python 3.7; MXNet 1.9.1 needs 3.8"), ("3.14", "is Python 3.14; MXNet 1.9.1 needs 3.8"),
])  # fmt: skip
def test_failures_are_one_clear_line(name, python, words, clone):
    done = clone.run("--python", clone.python(python) if python[0] == "3" else python, name=name)
    assert done.returncode == 1
    assert words in done.error
    assert len(done.error.strip().splitlines()) == 1
    assert done.said == ""
    assert not (clone.path / ".venv").exists()


@pytest.mark.parametrize("arguments, marks", [
    (["-n0"], "-m not proof and not gpu "), (["-n0", "--all"], "-m not gpu "), (["a.py::test"], ""),
    (["-n0", "--fast"], "-m not slow and not proof and not gpu "),
])  # fmt: skip
def test_long_proofs_run_where_all_or_one_is_asked_for(clone, arguments, marks):
    rest = " ".join(one for one in arguments if one not in ("--fast", "--all"))
    done = clone.run("--python", clone.python(), *arguments)
    assert done.said == f"ran -m pytest -q {marks}{rest}\n"


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_a_pipe_gets_one_line_for_each_step(version, clone):
    done = clone.set_up(version, PIP_DOES="echo Collecting numpy", CDPATH=str(clone.path))
    assert done.returncode == 0, done.error
    assert "\r" not in done.error
    first, *steps, last = done.error.splitlines()
    assert first == f"making .venv with Python {version}, a few seconds"
    assert re.fullmatch(r"\.venv is ready, after \d+ s", last)
    assert all(re.match("installing .*(seconds|minute)", step) for step in steps)
    assert len(clone.installs()) == len(steps)
    assert any("--no-deps mxnet" in call for call in clone.installs()) == (version == "3.13")
    assert all(call.startswith(f"{clone.path}: ") for call in clone.installs())


def test_a_second_time_nothing_is_done(clone):
    clone.set_up()
    count = len(clone.installs())
    for arguments in ([], ["--python", clone.python()]):
        assert clone.run("--setup-only", *arguments).error == ""
    assert clone.run("--fast", name="quickstart").said.startswith("ran ")
    assert len(clone.installs()) == count
    with open(clone.path / "setup.cfg", "a") as file:
        file.write("# changed\n")
    assert clone.run("--setup-only").error.startswith("installing ")


UNREACHABLE = "the package index can't be reached. Check the network, and the proxy"


@pytest.mark.parametrize("said, words", [
    ("WARNING: Retrying: NewConnectionError\nERROR: No matching distribution", UNREACHABLE),
    ("WARNING: ProxyError: Cannot connect to proxy\nERROR: No matching", UNREACHABLE),
    ("ERROR: No matching.", "tools failed: No matching. Put that right and run the same command again."),
    ("Segmentation fault", "Segmentation fault. Put that right"),
])  # fmt: skip
def test_a_failure_says_what_failed_and_what_to_do(said, words, clone):
    done = clone.set_up(PIP_DOES=f"printf '{said}'; exit 1")
    assert done.returncode == 1
    failure = done.error.splitlines()[-1]
    assert failure.startswith("error: installing pip's build tools failed: ")
    assert words in failure
    log = clone.path / ".venv" / "install.log"
    assert failure.endswith(f"All that pip said is in {log}")
    assert log.read_text() == said.replace("\\n", "\n")
    again = clone.set_up()
    assert again.returncode == 0
    assert again.error.startswith("installing ")  # in the same .venv


@pytest.mark.parametrize("victim", ["pip", "pip by Ctrl-C", "all", "venv"])
def test_a_set_up_that_was_killed_is_begun_anew(victim, clone):
    """What pip had half installed it would take for installed."""
    if victim.startswith("pip"):
        by_hand = "trap '' INT; kill -INT 0; exit 1"  # pip ends with a status of its own
        done = clone.set_up(PIP_DOES=by_hand if victim[3:] else "kill -9 $$")
        assert done.error.splitlines()[-1].endswith("interrupted. Run the same command again.")
    else:
        does = {"PIP_DOES" if victim == "all" else "VENV_DOES": "kill -9 0"}  # the group
        done = clone.set_up(**does)
        assert done.returncode == -signal.SIGKILL
    (clone.path / ".venv" / "half").touch()
    done = clone.run("--setup-only", "--python", clone.python())
    assert done.returncode == 0
    assert done.error.startswith("making .venv anew: its set-up was interrupted\n")
    assert not (clone.path / ".venv" / "half").exists()


# ---------------------------------------------------------------------- Horovod
