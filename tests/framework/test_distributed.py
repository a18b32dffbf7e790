"""An uncaught exception ends a worker of a parameter server, and changes no other process."""

import pytest

from helpers import run_python

PREPARED = """
import atexit, os, sys
from mxamp.framework.distributed import end_worker_on_errors
os.environ.update({environment!r})
hook = sys.excepthook
end_worker_on_errors.cache_clear()
end_worker_on_errors()
print(sys.excepthook is hook, flush=True)
atexit.register(print, 'at exit')
try: raise {error}
except BaseException: sys.excepthook(*sys.exc_info())
print('goes on')
"""


@pytest.mark.parametrize("environment", [{}, {"DMLC_ROLE": "server"}])
def test_other_processes_keep_their_hook(environment):
    done = run_python(PREPARED.format(environment=environment, error="ValueError"))
    assert done.stdout.splitlines()[0] == "True", done.stderr


@pytest.mark.parametrize("error, status", [("ValueError('why')", 1), ("KeyboardInterrupt", 130)])
def test_an_error_ends_a_worker_and_is_shown(error, status):
    worker = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2"}
    done = run_python(PREPARED.format(environment=worker, error=error))
    assert done.returncode == status
    assert error.split("(")[0] in done.stderr
    assert done.stdout.splitlines() == ["False", "at exit"]
