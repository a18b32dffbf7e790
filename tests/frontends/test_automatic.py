"""Scripts that know nothing of mxamp, run with the environment variable and with `mxamp run`."""

import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.contrib import amp as stock
from mxnet.gluon import Trainer
from mxnet.module import Module

import mxamp as amp
from conftest import assert_unpatched
from helpers import ROOT, run_forked
from mxamp.framework import machine
from mxamp.frontends import automatic
from mxamp.frontends.automatic import VARIABLE, imports_mxamp, script_imports_mxamp
from mxamp.frontends.module_api import DecoratedName
from mxamp.policy.targets import TARGETS_OR_AUTO

PLAIN = """
import os
import numpy as np
import mxnet as mx
import digits
net = digits.network()
net.hybridize()
trainer = digits.trainer_of(net)
overflow_at = int(os.environ["OVERFLOW_AT"])
print("skipped", digits.train(net, trainer, lambda loss: loss.backward(), overflow_at=overflow_at))
print("accuracy", digits.accuracy(net))
net.save_parameters("net.params")
print("saved", {str(v.dtype) for v in mx.nd.load("net.params").values()})
"""

GAN = """
import numpy as np
import mxnet as mx
from mxnet import autograd, gluon, nd
mx.random.seed(0); np.random.seed(0)
def net(outputs):
    made = gluon.nn.HybridSequential()
    made.add(gluon.nn.Dense(32, activation="relu"), gluon.nn.Dense(outputs))
    made.initialize(mx.init.Xavier())
    made.hybridize()
    return made
generator, critic = net(2), net(1)
trainers = [gluon.Trainer(n.collect_params(), "adam", {"learning_rate": 0.01}) for n in (generator, critic)]
loss = gluon.loss.SigmoidBCELoss()
for step in range(60):
    real, noise = nd.random.normal(3, 0.5, (32, 2)), nd.random.normal(shape=(32, 4))
    with autograd.record():
        fake = generator(noise)
        error = loss(critic(real), nd.ones(32)) + loss(critic(fake.detach()), nd.zeros(32))
    error.backward()
    trainers[1].step(32)
    with autograd.record():
        error = loss(critic(generator(noise)), nd.ones(32))
    error.backward()
    trainers[0].step(32)
print("mean", float(generator(nd.random.normal(shape=(256, 4))).mean().asscalar()))
print("steps", *(getattr(t, "amp_steps", 60) + getattr(t, "amp_skips", 0) for t in trainers))
"""

MODULE = """
import logging
import numpy as np
import mxnet as mx
import digits
images, labels, test, answers = digits.arrays()
net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=64, name="a")
net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="relu"), num_hidden=10, name="b")
net = mx.sym.SoftmaxOutput(net, name="softmax")
mx.random.seed(0); np.random.seed(0)
module = mx.mod.Module(net)
module.fit(mx.io.NDArrayIter(images, labels, 60), num_epoch=6, initializer=mx.init.Xavier(),
           optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
print("accuracy", dict(module.score(mx.io.NDArrayIter(test[:540], answers[:540], 60), "acc"))["accuracy"])
"""

LOADER = """
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
import digits
class Augmented(gluon.data.Dataset):
    def __init__(self):
        self.images, self.labels, _, _ = digits.arrays()
    def __len__(self):
        return 240
    def __getitem__(self, i):
        image = nd.array(self.images[i])
        # A product: mixed precision in a worker would round it.
        same = nd.dot(image.reshape((8, 8)), nd.eye(8)) * 1.001
        return same.reshape((1, 8, 8)), self.labels[i]
if __name__ == "__main__":
    net = digits.network()
    trainer = digits.trainer_of(net)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    loader = gluon.data.DataLoader(Augmented(), batch_size=60, num_workers=2)
    exact = True
    for epoch in range(2):
        for i, (data, label) in enumerate(loader):
            wanted = digits.arrays()[0][i * 60 : i * 60 + 60] * np.float32(1.001)
            exact = exact and bool((data.asnumpy() == wanted).all())
            with autograd.record():
                loss = loss_function(net(data), label.astype("float32"))
            loss.backward()
            trainer.step(60)
    print("exact", exact, "loss", bool(np.isfinite(loss.asnumpy()).all()))
"""


HOOK = (ROOT / "mxamp" / "startup" / "mxamp_startup.pth").read_text().strip()


