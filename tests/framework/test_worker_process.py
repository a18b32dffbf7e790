"""What mxamp does in a worker of a parameter server, and in no other process."""

import sys
import time

import pytest
from mxnet.kvstore import KVStore

from helpers import run_forked
from mxamp.framework import worker_process
from mxamp.framework.worker_process import (
    _Worker,
    cancel_wait_timer,
    log_long_wait,
    start_wait_timer,
)

PREPARED = """
import os, sys
os.environ.update({environment!r})
from mxamp.framework import worker_process
from mxnet import kvstore
hook, init, create = sys.excepthook, kvstore.KVStore.__init__, kvstore.create
worker_process.prepare_worker.cache_clear()
worker_process.prepare_worker()
print(sys.excepthook is hook, kvstore.KVStore.__init__ is init, kvstore.create is create)
print(kvstore.create("device").type)
{then}
"""
WORKER = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2"}
LAUNCHED = {**WORKER, "MXAMP_LAUNCHED": "1"}


def program(environment, then=""):
    return PREPARED.format(environment=environment, then=then)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment, kept",
    [
        ({}, [True, True, True]),
        ({"DMLC_ROLE": "server"}, [True, True, True]),
        ({"MXAMP_LAUNCHED": "1"}, [True, True, True]),
        (WORKER, [False, True, False]),
        (LAUNCHED, [False, False, False]),
    ],
)
def test_only_workers_are_prepared(tmp_path, environment, kept):
    done = run_forked(program(environment), tmp_path)
    assert done.stdout.split() == [*map(str, kept), "device"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "then, alone",
    [
        ("", True),
        ("try: kvstore.create('dist_no_such')\nexcept Exception: pass", False),
        ("try: 1 / 0\nexcept ZeroDivisionError: sys.excepthook(*sys.exc_info())", False),
    ],
)
def test_a_worker_that_shared_nothing_says_so(tmp_path, then, alone):
    then += "\nimport atexit; atexit._run_exitfuncs()"  # which forked processes do not run
    done = run_forked(program(LAUNCHED, then), tmp_path)
    assert ("give kvstore='dist_sync'" in done.stderr) == alone, done.stderr


@pytest.mark.parametrize("error, status", [("ValueError('why')", 1), ("KeyboardInterrupt", 130)])
def test_an_error_ends_a_worker_and_is_shown(tmp_path, error, status):
    then = (
        "import atexit\n"
        "atexit.register(print, 'at exit')\n"
        f"try: raise {error}\n"
        "except BaseException: sys.excepthook(*sys.exc_info())\n"
        "print('goes on')"
    )
    done = run_forked(program(WORKER, then), tmp_path)
    assert done.returncode == status
    assert error.split("(")[0] in done.stderr
    assert done.stdout.splitlines()[-1] == "at exit"


def test_this_process_is_no_worker():
    assert sys.excepthook.__module__ != worker_process.__name__
    assert not hasattr(KVStore.__init__, "__wrapped__")


# ---------------------------------------------------------------------- long waits


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(worker_process, "_PATIENCE", 0.05)


def logged(caplog, text, seconds=5.0):
    limit = time.monotonic() + seconds
    while text not in caplog.text and time.monotonic() < limit:
        time.sleep(0.01)
    return caplog.text.count(text)


def test_long_waits_are_logged_once_and_short_ones_never(soon, caplog):
    with pytest.raises(ZeroDivisionError), log_long_wait("a wait that fails"):
        raise ZeroDivisionError
    cancel_wait_timer(start_wait_timer("a short wait"))
    cancel_wait_timer(None)
    begun = [start_wait_timer("wait number %d", i) for i in range(3)]
    with log_long_wait("worker %s waits", 3):
        assert logged(caplog, "worker 3 waits") == 1
        time.sleep(0.15)
        assert [logged(caplog, f"wait number {i}") for i in range(3)] == [1, 1, 1]
    for one in begun:
        cancel_wait_timer(one)
    assert len(caplog.records) == 4


@pytest.mark.parametrize("name", ["init", "broadcast", "_barrier"])
def test_what_all_workers_have_to_call_says_what_it_waits_for(soon, caplog, name):
    patch = next(patch for patch in _Worker().patches(launched=False) if patch.name == name)

    def original(self, key=None):
        assert logged(caplog, f"kvstore.{name.lstrip('_')}()") == 1, "during the call"
        return key

    original.__name__ = name
    assert patch.build(original)(None, 7) == 7
