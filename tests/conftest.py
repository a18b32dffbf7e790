import gc
import itertools
import logging
import os
import random
import zlib
from types import SimpleNamespace

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before MXNet is imported, which reads it once: the workers share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
import pytest
from hypothesis import settings

from helpers import shut_down
from mxamp import backends
from mxamp.framework import machine, patching
from mxamp.framework.operators import registry
from mxamp.patches.announcements import _logged
from mxamp.patches.table import casting_patches
from mxamp.policy.rules import custom_operators

# The first example of a test may load lists or wait for a busy machine.
settings.register_profile("mxamp", deadline=None)
settings.load_profile("mxamp")

# Doctests are looked for in every module. This one is a worker's script: where Horovod is
# installed it would start Horovod in the tests' own process, and leave its functions to be patched.
collect_ignore = ["horovod_worker.py", "programs"]

DTYPES = ("float16", "bfloat16")


_tests = itertools.count()


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-tests-on-cpu",
        action="store_true",
        help="run the tests for GPUs on the CPU, to test the tests",
    )
    parser.addoption(
        "--empty-backend",
        action="store_true",
        help="run the core's tests without any backend, and leave out those that need one",
    )


def pytest_configure(config):
    if config.getoption("--empty-backend"):
        backends.shape_checks()  # the lists name these rules, which nothing asks for then,
        backends.Backend.substitutions = backends.substitutions()  # and these equivalents
        backends.backend_of.cache_clear()
        backends._CLASSES.update(dict.fromkeys(backends.DEVICES, "mxamp.backends:Backend"))


#: Tests of the project's own tools.
TOOLING = {f"test_{name}.py" for name in (
    "check_gpu", "examples", "fuzz", "notebooks", "packaging", "paper", "scripts", "setup", "site",
    "wheel",
)}  # fmt: skip


#: Files and tests, by parts of their names, that take seconds: most start processes.
LONG = {"_run.py", "_readme", "_distributed", "freed", "pipe", "too_late", "random_g", "tuning/"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--empty-backend"):
        needs = {"backend", "gpu"}
        items[:] = [one for one in items if needs.isdisjoint(m.name for m in one.iter_markers())]
    for item in items:
        if item.path.name in TOOLING:
            item.add_marker("proof")
        # The case's id, not its position, decides: positions follow one parameter's order.
        is_left_out = item.get_closest_marker("matrix") and zlib.crc32(item.name.encode()) % 16
        if is_left_out or any(name in item.nodeid for name in LONG):
            item.add_marker("slow")
    # The long ones first: none is left for one worker when the others have finished.
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    # What is loaded by now stays: `clean` need not look through all of it after each test.
    registry()
    for dtype in DTYPES:
        amp.Policy.default(dtype, "cpu")
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


def _attributes():
    return {
        (repr(patch), patch.name): (patch.owner, patch.name) for patch in casting_patches.patches()
    }


ORIGINALS = {key: vars(owner)[name] for key, (owner, name) in _attributes().items()}


def assert_unpatched():
    assert not patching._open_sets
    assert not patching._stacks
    for key, (owner, name) in _attributes().items():
        assert vars(owner)[name] is ORIGINALS[key], f"{key} is still patched"


@pytest.fixture(scope="session", autouse=True)
def working_directory():
    """Raise if tests leave files in the folder that they run in, where `git add` finds them."""
    before = {*os.listdir(), "build", "dist", "mxamp.egg-info"}
    yield
    assert not [name for name in os.listdir() if name not in before and name[0] != "."]


@pytest.fixture(autouse=True)
def clean():
    """Same seeds and names before each test; after it nothing patched or registered, no numpy mode."""
    # Trainers sort parameters by name, and dense10 comes before dense9.
    mx.name.NameManager._current.value = mx.name.NameManager()
    mx.random.seed(0)
    np.random.seed(0)
    random.seed(0)
    log = logging.getLogger("mxamp")
    level = log.level
    classed = dict(custom_operators)
    yield
    log.setLevel(level)
    custom_operators.clear()
    custom_operators.update(classed)
    shut_down()
    _logged.clear()
    mx.nd.waitall()
    mx.npx.reset_np()
    gc.collect(1)
    if next(_tests) % 50 == 0:
        # What pytest and caches keep grows with each test. Frozen, it is not looked through again,
        # by the collector or by `decorate`, which searches all objects for arrays with gradients.
        gc.collect()
        gc.freeze()
    assert_unpatched()


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture
def on_machine(monkeypatch):
    """Return a function that lets mxamp see another machine: GPUs, features and cores of its CPU."""

    def claim(gpus=0, features=(), **others):
        monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
        claimed = {"_gpu_count": gpus, "cpu_features": frozenset(features), **others}
        for name, value in claimed.items():
            monkeypatch.setattr(machine, name, lambda value=value: value)

    return claim


@pytest.fixture
def as_on_gpus(monkeypatch):
    """Arrays of the CPU that mxamp takes for arrays on GPUs: it runs the operators that it would there."""
    monkeypatch.setattr(machine, "_CPU_TYPES", frozenset())


@pytest.fixture
def small_weights_too(monkeypatch):
    """Fused dense layers become convolutions whatever the size of their weights."""
    monkeypatch.setattr("mxamp.backends.onednn.dense_convolutions._LARGE", 1)
    monkeypatch.setattr("mxamp.backends.onednn.dense_convolutions._WIDE", 1)


@pytest.fixture
def unfused(monkeypatch):
    """Executors that run the operators of a graph one by one, where oneDNN would fuse some."""
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")


@pytest.fixture
def on(dtype):
    """Mixed precision on, on the CPU, in either dtype, the same in eager calls and in graphs."""
    amp.init(dtype, ctx=mx.cpu(), tuned=False)
    yield SimpleNamespace(dtype=dtype, policy=amp.current_policy())
    amp.shutdown()
