"""Traces: every step of every kind of trainer is in the file, however the process ends."""

import dataclasses
import functools
import json
import logging
import os
import signal
import sys
import time

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

import mxamp as amp
from helpers import randn
from mxamp.tools.debugging import operator_stats, read_trace, trace, trace_lines
from mxamp.tools.debugging.trace_writing import gpu_memory_used, mean_loss
from training import batches, poisoned, setup, train


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


def steps(net, trainer, count=1):
    """Train without loss scaling."""
    for batch in batches(count):
        train(net, trainer, batch, scaled=False)


def run(path, net, trainer, data, **options):
    with trace(trainer, path, **options):
        for batch in data:
            train(net, trainer, batch)
    return read_trace(path)


def loss_of(net, data):
    return float((net(nd.array(data)) ** 2).sum().asscalar())


def test_each_step_is_a_line_of_plain_json(path):
    net, trainer = setup(scaler=amp.LossScaler(init_scale=256, growth_interval=2))
    data = batches(4)
    data[2] = poisoned(data[2])
    expected = loss_of(net, data[0])
    found = run(path, net, trainer, data)
    names = tuple(sorted(p.name for p in net.collect_params().values()))
    columns = [
        (s.step, s.loss_scale, s.next_loss_scale, s.stepped, s.nonfinite) for s in found.steps
    ]
    assert columns == [
        (1, 256, 256, True, ()), (2, 256, 512, True, ()), (3, 512, 256, False, names), (4, 256, 256, True, ()),
    ]  # fmt: skip
    assert [s.loss_finite for s in found.steps] == [s.stepped for s in found.steps]
    assert found.steps[0].loss == pytest.approx(expected, rel=1e-6)
    assert not np.isfinite(found.steps[2].loss)
    assert found.culprits() == [(name, 1, 3, 3) for name in names]
    assert found.steps[0].seconds is None and all(s.seconds > 0 for s in found.steps[1:])
    assert all(s.memory > 10e6 and s.time > 1.6e9 for s in found.steps)
    assert found.warnings == ()
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))


def test_a_finding_and_the_trace_number_a_step_alike(path):
    net, trainer = setup(scaler=amp.LossScaler(init_scale=256))
    data = batches(4)
    data[1], data[2] = poisoned(data[1]), poisoned(data[2])
    with amp.debugging.check_numerics("collect") as check:
        found = run(path, net, trainer, data)
    skipped = [step.step for step in found.skipped]
    assert skipped == sorted({finding.step for finding in check.findings}) == [2, 3]
    assert str(check.first).startswith("step 2: ")
    assert found.culprits()[0][2:] == (2, 3)


def with_grad_scaler(scaler):
    def step(net, trainer, batch):
        with autograd.record():
            loss = (net(nd.array(batch)) ** 2).sum()
        scaler.scale(loss).backward()
        scaler.step(trainer, len(batch))
        scaler.update()

    return step


@pytest.mark.parametrize("kind", ["plain", "GradScaler", "disabled", "decorate", "automatic"])
def test_every_kind_of_trainer(kind, path):
    scale, step = 512.0, functools.partial(train, scaled=False)
    if kind == "automatic":
        from mxamp.frontends.automatic import start

        start("bfloat16")
        scale = 1.0
    net, trainer = setup()
    if kind == "decorate":
        optimizer = amp.decorate(mx.optimizer.SGD(learning_rate=0.1), init_loss_scaling=scale)
        trainer = gluon.Trainer(net.collect_params(), optimizer)
    if kind in ("GradScaler", "disabled"):
        step = with_grad_scaler(amp.GradScaler(scale, enabled=kind == "GradScaler"))
    data = batches(3)
    data[1] = poisoned(data[1])
    expected = loss_of(net, data[0])
    with trace(trainer, path):  # GradScaler has not seen the trainer yet
        for batch in data:
            step(net, trainer, batch)
    amp.shutdown()
    found = read_trace(path).steps
    scaled = kind not in ("plain", "disabled")
    assert [s.stepped for s in found] == [True, not scaled, True]
    scales = {"GradScaler": [512, 512, 256], "decorate": [512, 512, 256]}
    assert [s.loss_scale for s in found] == scales.get(kind, [1, 1, 1])
    if scaled:
        assert found[0].loss == pytest.approx(expected, rel=1e-2)
        assert not found[1].loss_finite
        assert len(found[1].nonfinite) == 4
    else:
        assert found[0].loss is None


def test_nothing_is_left_behind(path):
    net, trainer = setup()
    before = dict(vars(trainer))
    with pytest.raises(KeyError), trace(trainer, path):
        raise KeyError
    assert vars(trainer) == before
    steps(net, trainer)
    assert not read_trace(path).steps


