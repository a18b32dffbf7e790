"""Scripts that know nothing of mxamp, run with the environment variable and with `mxamp run`."""

import functools
import importlib
import os
import re
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.contrib import amp as stock

import mxamp as amp
from helpers import ROOT, backpropagate, initialized, python
from mxamp.framework.environment import AUTOMATIC as VARIABLE
from mxamp.frontends import automatic
from mxamp.frontends.automatic import imports_mxamp

HOOK = (ROOT / "mxamp" / "startup" / "mxamp_startup.pth").read_text().strip()
PROGRAMS = ROOT / "tests" / "programs"
slow = pytest.mark.slow


#: mxamp, its hook and the tests.
PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "mxamp" / "startup")))


@functools.lru_cache(maxsize=None)
def has_hook():
    """Whether Python starts with the hook, as it does where mxamp is installed."""
    code = "import sys; print('mxamp_startup' in sys.modules)"
    return "True" in python("-c", code, PYTHONPATH=PATH).stdout


def run(program, *arguments, way="variable", value, folder):
    """Run one of tests/programs automatically."""
    path, given = PROGRAMS / f"{program}.py", {"cwd": folder, "PYTHONPATH": PATH}
    if way == "run":
        return python("-m", "mxamp", "run", "--dtype", value, path, *arguments, **given)
    given[VARIABLE] = value
    if not has_hook():
        go = "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        arguments = ("-c", f"{HOOK}; import sys, runpy; {go}", path, *arguments)
        return python(*arguments, **given)
    return python(path, *arguments, **given)


def said(done, word):
    assert done.returncode == 0, done.stderr[-2000:]
    return re.search(rf"^{word} (.*)", done.stdout, re.MULTILINE).group(1)


def counted(done):
    """Return the dtype and lowered operators of the one summary; in float16, steps and skips."""
    pattern = r": (\w+) on cpu, (\d+) operators? in 16 bits\n(?:.* (\d+) steps?, (\d+) skipped)?"
    ((dtype, *counts),) = re.findall(pattern, done.stderr)
    return (dtype, *(int(count) for count in counts if count))


@slow
@pytest.mark.parametrize("way", ["variable", "run"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_plain_gluon_script(tmp_path, dtype, way):
    # In bfloat16 as in float32, an overflow ends a run.
    done = run(
        "train_digits", 3 if dtype == "float16" else -1, way=way, value=dtype, folder=tmp_path
    )
    assert said(done, "skipped") == ("True" if dtype == "float16" else "None")
    assert float(said(done, "accuracy")) > 0.93
    assert said(done, "saved") == "{'float32'}"
    used, lowered, *counts = counted(done)
    assert (used, sum(counts), lowered > 1) == (dtype, 100 if dtype == "float16" else 0, True)
    assert counts[1:] != [0]


@slow
def test_data_loader_workers_compute_as_without(tmp_path):
    done = run("data_loader", value="bfloat16", folder=tmp_path)
    assert said(done, "exact") == "True"
    assert counted(done)[0] == "bfloat16"  # one summary: none of the workers
    assert "mixed precision is off" not in done.stderr


@pytest.mark.slow
def test_a_wrong_value_is_one_line_and_changes_nothing(tmp_path):
    done = run("whole_mxnet", value="int8", folder=tmp_path)
    (line,) = done.stderr.strip().splitlines()
    assert re.match(rf"mxamp: {VARIABLE} must be .* not 'int8'", line)
    assert said(done, "on") == "False"


@pytest.mark.parametrize("script, own", [
    ("import mxamp as amp", True), ("x = 1\nimport mxnet, mxamp", True),
    ("def f():\n    from mxamp.errors import AmpError", True),
    ("from mxnet.contrib import amp", False), ("import mxampere", False),
])  # fmt: skip
def test_scripts_that_import_mxamp(script, own):
    assert imports_mxamp(script.encode()) == own


# ------------------------------------------------------- the environment variable, in this process


@pytest.fixture
def environment(monkeypatch, on_machine):
    """Return a function that starts from the variable on a machine whose fast dtype is given."""

    def start(value, fast, child=False):
        monkeypatch.setenv(VARIABLE, value)
        on_machine(fast == "float16", {"avx512", "avx512_bf16"} if fast == "bfloat16" else ())
        if child:
            monkeypatch.setattr("multiprocessing.parent_process", lambda: "a process")
        monkeypatch.setattr(sys, "argv", ["none.py"])
        automatic.start_from_environment()

    return start


def test_the_variable_auto_in_float32_keeps_calls_of_contrib_in_float32(environment):
    environment("auto", "float32")
    net, trainer = dense()
    assert not hasattr(trainer, "amp_steps")
    stock.init()
    stock.init_trainer(trainer)
    scaled_step(stock, net, trainer)
    assert weight(net) == 1 - 0.0625
    assert trainer.amp_last_step.loss_scale == 1
    assert not amp.is_enabled()


@pytest.mark.parametrize(
    "dtype, child", [("float16", False), ("bfloat16", False), ("float16", True)]
)
@pytest.mark.backend
def test_the_variable_auto_elsewhere_is_that_dtype_but_not_in_children(environment, dtype, child):
    environment("auto", dtype, child)
    assert amp.is_enabled() != child
    assert hasattr(dense()[1], "amp_steps") == (dtype == "float16" and not child)


# ------------------------------------------------------------------- programs that import mxamp


@slow
@pytest.mark.parametrize("way", ["variable", "run"])
def test_they_are_left_alone_with_a_line_that_says_so(tmp_path, way):
    done = run("own_amp", way=way, value="bfloat16", folder=tmp_path)
    assert said(done, "on") == "True"
    assert "imports mxamp: it runs in its own precision" in done.stderr
    assert "in 16 bits" not in done.stderr


# ---------------------------------------------------------------- scripts with an init of their own


def dense():
    net = initialized(gluon.nn.Dense(1, in_units=1, use_bias=False), init=mx.init.One())
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25})


