"""Horovod: what is refused, on a stand-in for it; and two workers that train, where it is built."""

import sys
import types

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import mxamp as amp
from helpers import BF16, NEEDS_HOROVOD, ROOT, horovodrun, initialized
from models import module_of
from training import assert_same_weights, batches, setup, train, weights

FIRST, LAST = 3, 6  # of the steps of a run that goes on from its states
SCALES = [[1, 1024], [0, 512], [1, 512], [1, 512], [0, 256], [1, 256]]
WAYS = [
    "scale_loss", "GradScaler", "decorate", "static", "predivided, average before", "groups", "fp16",
    "accumulated", "clipped", "late shapes", "float16 net",
]  # fmt: skip
#: Everything else equals float32's.
ROUNDED = {"fp16", "float16 net"}


# ---------------------------------------------------------------------- a stand-in


class ProcessSet:
    """Two workers, of which this is the second."""

    def __init__(self, size=2, included=True):
        self._size, self._included = size, included

    def rank(self):
        return 1

    def size(self):
        return self._size

    def included(self):
        return self._included


class DistributedTrainer(gluon.Trainer):
    """`other` is the gradient of the other worker, in all elements."""

    def __init__(self, params, optimizer, process_set=None, other=0.0):
        self._process_set, self.other, self.sums = process_set or ProcessSet(), other, 0
        super().__init__(params, optimizer, kvstore=None)

    def _allreduce_grads(self):
        self.sums += 1
        if self._process_set.included() and self._process_set.size() > 1:
            for param in self._params:
                param.list_grad()[0][:] += self.other


class DistributedOptimizer(mx.optimizer.Optimizer):
    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


@pytest.fixture
def hvd(monkeypatch):
    """Horovod, as far as it is used here; `differing` columns differ in the other worker."""
    module = types.ModuleType("horovod.mxnet")
    module.messages, module.differing = [], []

    def allreduce(tensor, average=None, name=None, process_set=None):
        assert average is False
        module.messages.append(name)
        own = tensor.asnumpy()
        other = own[::-1].copy()  # worker 0's row
        other[0][module.differing] += 1
        return mx.nd.array(own + other)

    module.allreduce = allreduce
    module.DistributedTrainer = DistributedTrainer
    module.DistributedOptimizer = DistributedOptimizer
    monkeypatch.setitem(sys.modules, "horovod.mxnet", module)
    return module


def prepared(hvd, scaler=None, **options):
    net, _ = setup()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", **options)
    amp.init_trainer(trainer, scaler or amp.LossScaler(init_scale=8))
    return net, trainer


@pytest.mark.parametrize("other, stepped", [(0.0, True), (np.inf, False), (np.nan, False)])
def test_the_decision_is_that_on_the_sum(hvd, other, stepped):
    net, trainer = prepared(hvd, other=other)
    before = weights(net)
    for data in batches(2):
        train(net, trainer, data)
        assert trainer.amp_last_step.stepped == stepped
    assert trainer.amp_loss_scale == (8 if stepped else 2)
    assert all(np.array_equal(*pair) for pair in zip(before, weights(net))) == (not stepped)
    assert trainer.sums == 2
    assert trainer._amp_loss_scaler.workers is not None
    assert len(hvd.messages) == 1, "settings are compared once, and steps cost no message"


def test_a_worker_with_other_settings_is_named(hvd):
    hvd.differing = [0]
    net, trainer = prepared(hvd)
    with pytest.raises(amp.StateError, match="worker 1 differs from worker 0"):
        trainer.step(1)
    assert trainer.sums == 0


@pytest.mark.parametrize("process_set", [ProcessSet(1), ProcessSet(2, included=False)])
def test_a_worker_that_trains_alone_compares_nothing(hvd, process_set):
    net, trainer = prepared(hvd, other=np.inf, process_set=process_set)
    train(net, trainer, batches(1)[0])
    assert trainer.amp_last_step.stepped
    assert hvd.messages == []
    assert trainer._amp_loss_scaler.workers is None


def nets():
    low, two = setup()[0], setup(ctx=[mx.cpu(0), mx.cpu(1)])[0]
    low.cast(BF16)
    sparse = initialized(gluon.nn.Embedding(4, 2, sparse_grad=True))
    return {"bfloat16": low, "two devices": two, "sparse": sparse}


@pytest.mark.parametrize("name, error, words", [
    ("bfloat16", amp.ArgumentError, "the gradient of 'dense.*' is bfloat16: leave parameters in"),
    ("two devices", amp.StateError, "is on 2 devices: start one process per device"),
    ("sparse", amp.StateError, "the gradient of 'embedding0_weight' is row_sparse: make its layer with"),
])  # fmt: skip
def test_gradients_that_horovod_can_not_sum_are_refused_before(hvd, name, error, words):
    trainer = hvd.DistributedTrainer(nets()[name].collect_params(), "sgd")
    amp.init_trainer(trainer, amp.NoScaler())
    with pytest.raises(error, match=words):
        trainer.step(1)
    assert trainer.sums == 0


def test_an_optimizer_of_horovod_in_another_trainer_is_refused(hvd):
    wrapped = hvd.DistributedOptimizer(mx.optimizer.SGD())
    trainer = gluon.Trainer(setup()[0].collect_params(), wrapped)
    with pytest.raises(amp.StateError, match="make it with hvd.DistributedTrainer"):
        amp.init_trainer(trainer, amp.LossScaler())


def test_an_optimizer_of_horovod_is_decorated_before(hvd):
    with pytest.raises(amp.ArgumentError, match="hvd.DistributedTrainer.params, mxamp.decorate"):
        amp.decorate(hvd.DistributedOptimizer(mx.optimizer.SGD()))