def test_init_trainer_inside_and_plain_steps_of_scaled_trainers(path):
    net, trainer = setup()
    with trace(trainer, path):
        steps(net, trainer)
        amp.init_trainer(trainer, amp.StaticLossScaler(8))
        train(net, trainer, batches(1)[0])
        steps(net, trainer)
    train(net, trainer, batches(1)[0])
    assert [s.loss_scale for s in read_trace(path).steps] == [1, 8, 1]


@pytest.mark.parametrize("given", [0.5, nd.array([0.25, 0.75]), mx.np.array([0.5]), nd.array([0.5]).astype("float16")])  # fmt: skip
def test_the_loss_given_to_a_trace(given, path):
    net, trainer = setup()
    with trace(trainer, path) as tracing:
        tracing.loss(given)
        steps(net, trainer)
        waiting = not isinstance(given, float)
        assert len(path.read_text().splitlines()) == (1 if waiting else 2)
        steps(net, trainer)
    assert [s.loss for s in read_trace(path).steps] == [0.5, None]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_the_mean_of_large_losses(dtype):
    array = (randn(100, 100) * 100).astype(dtype)
    expected = array.asnumpy().astype("float64").mean()
    assert mean_loss([array, array]) == pytest.approx(expected, rel=1e-4)


def test_several_trainers(path):
    (net, one), (other, two) = setup(scaler=amp.StaticLossScaler(4)), setup()
    with trace([one, two], path):
        for _ in range(2):
            train(net, one, batches(1)[0])
        steps(other, two)
    found = [(s.trainer, s.step, s.loss_scale) for s in read_trace(path).steps]
    assert found == [(0, 1, 4), (0, 2, 4), (1, 1, 1)]
    assert len(read_trace(path).header["trainers"]) == 2


def test_two_traces_of_one_trainer(tmp_path):
    net, trainer = setup()
    with trace(trainer, tmp_path / "a"):
        steps(net, trainer)
        with trace(trainer, tmp_path / "b"):
            steps(net, trainer)
        steps(net, trainer)
    assert [len(read_trace(tmp_path / name).steps) for name in "ab"] == [3, 1]


def test_the_header(path, on):
    net, trainer = setup(optimizer="adam", scaler=amp.LossScaler())
    trace(trainer, path).close()
    header = read_trace(path).header
    assert header["schema"] == 1
    assert header["mxamp"] == amp.__version__
    assert (header["mxnet"], header["numpy"]) == (mx.__version__, np.__version__)
    assert header["dtype"] == header["policy"]["target_dtype"] == on.dtype
    assert header["machine"]["cpu"] and header["machine"]["cores"] >= 1
    (described,) = header["trainers"]
    assert (described["optimizer"], described["learning_rate"]) == ("Adam", 0.1)
    assert (described["parameters"], described["elements"]) == (4, 4 * 8 + 8 + 8 * 2 + 2)
    assert (described["scaled_by"], described["scaler"]) == ("init_trainer", "LossScaler")


def test_a_deferred_net_and_no_policy(path):
    net = gluon.nn.Dense(2)
    net.initialize()
    trace(gluon.Trainer(net.collect_params(), "sgd"), path).close()
    header = read_trace(path).header
    assert (header["dtype"], header["policy"]) == ("float32", None)
    assert header["trainers"][0]["elements"] is None


CYCLE = {}
CYCLE["itself"] = [CYCLE]


@dataclasses.dataclass
class Cyclic:
    """Holds itself."""

    itself: object = None

    def __post_init__(self):
        self.itself = self


def nested(levels):
    return [nested(levels - 1)] if levels else []


def found_check():
    with amp.debugging.check_numerics("collect") as check:
        nd.log(nd.zeros(2))
    return check


def test_records(path):
    _, trainer = setup()
    with operator_stats() as stats:
        nd.relu(nd.ones(2))
    plan = amp.explain(mx.sym.relu(mx.sym.var("x")), "bfloat16")
    with trace(trainer, path) as tracing:
        tracing.record("operators", stats)
        tracing.record("plan", plan)
        tracing.record("mine", {"a": np.float32(1), "b": (np.arange(2), float("nan"))})
    found = read_trace(path)
    assert [r.kind for r in found.records] == ["operators", "plan", "mine"]
    assert found.of_kind("operators")[0].data == stats.to_dict()
    assert found.of_kind("plan")[0].data == json.loads(plan.to_json())
    assert found.of_kind("mine")[0].data == {"a": 1.0, "b": [[0, 1], "NaN"]}