def run(script, tmp_path, *arguments, value=None, command=()):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    places = (ROOT, ROOT / "tests", ROOT / "mxamp" / "startup")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    environment.pop(VARIABLE, None)
    if value is not None:
        environment[VARIABLE] = value
    prefix = [sys.executable, "-W", "ignore", *command]
    if value is not None and not installed():
        # The start-up hook belongs to an installed mxamp: do what it does.
        go = "; import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        prefix += ["-c", HOOK + go]
    return subprocess.run(
        [*prefix, str(path), *arguments], capture_output=True, text=True, env=environment,
        cwd=tmp_path, check=False, timeout=300,
    )  # fmt: skip


@functools.lru_cache(maxsize=None)
def installed():
    return subprocess.run(
        [sys.executable, "-c", "import os, sys; print('mxamp_startup' in sys.modules)"],
        capture_output=True, text=True, check=False, env={**os.environ, VARIABLE: "1"},
    ).stdout.strip() == "True"  # fmt: skip


def said(done, word):
    assert done.returncode == 0, done.stderr[-2000:]
    return re.search(rf"{word} (.*)", done.stdout).group(1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The accuracy of the plain script, None where MXNet does not import by itself."""
    if not plain_runs():
        return None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OVERFLOW_AT", "-1")
        return float(said(run(PLAIN, tmp_path_factory.mktemp("plain")), "accuracy"))


@pytest.mark.parametrize("way", [pytest.param("variable", marks=pytest.mark.slow), "run"])
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_plain_gluon_script(tmp_path, dtype, way, monkeypatch, plain):
    monkeypatch.setenv("OVERFLOW_AT", "3")
    if way == "variable":
        done = run(PLAIN, tmp_path, value=dtype)
    else:
        done = run(PLAIN, tmp_path, command=["-m", "mxamp", "run", "--dtype", dtype])
    assert said(done, "skipped") == "True"
    assert float(said(done, "accuracy")) > 0.93
    assert said(done, "saved") == "{\"<class 'numpy.float32'>\"}"
    if plain is not None:
        assert abs(plain - float(said(done, "accuracy"))) < 0.02
    (summary,) = [line for line in done.stderr.splitlines() if "operators lowered" in line]
    found = re.search(r"(\w+) on cpu, (\d+) operators lowered, (\d+) steps, (\d+) skipped", summary)
    assert found.group(1) == dtype
    assert int(found.group(2)) >= 2
    assert int(found.group(3)) + int(found.group(4)) == 100
    assert int(found.group(4)) >= 1


@functools.lru_cache(maxsize=None)
def plain_runs():
    """Whether MXNet imports without mxamp on this NumPy and Python."""
    code = [sys.executable, "-W", "ignore", "-c", "import mxnet"]
    return subprocess.run(code, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def plain_gan(tmp_path_factory):
    """The mean that the GAN reaches in plain MXNet, None where that does not import by itself."""
    return float(said(run(GAN, tmp_path_factory.mktemp("gan")), "mean")) if plain_runs() else None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gan_with_two_trainers(tmp_path, dtype, plain_gan):
    done = run(GAN, tmp_path, value=dtype)
    if plain_gan is not None:
        assert abs(float(said(done, "mean")) - plain_gan) < 0.15 * abs(plain_gan)
    assert said(done, "steps") == "60 60"
    assert re.search(r"\d+ steps, \d+ skipped", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_module_fit(tmp_path, dtype):
    done = run(MODULE, tmp_path, value=dtype)
    assert float(said(done, "accuracy")) > 0.9
    assert "120 steps, 0 skipped" in done.stderr or dtype == "float16"
    steps, skips = map(int, re.search(r"(\d+) steps, (\d+) skipped", done.stderr).groups())
    assert steps + skips == 120


@pytest.mark.slow
def test_data_loader_workers_compute_as_without(tmp_path):
    done = run(LOADER, tmp_path, value="bfloat16")
    assert said(done, "exact") == "True loss True"
    assert done.stderr.count("operators lowered") == 1
    assert "mixed precision is off" not in done.stderr


def test_mxnet_is_whole_and_loaded_once(tmp_path):
    script = """
    import sys
    import mxnet as mx
    from mxnet.gluon import Trainer
    names = [n.split(".")[1] for n in sys.modules if n.startswith("mxnet.") and n.count(".") == 1]
    missing = [n for n in names if not hasattr(mx, n)]
    seen = sys.modules["mxamp.scaling.distributed"].mx
    print("missing", missing, mx.gluon.Trainer is Trainer, mx is seen, mx.autograd is seen.autograd)
    print("spec", mx.__spec__.name, mx.__spec__.loader is mx.__loader__)
    """
    done = run(script, tmp_path, value="bfloat16")
    assert said(done, "missing") == "[] True True True"
    assert said(done, "spec") == "mxnet True"


@pytest.mark.slow
@pytest.mark.parametrize("value", ["0", "", "off"])
def test_off(tmp_path, value):
    script = "import sys, mxnet; print('mxamp', 'mxamp' in sys.modules and sys.modules['mxamp'].is_enabled())"
    if plain_runs():
        assert said(run(script, tmp_path, value=value), "mxamp") == "False"


def test_a_wrong_value_is_one_line_and_changes_nothing(tmp_path):
    done = run("import mxnet, mxamp; print('on', mxamp.is_enabled())", tmp_path, value="int8")
    (line,) = done.stderr.strip().splitlines()
    allowed = "must be 1, true, on, yes, float16, bfloat16 or auto, or to leave mixed precision off 0, false, off, no,"
    assert line == f"mxamp: {VARIABLE} {allowed} not 'int8': mixed precision stays off"
    assert said(done, "on") == "False"


@pytest.mark.parametrize(
    "value", [v for v in (*automatic._ON, *automatic._OFF, *TARGETS_OR_AUTO) if v]
)
def test_the_message_on_a_wrong_value_names_every_right_one(value, monkeypatch):
    monkeypatch.setenv(VARIABLE, "Int8 ")
    with pytest.raises(amp.ArgumentError, match=rf"[ ,]{value}[ ,;].*not 'Int8 '"):
        automatic.start_from_environment()


@pytest.mark.parametrize(
    "script, own",
    [
        ("import mxamp as amp", True), ("from mxamp import init", True),
        ("def f():\n    import mxamp.errors", True), ("from mxamp.errors import AmpError", True),
        ("from mxnet.contrib import amp", False), ("import mxampere", False), ("from .mxamp import x", False),
        ("from . import mxamp", False), ("import mxnet", False), ("not python at all", False),
    ],
)  # fmt: skip
def test_scripts_that_import_mxamp(tmp_path, script, own):
    path = tmp_path / "script.py"
    path.write_text(script)
    assert imports_mxamp(script) == script_imports_mxamp(path) == own
    assert not script_imports_mxamp(tmp_path / "none.py")


#: Products, whose values show whether a process computes in half precision.
CHILDREN = """
import multiprocessing, subprocess, sys
import mxnet as mx
from mxnet import autograd, gluon

def train(results=None):
    net = gluon.nn.Dense(1, use_bias=False)
    net.initialize(mx.init.Constant(1.001))
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with autograd.record():
        loss = net(mx.nd.ones((1, 1)))
    loss.backward()
    trainer.step(1)
    exact = float(loss.asscalar()) > 1.0005
    results.put(exact) if results else print("exact", exact, hasattr(trainer, "amp_steps"))

if __name__ == "__main__":
    train()
    if "child" not in sys.argv:
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            results = context.Queue()
            process = context.Process(target=train, args=(results,))
            process.start()
            print(method, results.get(timeout=60))
            process.join()
        print("other", subprocess.run([sys.executable, "-c", "import mxnet, sys; print('mxamp' in sys.modules and sys.modules['mxamp'].is_enabled())"], capture_output=True, text=True).stdout.split())
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["variable", "run"])
def test_auto_that_is_float32_runs_the_script_as_it_is(tmp_path, way, monkeypatch):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    if way == "variable":
        done = run(CHILDREN, tmp_path, value="Auto")
    else:
        done = run(CHILDREN, tmp_path, command=["-m", "mxamp", "run", "--dtype", "auto"])
    assert said(done, "exact") == "True False"
    assert (said(done, "fork"), said(done, "spawn"), said(done, "other")) == (
        "True",
        "True",
        "['False']",
    )
    # A wheel for CUDA says where there is no driver.
    (line,) = [one for one in done.stderr.splitlines() if one and "cuda driver" not in one]
    assert line.startswith("mxamp: 'auto' is float32 here, and mixed precision stays off: ")
    instead = f"set {VARIABLE}=bfloat16" if way == "variable" else "give --dtype bfloat16"
    assert line.endswith(f". To turn it on all the same, {instead}")