def weight(net):
    return net.weight.data().asscalar()


def backward(net, value=1.0):
    backpropagate(lambda: net(nd.ones((1, 1))) * value)


def small_loss(net):
    """A loss whose gradients float16 can hold with the first scale; a step by it is 1/16."""
    return net(nd.ones((2, 1)) / 4).mean()


def scaled_step(theirs, net, trainer):
    with autograd.record():
        with theirs.scale_loss(small_loss(net), trainer) as scaled:
            autograd.backward(scaled)
    trainer.step(1)


def test_a_script_that_never_calls_init_runs_automatically():
    automatic.start("float16")
    from mxnet.contrib import amp as theirs  # as many scripts do, for a switch of their own

    net, trainer = dense()
    backward(net, 0.5)
    trainer.step(1)
    assert weight(net) == 1 - 0.125
    assert trainer._amp_loss_scaler.scaled_by == VARIABLE
    assert (trainer.amp_steps, trainer.amp_skips) == (1, 0)
    assert theirs.amp._amp_initialized


@pytest.mark.parametrize("through", ["mxnet.contrib.amp", "mxamp"])
def test_a_script_that_calls_init_goes_on_by_its_own_calls(through, caplog):
    caplog.set_level("INFO", logger="mxamp")
    handlers = [*automatic.logger.handlers]
    automatic.show_log()
    assert automatic.logger.handlers == handlers
    automatic.start("float16")
    theirs = importlib.import_module(through)
    net, trainer = dense()  # and a step, before its init
    backward(net)
    trainer.step(1)
    theirs.init("bfloat16")
    assert amp.current_policy().target_dtype == "bfloat16"
    with pytest.raises(amp.StateError, match="init_trainer"):
        scaled_step(theirs, net, trainer)
    theirs.init("bfloat16")  # again, as GluonCV's scripts do in each worker
    theirs.init_trainer(trainer)
    before = weight(net)
    scaled_step(theirs, net, trainer)
    assert weight(net) == before - 0.0625
    assert trainer._amp_loss_scaler.scaled_by == "init_trainer"
    assert len([line for line in caplog.messages if "its own calls" in line]) == 1


@pytest.mark.parametrize("given", [{}, {"fp32_ops": []}, {"target_dtype": "float16"}])
def test_an_init_without_a_dtype_keeps_that_of_the_run(given):
    policy = amp.Policy.default("bfloat16").override(fp32=["dot"])
    automatic.start(policy=policy)
    stock.init(**given)
    assert amp.current_policy().target_dtype == given.get("target_dtype", "bfloat16")
    assert (amp.current_policy() == policy) == (not given)


@pytest.mark.parametrize("value, wanted", [(0.5, 0.875), (np.inf, 1.0)])
def test_gradients_that_wait_for_a_step_are_checked_after_init(value, wanted):
    automatic.start("float16")
    net, trainer = dense()
    backward(net, value)
    stock.init("float16")
    stock.init_trainer(trainer)
    trainer.step(1)
    assert weight(net) == wanted


@pytest.mark.parametrize("given", [{}, {"dtype": "float16"}])
def test_initialize_takes_over_too(given):
    automatic.start("bfloat16")
    net, trainer = dense()
    amp.initialize(net, trainer, ctx=mx.cpu(), **given)
    scaled_step(amp, net, trainer)
    assert amp.current_policy().target_dtype == given.get("dtype", "bfloat16")
    assert trainer._amp_loss_scaler.scaled_by == "initialize"
