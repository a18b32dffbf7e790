"""What workers compare, on a kvstore of two threads that stands for the parameter server."""

import threading
from unittest import mock

import mxnet as mx
import pytest

import mxamp as amp
from helpers import down
from mxamp.framework import kvstores
from mxamp.framework.kvstores import check_dtypes
from mxamp.patches import kvstores as patched
from mxamp.scaling import workers as module
from mxamp.scaling.scaler import LossScaler, StaticLossScaler
from mxamp.scaling.workers import Workers


class Server:
    """Sums what `count` threads push, and answers each when all have pushed."""

    def __init__(self, count=2):
        self.count, self.sums, self.barrier = count, {}, threading.Barrier(count, timeout=20)
        self.lock = threading.Lock()
        self.messages = 0


class Store:
    """One worker's side."""

    type = "dist_sync"

    def __init__(self, server, rank):
        self.server, self.rank, self.num_workers = server, rank, server.count

    def init(self, key, value):
        self.server.barrier.wait()

    def push(self, key, value):
        with self.server.lock:
            self.server.messages += 1
            total = self.server.sums.get(key, 0)
            self.server.sums[key] = total + value.asnumpy()

    def pull(self, key, out):
        self.server.barrier.wait()
        out[:] = self.server.sums[key]
        if self.server.barrier.wait() == 0:
            self.server.sums.clear()
        self.server.barrier.wait()


def together(work, count=2):
    """Do `work(store)` in threads; return the errors by rank."""
    server, errors = Server(count), [None] * count

    def run(rank):
        try:
            work(Store(server, rank))
        except amp.AmpError as error:
            errors[rank] = str(error)

    # One numbering a process: here two workers share it.
    with mock.patch.object(module, "_keys", iter([7] * 20)):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return errors, server


def test_workers_with_the_same_settings_go_on():
    errors, server = together(lambda s: Workers(s).check_settings(LossScaler().state_dict()), 3)
    assert errors == [None] * 3
    assert server.messages == 3, "one from each, once"


@pytest.mark.parametrize(
    "one, other, what",
    [
        (LossScaler(1024), LossScaler(512), "loss scale"),
        (LossScaler(1024), StaticLossScaler(1024), "loss scaler"),
        (LossScaler(), LossScaler(growth_interval=5), "loss scaler"),
        (LossScaler(64), StaticLossScaler(128), "loss scale and loss scaler"),
    ],
)
def test_a_worker_with_another_scaler_is_named_in_all(one, other, what):
    scalers = [one, one, other]
    errors, _ = together(lambda s: Workers(s).check_settings(scalers[s.rank].state_dict()), count=3)
    for rank, error in enumerate(errors):
        assert f"worker 2 differs from worker 0 in {what}: start all" in error
        assert f"This is worker {rank}, with" in error
        assert f"loss scale {scalers[rank].loss_scale}" in error


def test_a_worker_with_another_policy_is_named():
    def work(store):
        policy = amp.Policy.default("bfloat16", "cpu")
        changed = policy.override(fp32=["FullyConnected"]) if store.rank else policy
        with amp.autocast(policy=changed):
            Workers(store).check_settings({"loss_scale": 1.0})

    errors, _ = together(work)
    assert all("worker 1 differs from worker 0 in policy:" in error for error in errors)


def test_a_worker_with_another_version_is_named(monkeypatch):
    class Version(str):
        def __repr__(self):
            return f"9.{threading.current_thread().name}"

    monkeypatch.setattr(module, "__version__", Version())
    errors, _ = together(lambda s: Workers(s).check_settings({"loss_scale": 1.0}))
    assert "worker 1 differs from worker 0 in mxamp version:" in errors[0]


def test_policies_are_described_alike_in_all_processes():
    policy = amp.Policy.default("float16", "cpu")
    again = amp.Policy.default("float16", "cpu").override(fp32=["softmax"])
    assert module._described(policy) == module._described(again.override(fp32=["softmax"]))
    assert module._described(policy) != module._described(policy.untuned().override(low=["exp"]))
    assert module._described(None) is None


def steps(differing=None):
    def work(store):
        workers = Workers(store)
        for step in range(3):
            values = {"step": step, "decision": "update", "loss scale": 2.0**step}
            if store.rank and step == 1 and differing:
                values.update(differing)
            workers.check_step(values)

    return work


@pytest.mark.parametrize("switch", [None, "0", ""])
def test_steps_cost_no_message(monkeypatch, switch):
    monkeypatch.delenv(module.VARIABLE, raising=False)
    if switch is not None:
        monkeypatch.setenv(module.VARIABLE, switch)
    errors, server = together(steps({"step": 7}))
    assert errors == [None, None] and server.messages == 0


def test_steps_are_compared_where_asked(monkeypatch):
    monkeypatch.setenv(module.VARIABLE, "1")
    errors, server = together(steps())
    assert errors == [None, None] and server.messages == 2 * 3


@pytest.mark.parametrize("what, value", [("step", 9), ("decision", "skip"), ("loss scale", 3.0)])
def test_a_worker_out_of_step_is_named(monkeypatch, what, value):
    monkeypatch.setenv(module.VARIABLE, "1")
    errors, _ = together(steps({what: value}))
    for error in errors:
        assert f"worker 1 is out of step with worker 0: they differ in {what}." in error
    assert f"{what} {value}" in errors[1]


def test_a_worker_says_what_it_waits_for(monkeypatch, caplog):
    monkeypatch.setattr(module, "_PATIENCE", 0.05)

    def work(store):
        workers = Workers(store)
        with workers._patience():
            threading.Event().wait(0.3)

    together(work, count=1)
    assert "worker 0 waits for the other workers" in caplog.text


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "uint8"])
def test_what_would_end_the_servers_is_refused(monkeypatch, dtype):
    zeros = mx.nd.zeros((2,))
    array = down(zeros, dtype) if dtype == "bfloat16" else zeros.astype(dtype)
    store = mx.kv.create("local")
    monkeypatch.setattr(patched, "is_distributed", lambda _: True)
    with amp.autocast("bfloat16"):
        for name in ("init", "broadcast", "push", "pushpull"):
            with pytest.raises(amp.ArgumentError, match=f"array of key 3 is {dtype}.*float32"):
                getattr(store, name)(3, [zeros, array])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_may_travel(dtype):
    check_dtypes("it", [[mx.nd.zeros((2,), dtype=dtype)]])


@pytest.mark.parametrize("store", ["dist_sync", "dist_device_sync", "dist_async"])
def test_distributed_kvstores_are_known_by_name(store):
    assert kvstores.is_distributed(store)


@pytest.mark.parametrize("store", [None, "local", "device", mx.kv.create("device")])
def test_others_are_not(store):
    assert not kvstores.is_distributed(store)
