"""The oracle: casts written by hand, around plain MXNet."""

import gc
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from contextlib import contextmanager
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner

import mxamp as amp
from mxamp.backends import backend_of, shape_checks
from mxamp.backends.choices import Choices
from mxamp.cli.main import main
from mxamp.framework.machine import dtype_name
from mxamp.graph.ir import Graph, Usage

ROOT = Path(__file__).resolve().parent.parent
#: Code that hides MXNet from Python.
WITHOUT_MXNET = """
import importlib.util, runpy, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "mxnet" else real(name, package)
"""
BF16 = np.dtype([("bfloat16", np.uint16)])
with_avx512 = pytest.mark.skipif(
    bool(amp.Policy.default("bfloat16").rule("Convolution").no_kernel), reason="no bfloat16 kernels"
)
NEEDS_HOROVOD = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None,
        reason="Horovod is not installed: scripts/install_horovod builds it",
    ),
]


def untuned(dtype):
    """Return the CPU's policy without rules for speed: layers of any size compute in `dtype`.

    Under it, eager calls, graphs and converted models agree bit for bit.
    """
    return amp.Policy.default(dtype, "cpu").untuned()


def casting_small_layers():
    """Return bfloat16's policy with its substitutions, but with no layer that counts as small."""
    text = (ROOT / "lists" / "bfloat16.toml").read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.toml"
        path.write_text(re.sub(r"\nlimit = [\d_]+", "\nlimit = 1", text))
        return amp.Policy.load(path)


def shut_down():
    """Shut down; nets and trainers that wait for a step are garbage by now."""
    gc.collect()
    amp.shutdown()


def pairwise(*factors):
    """Return few rows of values in which each pair of values of two factors occurs."""
    rows = [tuple(enumerate(row)) for row in itertools.product(*factors)]
    left = {pair for row in rows for pair in itertools.combinations(row, 2)}
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(left.intersection(itertools.combinations(row, 2))))
        left.difference_update(itertools.combinations(best, 2))
        chosen.append([value for _, value in best])
    return chosen


def mx_dtype(name):
    return BF16 if name == "bfloat16" else name


def classic(array):
    return array.as_nd_ndarray() if isinstance(array, mx.np.ndarray) else array


def down(array, dtype):
    """The array rounded to a half precision, in that dtype."""
    return mx.nd.amp_cast(classic(array), dtype=mx_dtype(dtype))


def up(array):
    return mx.nd.amp_cast(classic(array), dtype="float32")


def rounded(array, dtype):
    """The array rounded to a half precision, in float32."""
    return up(down(array, dtype))


def values(array):
    """NumPy values of an array of any dtype, with or without mxamp on."""
    with amp.autocast(enabled=False):
        return up(array).asnumpy() if dtype_name(array.dtype) == "bfloat16" else array.asnumpy()


def as_float32(array):
    """NumPy values in float32."""
    return np.asarray(array, dtype="float32")


def kind(array):
    return dtype_name(array.dtype)


def same(a, b):
    """Bitwise equal, NaN included."""
    a, b = (values(x) if isinstance(x, mx.nd.NDArray) else np.asarray(x) for x in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def randn(*shape, seed=0, scale=1.0):
    return mx.nd.array(np.random.RandomState(seed).randn(*shape).astype("float32") * scale)


def operators_of(symbol):
    return [node.op for node in Graph.from_symbol(symbol).nodes if not node.is_variable]


def chosen(symbol, policy=None, **usage):
    """Return the choices by shape for a symbol's graph, under bfloat16's own policy or another."""
    policy = policy or amp.Policy.default("bfloat16")
    backend = backend_of(policy.device)
    return backend.choose(Graph.from_symbol(symbol), policy, Usage(**usage)) or Choices()


def kept(symbol, policy=None, kinds=None, **usage):
    """Return the operators that rules by shape of these kinds keep in float32, in order."""
    nodes, found = Graph.from_symbol(symbol).nodes, chosen(symbol, policy, **usage).kept_float32
    return [
        nodes[i].name for i, reason in sorted(found) if reason.kind in (kinds or shape_checks())
    ]


def substitutions(symbol, policy=None, **usage):
    """Return the names of the substitutions in a symbol's graph."""
    return {name for _, (name, _) in chosen(symbol, policy, **usage).substituted}


def backpropagate(function):
    """Record a call of a function, run the backward pass of its result or results; return them."""
    with mx.autograd.record():
        result = function()
    mx.autograd.backward(result)
    return result


def scaled_backward(function, trainer):
    """Record a call of a function, scale its result for a trainer, and run the backward pass."""
    with mx.autograd.record(), amp.scale_loss(function(), trainer) as scaled:
        mx.autograd.backward(scaled)


@contextmanager
def parallel(*functions):
    """Context in which functions run in threads of their own; raises what the first of them raises."""
    errors = []

    def call(function):
        try:
            function()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=call, args=(one,), daemon=True) for one in functions]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]