def test_modules_take_no_optimizer_of_horovod_with_loss_scaling(hvd):
    optimizer = hvd.DistributedOptimizer(amp.decorate(mx.optimizer.SGD()))
    module = module_of(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2), (2, 3))
    with pytest.raises(amp.StateError, match=r"gluon\.Trainer"):
        module.init_optimizer(None, optimizer)


def test_where_auto_is_float32_nothing_is_checked_or_refused(hvd, on_machine):
    on_machine()
    amp.init("auto")
    pairs = []
    for _ in range(2):
        net = setup()[0]
        pairs.append((net, hvd.DistributedTrainer(net.collect_params(), "sgd", other=np.inf)))
    (net, trainer), (control, plain) = pairs
    amp.init_trainer(trainer)
    train(net, trainer, batches(1)[0])
    train(control, plain, batches(1)[0], scaled=False)
    assert_same_weights(net, control)
    assert trainer.sums == 1
    assert hvd.messages == []
    amp.init_trainer(
        gluon.Trainer(net.collect_params(), hvd.DistributedOptimizer(mx.optimizer.SGD()))
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each worker has found, by the name of what it did."""
    out = str(tmp_path_factory.mktemp("horovod") / "worker")
    script = str(ROOT / "tests" / "horovod_worker.py")
    done = horovodrun(script, out)
    assert done.returncode == 0, done.stderr[-3000:]
    found = []
    for rank in (0, 1):
        arrays, by_name = np.load(f"{out}{rank}.npz"), {}
        for key in arrays.files:
            by_name.setdefault(key.rsplit("/", 1)[0], []).append(arrays[key])
        found.append(by_name)
    return found


@pytest.mark.parametrize("way", WAYS)
class TestWays:
    pytestmark = NEEDS_HOROVOD

    def test_all_workers_skip_what_one_has_seen_overflow(self, runs, way):
        one, two = (found[way] for found in runs)
        np.testing.assert_equal(one, two)
        scales = [[took, 1024] for took, _ in SCALES] if way == "static" else SCALES
        np.testing.assert_array_equal(one[-1], scales)

    def test_the_weights_are_those_of_one_process_in_float32(self, runs, way):
        expected = runs[0]["control, clipped" if way == "clipped" else "control"]
        close = {"rtol": 0.03, "atol": 0.01} if way in ROUNDED else {"rtol": 1e-5, "atol": 1e-6}
        for mine, theirs in zip(runs[0][way][:-1], expected):
            np.testing.assert_allclose(mine, theirs, **close)


class TestRuns:
    pytestmark = NEEDS_HOROVOD

    def test_what_compression_overflows_is_skipped_by_all(self, runs):
        one, two = (found["fp16, large scale"] for found in runs)
        np.testing.assert_equal(one, two)
        stepped, scales = one[-1].T
        assert not stepped[0] and stepped[-1] and scales[-1] < 2.0**18
        assert all(np.isfinite(array).all() for array in one)

    def test_workers_outside_of_the_process_set_train_alone(self, runs):
        one, two = (found["alone"] for found in runs)
        assert one[-1][:, 0].tolist() == [1, 1, 1, 1, 0, 1]
        assert two[-1][:, 0].tolist() == [1, 0, 1, 1, 1, 1]

    def test_a_run_goes_on_from_its_states_bit_for_bit(self, runs):
        for found in runs:
            np.testing.assert_equal(found["resumed"][:-1], found["saved"][:-1])
            np.testing.assert_equal(found["resumed"][-1], found["saved"][-1][FIRST:LAST])

    @pytest.mark.parametrize("name", ["another scale", "another policy"])
    def test_all_workers_are_told_what_is_wrong(self, runs, name):
        words = "worker 1 differs from worker 0 in mxamp's version, policy or loss"
        assert all(words in str(found[name][0]) for found in runs)


PLAIN = """
import sys, horovod.mxnet as hvd, mxnet as mx, numpy as np
from mxnet import autograd, gluon, nd
from horovod_worker import ROWS, STEPS, batch, network, values
hvd.init()
net = network()
hvd.broadcast_parameters(net.collect_params(), root_rank=0)
trainer = hvd.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.05})
for step in range(STEPS):
    with autograd.record():
        loss = (net(nd.array(batch(step, hvd.rank(), hvd.size()))) ** 2).sum()
    loss.backward()
    if len(sys.argv) > 2 and hvd.rank() and step == 3:
        raise RuntimeError("the reason")
    trainer.step(ROWS // hvd.size())
np.savez(sys.argv[1] + str(hvd.rank()), *values(net), scale=trainer.amp_loss_scale)
"""


class TestAutomaticRuns:
    pytestmark = NEEDS_HOROVOD

    def test_an_overflow_in_one_worker_skips_the_step_in_all(self, tmp_path):
        script, out = tmp_path / "train.py", tmp_path / "worker"
        script.write_text(PLAIN)
        done = horovodrun("-m", "mxamp", "run", "--dtype", "float16", script, out)
        assert done.returncode == 0, done.stderr[-3000:]
        one, two = (np.load(f"{out}{rank}.npz") for rank in (0, 1))
        for name in one.files:
            np.testing.assert_array_equal(one[name], two[name])
            assert np.isfinite(one[name]).all()
        assert one["scale"] < 2.0**16

    def test_a_worker_that_fails_ends_the_run(self, tmp_path):
        script = tmp_path / "train.py"
        script.write_text(PLAIN)
        done = horovodrun("-m", "mxamp", "run", script, tmp_path / "worker", "fail", timeout=60)
        assert done.returncode != 0
        assert "RuntimeError: the reason" in done.stdout + done.stderr