@pytest.mark.parametrize("child", [False, True])
def test_the_variable_auto_in_float32_patches_nothing(monkeypatch, child):
    monkeypatch.setenv(VARIABLE, "auto")
    monkeypatch.setattr(machine, "fast_dtype", lambda device=None: "float32")
    monkeypatch.setattr(automatic, "is_child", lambda: child)
    monkeypatch.setattr(automatic, "show_log", lambda: None)
    monkeypatch.setattr(sys, "argv", ["none.py"])
    automatic.start_from_environment()
    assert_unpatched()
    assert not amp.is_enabled()


def test_a_child_that_has_chosen_float32_itself_stays_in_it(monkeypatch):
    monkeypatch.setenv(VARIABLE, "bfloat16")
    monkeypatch.setattr(machine, "fast_dtype", lambda device=None: "float32")
    monkeypatch.setattr(automatic, "is_child", lambda: True)
    monkeypatch.setattr(sys, "argv", ["none.py"])
    automatic.start_from_environment()
    amp.init("auto")
    net = gluon.nn.Dense(1)
    net.initialize()
    assert not hasattr(Trainer(net.collect_params(), "sgd"), "amp_steps")
    assert not amp.is_enabled()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_variable_auto_elsewhere_is_that_dtype(monkeypatch, dtype):
    monkeypatch.setenv(VARIABLE, "auto")
    for name in ("fast_dtype", "default_dtype"):
        monkeypatch.setattr(machine, name, lambda device=None: dtype)
    monkeypatch.setattr(automatic, "show_log", lambda: None)
    monkeypatch.setattr(sys, "argv", ["none.py"])
    automatic.start_from_environment()
    assert amp.current_policy() is amp.Policy.default(dtype)
    net = gluon.nn.Dense(1)
    net.initialize()
    trainer = Trainer(net.collect_params(), "sgd")
    assert trainer.amp_loss_scale == (2.0**16 if dtype == "float16" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["variable", "run"])