@pytest.mark.parametrize(
    "act, error, words",
    [
        (lambda t: t.record("step", {}), amp.ArgumentError, "'step'"),
        (lambda t: t.record("", {}), amp.ArgumentError, "''"),
        (lambda t: t.record("mine", [1]), amp.ArgumentError, "dict or have to_dict"),
        (lambda t: t.record("mine", {"a": object()}), amp.ArgumentError, "a trace holds dicts"),
        (lambda t: t.record("mine", CYCLE), amp.ArgumentError, "up to 100 deep"),
        (lambda t: t.record("mine", {"a": [CYCLE]}), amp.ArgumentError, "up to 100 deep"),
        (lambda t: t.record("mine", Cyclic()), amp.ArgumentError, "up to 100 deep"),
        (lambda t: t.record("mine", {"a": nested(200)}), amp.ArgumentError, "up to 100 deep"),
        (lambda t: t.record("culprit", found_check()), amp.ArgumentError, "give check.first"),
        (lambda t: t.loss("high"), amp.ArgumentError, "a number or an NDArray, not 'high'"),
        (lambda t: (t.close(), t.close(), t.record("mine", {})), amp.StateError, "closed"),
        (lambda t: (t.close(), t.loss(1)), amp.StateError, "closed"),
    ],
)
def test_wrong_calls_of_an_open_trace(act, error, words, path):
    with trace(setup()[1], path) as tracing:
        with pytest.raises(error, match=words):
            act(tracing)
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "given, words",
    [("nothing", "gluon.Trainer"), ("module", "gluon.Trainer"), ("twice", "each trainer once"),
     ("folder", "is a folder"), ("nowhere", "there is no folder"), ("foreign", "is no trace .* left as it is"),
     ("json", "is no trace"), ("newer", "newer mxamp"), ("number", "a str or a Path, not 3"),
     ("board", "TensorBoard.* a str or a Path, not 3")],
)  # fmt: skip
def test_wrong_arguments(given, words, path):
    _, trainer = setup()
    before = dict(vars(trainer))
    content = {"foreign": "weights, my own\n", "json": '{"kind": "step"}\n',
               "newer": '{"kind": "header", "schema": 9, "mxamp": "7.0"}\n'}.get(given)  # fmt: skip
    if content is not None:
        path.write_text(content)
    where = {"folder": path.parent, "nowhere": path / "no" / "x", "number": 3}.get(given, path)
    module = mx.mod.Module(mx.sym.var("data"), label_names=None)
    who = {"twice": [trainer, trainer], "module": module, "nothing": []}.get(given, trainer)
    with pytest.raises(amp.ArgumentError, match=words):
        trace(who, where, tensorboard=3 if given == "board" else None)
    assert not path.is_file() or path.read_text() == content
    assert vars(trainer) == before


def test_another_loss_scaler_is_refused(path):
    from mxnet.contrib.amp.loss_scaler import LossScaler

    _, trainer = setup()
    trainer._amp_loss_scaler = LossScaler()
    with pytest.raises(amp.StateError, match="not mxamp's"):
        trace(trainer, path)
    trace(setup()[1], path).close()  # the file is free


def test_one_trace_at_a_time_writes_a_file(path, tmp_path):
    _, trainer = setup()
    with trace(trainer, path):
        with pytest.raises(amp.StateError, match=r"another trace.*\{rank\}"):
            trace(trainer, path)
    trace(trainer, path).close()


def test_the_path_holds_the_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("DMLC_WORKER_ID", "3")
    with trace(setup()[1], tmp_path / "trace-{rank}.jsonl") as tracing:
        pass
    assert tracing.path == tmp_path / "trace-3.jsonl"
    assert read_trace(tracing.path).header["rank"] == 3


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_resuming_a_trace(cut, path):
    net, trainer = setup()
    for _ in range(2):
        with trace(trainer, path) as tracing:
            steps(net, trainer, 3)
        if cut:
            path.write_bytes(path.read_bytes()[:-cut])
    found = read_trace(path)
    lost = cut > 1
    assert [s.step for s in found.steps] == [1, 2, 3, 4, 5, 6][: 4 if lost else 6]
    assert tracing.step == (5 if lost else 6)
    assert len(found.headers) == 2
    assert found.headers[1]["resumed_after"] == (2 if lost else 3)
    if lost:
        assert found.warnings[0].startswith("line 4 can't be read")
        assert found.warnings[1].startswith("the last line is cut")