def custom_operator(name):
    """Return a decorator that registers a CustomOp for `Custom` by this name."""

    def register(kind):
        create = {"create_operator": lambda *_: kind()}
        mx.operator.register(name)(type("Prop", (mx.operator.CustomOpProp,), create))
        return kind

    return register


def scaled_trainer(params, scaler=None, optimizer="sgd", settings=None, **options):
    """Return a trainer after `init_trainer` with a scaler."""
    trainer = mx.gluon.Trainer(params, optimizer, settings, **options)
    amp.init_trainer(trainer, scaler)
    return trainer


def leaf(array):
    """Return an array after `attach_grad`."""
    array.attach_grad()
    return array


def initialized(block, hybridize=False, **options):
    """Return a block or parameter after `initialize` with these options."""
    block.initialize(**options)
    if hybridize:
        block.hybridize()
    return block


def stacked(*layers):
    """Return a net of layers that is not initialized."""
    net = mx.gluon.nn.HybridSequential()
    net.add(*layers)
    return net


def sequential(*layers, **options):
    """Return an initialized net of layers."""
    return initialized(stacked(*layers), **options)


def exported(block, folder):
    """A block that was run and exported, loaded again by MXNet."""
    block.export(str(folder / "exported"))
    files = (str(folder / f"exported-{part}") for part in ("symbol.json", "0000.params"))
    return mx.gluon.SymbolBlock.imports(next(files), ["data"], next(files))


def load_script(name):
    """Return the module of a file in scripts/."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / "scripts" / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(*arguments, cwd=ROOT, timeout=600, stdin=None, **env):
    """Run Python with mxamp on its path; return the finished process with its output."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, arguments)], cwd=cwd, input=stdin, timeout=timeout,
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip


def run_python(code, *, env=None, timeout=300, cwd=ROOT / "tests"):
    """Run code in another process; return the finished process with its output."""
    return python("-c", textwrap.dedent(code), cwd=cwd, timeout=timeout, **(env or {}))


def check_python(code, **options):
    """Run code that must succeed in another process; return what it printed."""
    done = run_python(code, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_mxamp(*arguments, status=0):
    """Run the command `mxamp` in this process; return its result."""
    result = CliRunner().invoke(main, [*map(str, arguments)], prog_name="mxamp")
    assert result.exit_code == status, result.output
    return result


def horovodrun(*command, workers=2, env=None, timeout=120):
    """Run a Python program in several workers; return the finished process with its output.

    Once more where a worker aborts, as Horovod's broadcasts may: they read memory that another
    thread of Horovod's has freed.
    """
    program = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    python = [sys.executable, "-W", "ignore", *map(str, command)]
    own = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        # horovodrun imports MXNet: by way of mxamp where this is set, as newer NumPy needs it.
        "MXNET_ENABLE_AUTO_MIXED_PRECISION": "off",
    }
    for _ in range(2):
        done = subprocess.run(
            [program, "--gloo", "-np", str(workers), "-H", f"localhost:{workers}", *python],
            capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT,
            env={**os.environ, **own, **(env or {})},
        )  # fmt: skip
        if "Exit code: 134" not in done.stdout + done.stderr:
            break
    return done