def test_they_are_left_alone_with_a_line_that_says_so(tmp_path, way):
    script = "import mxamp as amp\nimport mxnet as mx\namp.init('bfloat16'); print('on', amp.is_enabled())"
    if way == "variable":
        done = run(script, tmp_path, value="1")
    else:
        done = run(script, tmp_path, command=["-m", "mxamp", "run"])
    assert said(done, "on") == "True"
    assert "uses mxamp itself" in done.stderr
    assert "operators lowered" not in done.stderr


@pytest.mark.slow
def test_an_amp_found_late(tmp_path):
    script = """
    import importlib, mxnet as mx
    amp = importlib.import_module("mxamp")
    amp.init("float16", ctx=mx.cpu())
    print("policy", amp.current_policy().target_dtype)
    """
    done = run(script, tmp_path, value="bfloat16")
    assert said(done, "policy") == "float16"
    assert "calls init of mxamp" in done.stderr


def test_scale_loss_in_an_automatic_run_is_refused(tmp_path):
    script = """
    import importlib, mxnet as mx, digits
    trainer = digits.trainer_of(digits.network())
    amp = importlib.import_module("mxamp")
    with amp.scale_loss(mx.nd.ones(1), trainer):
        pass
    """
    done = run(script, tmp_path, value="float16")
    assert done.returncode == 1
    assert f"{VARIABLE} already; scale_loss would scale them twice" in done.stderr


def test_the_hook_imports_itself_alone():
    assert HOOK.startswith("import ")
    assert "\n" not in HOOK
    code = (
        f"import sys; before = set(sys.modules); {HOOK}; print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "mxamp" / "startup")},
    )  # fmt: skip
    assert done.stdout.split() == ["mxamp_startup"]


@pytest.mark.slow
def test_a_program_may_set_the_variable_itself(tmp_path):
    script = f"""
    {HOOK}
    import os, sys
    import importlib.util
    os.environ["{VARIABLE}"] = "bfloat16"
    found = importlib.util.find_spec("mxnet")  # a look alone imports nothing
    print("looked", found.origin.endswith("__init__.py"), "mxnet" in sys.modules)
    import mxnet
    print("on", sys.modules["mxamp"].current_policy().target_dtype, mxnet.__spec__.loader is mxnet.__loader__)
    """
    done = run(script, tmp_path)
    assert said(done, "looked") == "True False"
    assert said(done, "on") == "bfloat16 True"


