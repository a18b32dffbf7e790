"""`mxamp launch`: the output of its processes, their exits, and that none is left."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import ROOT

# These workers import no MXNet: the tests are of the launcher.
ALIVE = "print('alive', __import__('os').getpid(), flush=True); __import__('time').sleep(60)"


def launch(*arguments, start=subprocess.run, **options):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    env.update(options.pop("env", {}))
    return start(
        [sys.executable, "-W", "ignore", "-m", "mxamp", "launch", *arguments],
        text=True, env=env, cwd=ROOT, start_new_session=True, **options,
    )  # fmt: skip


def launched(code, *options, **given):
    command = [sys.executable, "-S", "-c", code]
    pipes = {"capture_output": True, "timeout": 60}
    return launch(*options, "--", *command, **pipes, **given)


def processes():
    """The parent of each process that runs."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                found[int(stat.parent.name)] = int(parent)
    return found


def gone(pids, seconds=10):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if not set(pids) & set(processes()):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_lines_have_the_rank_in_front_and_are_whole():
    code = (
        "import os, sys\n"
        "for part in ('first', ' half\\n', '10 %\\r20 %\\n'):\n"
        "    sys.stdout.write(part); sys.stdout.flush()\n"
        "print(os.environ['DMLC_WORKER_ID'], file=sys.stderr)\n"
        "sys.stdout.write('no end')"
    )
    done = launched(code, "-n", "3")
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        own = [line for line in done.stdout.splitlines() if line.startswith(f"[worker {rank}] ")]
        assert [line[11:] for line in own] == ["first half", "20 %", "no end"]
        assert f"[worker {rank}] {rank}" in done.stderr.splitlines()
    assert len(done.stdout.splitlines()) == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending, status, words",
    [
        ("sys.exit(3)", 3, "worker 1 has ended with status 3"),
        ("os.kill(os.getpid(), 9)", 137, "worker 1 was killed by SIGKILL"),
    ],
)
def test_the_first_that_fails_ends_all(ending, status, words):
    code = f"import os, sys, time\nif os.environ['DMLC_WORKER_ID'] == '1': {ending}\ntime.sleep(60)"
    began = time.monotonic()
    done = launched(code)
    assert done.returncode == status
    assert f"{words}: ending the other processes" in done.stderr
    assert time.monotonic() - began < 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_no_process_is_left_when_the_launcher_ends(number, status):
    # With children of the workers' own, which the launcher does not know.
    command = ["sh", "-c", f'{sys.executable} -S -c "{ALIVE}" & wait']
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-S", "-c", code, "-W", "ignore", "-m", "mxamp", "launch", "-n", "2",
         *command],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    pids = [int(re.search(r"alive (\d+)", launcher.stdout.readline())[1]) for _ in range(2)]
    pids += [pid for pid, parent in processes().items() if parent == launcher.pid]
    assert len(pids) == 2 + 5, "two workers and their children, scheduler, server, guard"
    launcher.send_signal(number)
    assert launcher.wait(timeout=30) == status
    assert gone(pids)
    launcher.stdout.close()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["-n", "2", "no-such-program"], "there is no command 'no-such-program'"),
        (["-n", "0", "python"], "0 is not in the range"),
        ([], "Missing argument 'COMMAND...'"),
        (["./broken"], "Exec format error"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, arguments, words):
    program = tmp_path / "broken"
    program.write_bytes(b"\0\0")
    program.chmod(0o755)
    arguments = [str(program) if one == "./broken" else one for one in arguments]
    done = launch(*arguments, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


KEEPS = """
{first}
import mxnet as mx

store, original = mx.kv.create("dist_sync"), mx.kvstore.KVStore.pushpull

def counted(self, *args, **kwargs):
    print("one more for", store)
    return original(self, *args, **kwargs)

mx.kvstore.KVStore.pushpull = counted
store.init(3, mx.nd.ones(2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import mxamp", "import mxamp; mxamp.init('bfloat16')"])
def test_a_script_that_holds_its_kvstore_to_the_end_ends_well(tmp_path, first):
    pytest.importorskip("mxamp_startup", reason="the start-up hook is not installed")
    script = tmp_path / "train.py"
    script.write_text(KEEPS.format(first=first))
    command = [sys.executable, "-W", "ignore", str(script)]
    done = launch("-n", "1", *command, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
