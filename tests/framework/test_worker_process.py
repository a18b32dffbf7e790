"""What mxamp does in a worker of a parameter server, and in no other process."""

import functools
import sys

import pytest
from mxnet.kvstore import KVStore

from helpers import run_forked

PREPARED = """
import os, sys
os.environ.update({environment!r})
from mxamp.framework import worker_process
from mxnet import kvstore
hook, init = sys.excepthook, kvstore.KVStore.__init__
worker_process.prepare_worker.cache_clear()
worker_process.prepare_worker()
print(sys.excepthook is hook, kvstore.KVStore.__init__ is init)
store = kvstore.create("device")
print(store.type)
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
        ({}, [True, True]),
        ({"DMLC_ROLE": "server"}, [True, True]),
        ({"MXAMP_LAUNCHED": "1"}, [True, True]),
        (WORKER, [False, True]),
        (LAUNCHED, [False, False]),
    ],
)
def test_only_workers_are_prepared(tmp_path, environment, kept):
    done = run_forked(program(environment), tmp_path)
    assert done.stdout.split() == [*map(str, kept), "device"], done.stderr


@pytest.mark.slow
def test_a_launched_worker_frees_its_kvstores_at_exit(tmp_path):
    then = (
        "import atexit\n"
        "kvstore.create('local')\n"  # freed at once
        "atexit._run_exitfuncs()\n"  # which forked processes do not run
        "print(len(worker_process._stores), store.handle)"
    )
    done = run_forked(program(LAUNCHED, then), tmp_path)
    assert done.stdout.splitlines()[-1] == "1 None", done.stderr


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
    assert not isinstance(sys.excepthook, functools.partial)
    assert not hasattr(KVStore.__init__, "__wrapped__")