def test_it_comes_first():
    amp.init("bfloat16")
    with pytest.raises(amp.StateError, match="on already"):
        automatic.start("bfloat16")
    amp.shutdown()
    with pytest.raises(amp.ArgumentError, match="not both"):
        automatic.start("bfloat16", amp.Policy.default("bfloat16"))
    automatic.start("bfloat16")
    assert automatic._run.scale.loss_scale == 1
    amp.shutdown()
    assert automatic._run.scale is None


# ---------------------------------------------------------------- scripts with an init of their own


def dense():
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25})
    return net, trainer


def backward(net, value=1.0):
    with autograd.record():
        loss = net(nd.ones((1, 1))) * value
    loss.backward()


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
    assert net.weight.data().asscalar() == 1 - 0.125
    assert trainer._amp_loss_scaler.scaled_by == "automatic mixed precision"
    assert automatic._run.scale.steps == 1
    assert theirs.amp._amp_initialized


@pytest.mark.parametrize("through", ["mxnet.contrib.amp", "mxnet.contrib.amp.amp", "mxamp"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_script_that_calls_init_goes_on_by_its_own_calls(through, dtype, caplog):
    caplog.set_level("INFO", logger="mxamp")
    automatic.start("float16")
    theirs = importlib.import_module(through)
    early, trainer = dense()  # and a step, before its init
    backward(early)
    trainer.step(1)
    theirs.init(dtype, ctx=mx.cpu()) if through == "mxamp" else theirs.init(dtype)
    name = "mxamp" if through == "mxamp" else "mxnet.contrib.amp"
    assert f"calls init of {name}: from here on it runs by its own calls" in caplog.text
    assert automatic._run.scale is None
    assert amp.current_policy().target_dtype == dtype
    backward(early)  # not scaled, as nobody scales it
    assert early.weight.grad().asscalar() == 1
    trainer.step(1)
    with pytest.raises(amp.StateError, match="init_trainer"):
        scaled_step(theirs, early, trainer)
    theirs.init(dtype)  # again, as GluonCV's scripts do in each worker
    for net, one in ((early, trainer), dense()):
        before = net.weight.data().asscalar()
        theirs.init_trainer(one)
        scaled_step(theirs, net, one)
        assert net.weight.data().asscalar() == before - 0.0625
        assert one._amp_loss_scaler.scaled_by == "init_trainer"
        assert one.amp_steps == 1
    assert len([line for line in caplog.messages if "its own calls" in line]) == 1


@pytest.mark.parametrize("with_init_trainer", [True, False])
@pytest.mark.parametrize("value, wanted", [(0.5, 0.875), (np.inf, 1.0)])
def test_gradients_that_wait_for_a_step_are_checked_after_init(value, wanted, with_init_trainer):
    automatic.start("float16")
    net, trainer = dense()
    backward(net, value)
    stock.init("float16")
    if with_init_trainer:
        stock.init_trainer(trainer)
    trainer.step(1)
    assert net.weight.data().asscalar() == wanted


def test_states_loaded_before_init_are_taken_over(tmp_path):
    path = str(tmp_path / "states")
    amp.init("float16", ctx=mx.cpu())
    _, trainer = dense()
    amp.init_trainer(trainer, amp.LossScaler(init_scale=512))
    trainer.save_states(path)
    amp.shutdown()
    automatic.start("float16")
    _, trainer = dense()
    trainer.load_states(path)
    stock.init("float16")
    stock.init_trainer(trainer)
    assert trainer.amp_loss_scale == 512


def test_initialize_and_grad_scaler_take_over_too():
    automatic.start("float16")
    net, trainer = dense()
    amp.initialize(net, trainer, ctx=mx.cpu())
    scaled_step(amp, net, trainer)
    assert trainer._amp_loss_scaler.scaled_by == "initialize"
    amp.shutdown()
    automatic.start("float16")
    net, trainer = dense()
    amp.init("float16", ctx=mx.cpu())
    scaler = amp.GradScaler()
    with autograd.record():
        loss = scaler.scale(small_loss(net))
    loss.backward()
    scaler.step(trainer, 1)
    scaler.update()
    assert net.weight.data().asscalar() == 1 - 0.0625


# ------------------------------------------------------------------------------------- log lines

LOGGING = """
import io, logging, sys
root, ours = logging.getLogger(), logging.getLogger("mxamp")
from mxamp.frontends.automatic import show_log

def result(setting, before):
    for logger in (root, ours):
        logger.handlers, logger.filters = [], []
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.NOTSET)
    stream = io.StringIO()
    from mxamp.frontends import automatic
    automatic._handler.stream = stream
    steps = [lambda: (show_log(), show_log()), lambda: setting(stream)]
    for step in reversed(steps) if before else steps:
        step()
    ours.info("a"); ours.warning("b"); ours.debug("c"); ours.info("d")
    return stream.getvalue().split()
"""


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "setting, wanted",
    [
        ("pass", "mxamp: a mxamp: b mxamp: d"),
        # What logging does itself at the first `logging.info`: nobody has chosen its level.
        ("logging.basicConfig(stream=stream)", "INFO:mxamp:a WARNING:mxamp:b INFO:mxamp:d"),
        ("logging.basicConfig(stream=stream, level='INFO')", "INFO:mxamp:a WARNING:mxamp:b INFO:mxamp:d"),
        ("logging.basicConfig(stream=stream, level='DEBUG')", "INFO:mxamp:a WARNING:mxamp:b DEBUG:mxamp:c INFO:mxamp:d"),
        ("logging.basicConfig(stream=stream, level='WARNING', format='%(message)s')", "b"),
        ("logging.basicConfig(stream=stream, level='ERROR')", ""),
        ("root.setLevel('INFO'); root.addHandler(logging.StreamHandler(stream))", "a b d"),
        ("ours.setLevel('WARNING'); ours.addHandler(logging.StreamHandler(stream))", "b"),
        ("ours.setLevel('INFO'); logging.basicConfig(stream=stream, level='ERROR')", "INFO:mxamp:a WARNING:mxamp:b INFO:mxamp:d"),
    ],
)  # fmt: skip
def test_each_log_line_comes_once_and_as_the_program_wants(setting, wanted, before, tmp_path):
    code = f"{LOGGING}\ndef setting(stream):\n    {setting}\nprint(*result(setting, {before}))"
    done = run_forked(code, tmp_path)
    assert done.stdout.strip() == wanted, done.stderr


FORKED = """
import os
import mxamp as amp
from mxamp.frontends import automatic
automatic.start("float16")
child = os.fork()
if not child:
    print("child", amp.is_enabled(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent", amp.is_enabled())
"""


def test_a_forked_process_computes_in_float32_until_it_trains(tmp_path):
    done = run_forked(FORKED, tmp_path)
    assert done.stdout.split("\n")[:2] == ["child False", "parent True"], done.stderr


# ------------------------------------------------------------------------- what repr and help show


def test_representations_are_short_and_tell_the_scale():
    assert (
        repr(amp.decorate("sgd"))
        == "DecoratedName('sgd', SharedScale(65536, 0 steps, 0 skipped, by decorate))"
    )
    assert repr(DecoratedName("sgd")) == "DecoratedName('sgd', None)"
    assert str(amp.decorate("sgd")) == "sgd"
    assert (
        repr(amp.decorate(mx.optimizer.SGD()).scaling)
        == "SharedScale(65536, 0 steps, 0 skipped, by decorate)"
    )
    automatic.start("float16")
    _, trainer = dense()
    hook = trainer._amp_loss_scaler
    assert (
        repr(hook.scaler) == "SharedScale(65536, 0 steps, 0 skipped, by automatic mixed precision)"
    )
    assert (
        repr(hook) == f"<TrainerHook of automatic mixed precision: {hook.scaler!r}, gradients none>"
    )


def test_help_on_what_is_patched_is_the_originals():
    before = {}
    owners = (Trainer, Module, autograd, nd.NDArray, stock, stock.amp, amp)
    for owner in owners:
        before.update(
            {(owner, name): value for name, value in vars(owner).items() if callable(value)}
        )
    automatic.start("bfloat16")
    for (owner, name), original in before.items():
        ours = vars(owner)[name]
        if ours is original:
            continue
        if owner in (stock, stock.amp):
            original = getattr(amp, name)
        assert ours.__doc__ == original.__doc__, name
        assert ours.__name__ == original.__name__
        assert inspect.signature(ours) == inspect.signature(original)