def test_a_full_disk_ends_the_trace_and_not_the_training(path, monkeypatch, caplog):
    net, trainer = setup()
    with caplog.at_level(logging.WARNING, "mxamp"), trace(trainer, path) as tracing:
        steps(net, trainer)

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        steps(net, trainer, 2)
        monkeypatch.undo()
    assert "closed" in repr(tracing)
    assert len([r for r in caplog.records if "training goes on" in r.message]) == 1
    assert len(read_trace(path).steps) == 1


@pytest.mark.slow
def test_a_killed_process_leaves_all_its_lines(path):
    process = os.fork()
    if not process:
        try:
            net, trainer = setup(hybrid=False)
            tracing = trace(trainer, path)
            while True:
                tracing.record("mine", {"long": "x" * 5000})
        finally:
            os._exit(1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (not path.exists() or path.stat().st_size < 10**6):
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    found = read_trace(path)
    assert len(found.records) > 100
    # The kernel ends a write between two pages: of the last line, which no call has finished.
    assert all("the last line is cut" in warning for warning in found.warnings)
    assert [len(record.data["long"]) for record in found.records] == [5000] * len(found.records)


def test_tensorboard(path, tmp_path):
    pytest.importorskip("tensorboardX")
    net, trainer = setup(scaler=amp.StaticLossScaler(8))
    run(path, net, trainer, batches(2), tensorboard=tmp_path / "board")
    (events,) = (tmp_path / "board").iterdir()
    content = events.read_bytes()
    for name in (b"training/loss", b"training/loss_scale", b"training/skipped"):
        assert name in content


def test_a_refused_file_leaves_no_event_files(path, tmp_path):
    pytest.importorskip("tensorboardX")
    path.write_text("mine")
    with pytest.raises(amp.ArgumentError, match="is no trace"):
        trace(setup()[1], path, tensorboard=str(tmp_path / "board"))
    assert not (tmp_path / "board").exists()


def test_without_tensorboard(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(amp.InstallError, match=r"pip install 'mxamp\[tensorboard\]'"):
        trace(setup()[1], path, tensorboard="board")
    assert not path.exists()


@pytest.mark.parametrize(
    "content, words",
    [(None, "there is no trace"), ("", "is empty"), ("hello\n", "is no trace of mxamp: .* Give a file"),
     ('{"kind": "header", "schema": "x"}\n', "is no trace"), ("folder", "is a folder"),
     ('{"kind": "header", "schema": 2, "mxamp": "9.1"}\n', "newer mxamp .9.1, schema 2"),
     ("\xff\xfe\n", "is no trace"), ("\n\n", "is no trace"), ("[" * 100_000 + "\n", "is no trace"), ("no path", "must be a str or a Path, not 3")],
    ids=range(10),
)  # fmt: skip
def test_reading_other_files(content, words, path):
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(amp.ArgumentError, match=words) as caught:
        read_trace(path if content != "no path" else 3)
    assert "\n" not in str(caught.value)


def test_unreadable_lines_are_left_out(path):
    good = {"kind": "step", "step": 1, "loss_scale": 2, "stepped": True}
    bad = [[], 3, {"kind": "step"}, {**good, "step": "x"}, {**good, "nonfinite": 3}, {"kind": "mine"},
           {**good, "loss": [1]}, {"kind": "mine", "data": 3}, {"kind": None}, {**good, "step": 1e999},
           {**good, "step": 10**400}, {**good, "memory": 10**400}, {"kind": "header"},
           {"kind": "header", "schema": "x", "data": {}}]  # fmt: skip
    lines = [{"kind": "header", "schema": 1}, *bad, good]
    deep = "[" * 100_000 + "]" * 100_000 + "\n"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + deep)
    found = read_trace(path)
    assert len(found.steps) == 1
    assert found.records == ()
    assert found.warnings == ("line 2 can't be read and is left out, and 14 others",)


def test_a_trace_as_text_and_html(path):
    net, trainer = setup(scaler=amp.LossScaler(init_scale=8))
    data = batches(3)
    data[1] = poisoned(data[1])
    run(path, net, trainer, data)
    found = read_trace(path)
    assert "1 (33.33%)" in str(found) and "dense0_weight" in str(found)
    assert repr(found) == f"<TraceFile: {str(path)!r}, 3 steps, 1 skipped>"
    page = found._repr_html_()
    assert "<svg" in page and "dense0_weight" in page and "<script" not in page


def test_gpu_memory_without_gpus():
    if mx.context.num_gpus() == 0:
        assert gpu_memory_used(0) is None


def test_a_read_only_folder_is_a_write_error(path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    _, trainer = setup()
    monkeypatch.setattr(trace_lines.os, "open", refused)
    with pytest.raises(amp.WriteError, match="trace.jsonl' can't be written .Permission denied"):
        trace(trainer, path)
