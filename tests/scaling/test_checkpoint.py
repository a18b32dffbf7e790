"""The scaler in a trainer's state files."""

import copy
import pickle

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import mxamp as amp
from helpers import backpropagate, initialized, scaled_backward
from mxamp.scaling.checkpoint import MASTER_PLACES, master_place
from training import OPTIMIZERS, batches, poisoned, setup, train, weights


def test_a_scaler_that_is_given_after_loading_goes_on_from_the_file(tmp_path):
    path = str(tmp_path / "states")
    net, trainer = setup(scaler=amp.LossScaler(init_scale=4))
    train(net, trainer, batches(1)[0])
    trainer.save_states(path)
    _, other = setup()
    other.load_states(path)
    amp.init_trainer(other, amp.LossScaler(init_scale=512))
    assert (other.amp_loss_scale, other.amp_steps) == (4, 1)
    amp.init_trainer(other, amp.LossScaler(init_scale=512))  # replaces it
    assert (other.amp_loss_scale, other.amp_steps) == (512, 1)


NONE, DYNAMIC = amp.NoScaler(), amp.LossScaler(8)


@pytest.mark.parametrize("saved, own", [(NONE, DYNAMIC), (DYNAMIC, NONE)])
def test_a_scaler_does_not_give_way_to_none_nor_the_other_way_round(tmp_path, saved, own):
    path = str(tmp_path / "states")
    setup(scaler=saved)[1].save_states(path)
    _, other = setup(scaler=own)
    other.load_states(path)
    assert other._amp_loss_scaler.scaler is own


def damaged_states(content):
    states, optimizer = pickle.loads(content)  # noqa: S301
    optimizer._amp_state = {"scaler": {"kind": "LossScaler"}}
    no_scaler = pickle.dumps((states, optimizer))
    optimizer._amp_state = {"scaler": {}}
    return {
        "cut off": content[: len(content) // 2], "empty": b"", "no pickle": b"hello",
        "no optimizer": pickle.dumps((states, 5)), "a broken scaler": no_scaler,
        "no counts": pickle.dumps((states, optimizer)),
    }  # fmt: skip


DAMAGES = ["cut off", "empty", "no pickle", "no optimizer", "a broken scaler", "no counts"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_changes_nothing(tmp_path, damage):
    path = tmp_path / "states"
    net, trainer = setup(scaler=amp.LossScaler(init_scale=8), momentum=0.9)
    train(net, trainer, batches(1)[0])
    trainer.save_states(str(path))
    path.write_bytes(damaged_states(path.read_bytes())[damage])

    def held():
        updater = trainer._updaters[0]
        return updater.get_states(), trainer._optimizer, updater.optimizer

    before = held()
    with pytest.raises(amp.ArgumentError):
        trainer.load_states(str(path))
    assert held() == before
    assert trainer.amp_loss_scale == 8
    train(net, trainer, batches(1)[0])
    assert trainer.amp_last_step.stepped


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_file_of_another_network_changes_nothing_on_a_kvstore(tmp_path, on_machine):
    """Where "auto" chose float32, updates may stay on the kvstore, which holds the states."""
    on_machine(features={"avx512"})
    amp.init("auto")
    for units in (3, 5):
        net = initialized(gluon.nn.Dense(units, in_units=4), ctx=[mx.cpu(0), mx.cpu(1)])
        trainer = gluon.Trainer(net.collect_params(), "adam", update_on_kvstore=True)
        trainer._init_kvstore()
        amp.init_trainer(trainer)
        data = [mx.nd.ones((2, 4), ctx=ctx) for ctx in net.weight.list_ctx()]
        backpropagate(lambda net=net, data=data: [net(one) for one in data])
        trainer.step(4)
        if units == 3:
            trainer.save_states(str(tmp_path / "states"))
    updater = trainer._kvstore._updater
    before = updater.states, trainer._optimizer, updater.optimizer
    with pytest.raises(amp.ArgumentError, match=r"holds \(array\(3,\).*keeps \(array\(5,\)"):
        trainer.load_states(str(tmp_path / "states"))
    held = updater.states, trainer._optimizer, updater.optimizer
    assert all(one is other for one, other in zip(held, before))


def test_files_load_in_plain_mxnet_and_the_optimizer_stays_as_it_was(tmp_path):
    _, trainer = setup(scaler=amp.LossScaler(init_scale=8))
    attributes = set(vars(trainer._optimizer))
    trainer.save_states(str(tmp_path / "states"))
    assert b"mxamp" not in (tmp_path / "states").read_bytes()
    assert set(vars(trainer._optimizer)) == attributes


def test_trainers_copy_and_pickle(tmp_path):
    net, trainer = setup(scaler=amp.LossScaler(init_scale=1024), momentum=0.9)
    train(net, trainer, poisoned(batches(1)[0]))
    other = copy.deepcopy(trainer)
    assert other._amp_loss_scaler is not trainer._amp_loss_scaler
    assert other._amp_loss_scaler.trainer is other
    assert other.amp_loss_scale == 512
    other._amp_loss_scaler.scaler.set_scale(64)
    assert trainer._amp_loss_scaler.loss_scale == 512
    other.save_states(str(tmp_path / "other"))
    trainer.load_states(str(tmp_path / "other"))
    assert trainer.amp_loss_scale == 64


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_table_of_master_weights_holds_every_registered_optimizer(name):
    made = OPTIMIZERS[name](multi_precision=True)
    for momentum in (0.9, 0.0):
        if hasattr(made, "momentum"):
            made.momentum = momentum
        state = made.create_state_multi_precision(0, mx.nd.full((2, 2), 7, dtype="float16"))
        assert isinstance(state, tuple) and len(state) == 2
        master = state[master_place(made)]
        assert master.dtype == np.float32 and (master.asnumpy() == 7).all()


def test_the_table_of_master_weights_has_no_class_too_many():
    method = "create_state_multi_precision"
    kinds = [mx.optimizer.Optimizer, *OPTIMIZERS.values()]
    assert {kind for kind in kinds if method in vars(kind)} == set(MASTER_PLACES)


class MasterLast(mx.optimizer.Adam):
    """An optimizer that pairs states with master weights in its own way, as GluonNLP's BERTAdam."""

    def create_state_multi_precision(self, index, weight):
        if self.multi_precision and weight.dtype == np.float16:
            master = weight.astype("float32")
            return self.create_state(index, master), master
        return self.create_state(index, weight)

    def update_multi_precision(self, index, weight, grad, state):
        if self.multi_precision and weight.dtype == np.float16:
            state = state[::-1]
        super().update_multi_precision(index, weight, grad, state)


def stepped_at(level, optimizer, **options):
    """A trainer after one step at a level, of a net with one weight."""
    net = initialized(gluon.nn.Dense(2, in_units=4, use_bias=False, prefix="net_"))
    trainer = gluon.Trainer(net.collect_params(), optimizer, options)
    amp.initialize(net, trainer, level, loss_scale=8, ctx=mx.cpu())
    data = mx.nd.ones((3, 4), dtype=net.weight.dtype)
    scaled_backward(lambda: net(data).astype("float32").sum(), trainer)
    trainer.step(3)
    amp.shutdown()
    return trainer


def sums(state):
    return tuple(map(sums, state)) if isinstance(state, tuple) else float(state.sum().asscalar())


@pytest.mark.filterwarnings("ignore:Optimizer created manually")
def test_states_of_an_optimizer_with_pairs_of_its_own_load_at_their_level_alone(tmp_path):
    assert master_place(MasterLast()) is None
    path = str(tmp_path / "states")
    saved = stepped_at("O2", MasterLast(multi_precision=True))
    saved.save_states(path)
    same = stepped_at("O2", MasterLast(multi_precision=True))
    same.load_states(path)
    assert sums(same._updaters[0].states[0]) == sums(saved._updaters[0].states[0])
    other = stepped_at("O0", MasterLast())
    before = other._updaters[0].states
    pair = r"\(array\(2, 4\), array\(2, 4\)\)"
    message = rf"holds \({pair}, array.* of parameter 'net_weight', and MasterLast keeps {pair}:"
    with pytest.raises(amp.ArgumentError, match=message):
        other.load_states(path)
    assert other._updaters[0].states is before
    other.save_states(path)
    with pytest.raises(amp.ArgumentError, match=r"MasterLast keeps \(\(array"):
        same.load_states(path)


def test_states_that_their_optimizer_has_not_made_are_an_error(tmp_path):
    path = str(tmp_path / "states")
    trainer = stepped_at("O2", "sgd", momentum=0.9)
    trainer.optimizer.momentum = 0.0
    trainer.save_states(path)  # MXNet steps on with them
    message = r"holds \(array.* as the state of parameter 'net_weight', and SGD keeps NoneType"
    for level in ("O0", "O2"):
        with pytest.raises(amp.ArgumentError, match=message):
            stepped_at(level, "sgd").load_states(path)


class Growing(mx.optimizer.Optimizer):
    """A user-defined optimizer with a history, which grows."""

    def create_state(self, index, weight):
        return [mx.nd.zeros_like(weight)]

    def update(self, index, weight, grad, state):
        state.append(grad.copy())


@pytest.mark.filterwarnings("ignore:Optimizer created manually")
@pytest.mark.parametrize("level, other", [("O0", "O2"), ("O2", "O0"), ("O2", "O2")])
def test_a_state_may_grow(level, other, tmp_path):
    stepped_at(level, Growing()).save_states(str(tmp_path / "states"))
    trainer = stepped_at(other, Growing())
    trainer.load_states(str(tmp_path / "states"))
    state = trainer._updaters[0].states[0]
    history = state[1] if other == "O2" else state
    assert [float(array.sum().asscalar()) for array in history] == [0, 24]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_states_of_sparse_parameters_stay_as_they_are(tmp_path, on_machine):
    on_machine(features={"avx512"})
    amp.init("auto")
    sparse = {"stype": "row_sparse", "grad_stype": "row_sparse"}
    weight = initialized(gluon.Parameter("weight", shape=(4, 2), **sparse))
    trainer = gluon.Trainer([weight], "sgd", {"momentum": 0.9})
    rows = mx.nd.array([0, 2])
    data = weight.row_sparse_data(rows)
    backpropagate(lambda: mx.nd.Embedding(rows, data, 4, 2, sparse_grad=True))
    trainer.step(1)
    amp.init_trainer(trainer)
    trainer.save_states(str(tmp_path / "states"))
    before = trainer._kvstore._updater.states[0].asnumpy()
    trainer.load_states(str(tmp_path / "states"))
    assert (trainer._kvstore._updater.states[0].asnumpy() == before).all()


def ten_steps(dtype, first, last, path, load=False):
    """Take steps `first` to `last` of ten, two of which overflow; load before and save after them."""
    amp.init(dtype, ctx=mx.cpu())
    net, trainer = setup(optimizer="adam")
    if load:
        net.load_parameters(f"{path}.params")
        trainer.load_states(f"{path}.states")
    scaler = amp.StaticLossScaler()
    if dtype == "float16":
        scaler = None if load else amp.LossScaler(init_scale=256, growth_interval=3)
    amp.init_trainer(trainer, scaler)
    data = batches(10)
    data[4], data[6] = poisoned(data[4]), poisoned(data[6])
    for batch in data[first:last]:
        train(net, trainer, batch)
    net.save_parameters(f"{path}.params")
    trainer.save_states(f"{path}.states")
    amp.shutdown()
    return [*weights(net), trainer.amp_loss_scale, trainer.amp_skips]


def test_ten_steps_are_eight_and_two(dtype, tmp_path):
    whole = ten_steps(dtype, 0, 10, tmp_path / "whole")
    ten_steps(dtype, 0, 8, tmp_path / "half")
    np.testing.assert_equal(ten_steps(dtype, 8, 10, tmp_path / "half", load=True), whole)
    assert whole[-1] == 2


def test_a_momentum_that_was_set_to_zero_is_loaded_as_in_plain_mxnet(tmp_path):
    net = initialized(gluon.nn.Dense(3, in_units=4))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})
    amp.init_trainer(trainer, loss_scaler=amp.StaticLossScaler(128))
    for momentum in (0.9, 0.0):
        trainer._optimizer.momentum = momentum
        scaled_backward(lambda: net(mx.nd.ones((2, 4))).sum(), trainer)
        trainer.step(2)
        trainer.save_states(str(tmp_path / "states"))
        trainer.load_states(str(tmp_path / "states"))
    assert trainer._optimizer.momentum == 0.0


def test_states_of_float64_parameters_stay_in_float64(tmp_path):
    net, trainer = setup(dtype="float64", momentum=0.9)
    amp.initialize(net, trainer, "O0")
    backpropagate(lambda: net(mx.nd.ones((2, 4), dtype="float64")).sum())
    trainer.step(2)
    trainer.save_states(str(tmp_path / "states"))
    plain = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})
    plain.load_states(str(tmp_path / "states"))
    assert {state.dtype for state in plain._updaters[0].states.values()} == {np.float64}


def in_half(way, optimizer, units=2):
    """A net of float16 parameters and its trainer, which keeps float32 master weights."""
    net = initialized(gluon.nn.Dense(units, in_units=4), init=mx.init.Constant(1))
    trainer = gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": 1e-5})
    if way == "O2":
        amp.initialize(net, trainer, "O2", loss_scale=8, ctx=mx.cpu())
    else:
        net.cast("float16")
        trainer.optimizer.multi_precision = True
        amp.init("float16", ctx=mx.cpu())
        amp.init_trainer(trainer, amp.StaticLossScaler(8))
    return net, trainer


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("way", ["O2", "multi_precision"])
def test_master_weights_are_those_of_the_file(way, optimizer, tmp_path):
    """Not made of the float16 weights, which hold fewer digits."""
    net, trainer = in_half(way, optimizer)
    data = mx.nd.ones((3, 4), dtype="float16")
    scaled_backward(lambda: net(data).astype("float32").sum(), trainer)
    trainer.step(3)
    trainer.save_states(str(tmp_path / "states"))
    amp.shutdown()
    other = in_half(way, optimizer)[1]
    other.load_states(str(tmp_path / "states"))
    place = master_place(trainer.optimizer)
    saved, loaded = (one._updaters[0].states[0][place].asnumpy() for one in (trainer, other))
    assert (saved == loaded).all()
    assert not (saved == 1).any()
    amp.shutdown()
    with pytest.raises(amp.ArgumentError, match=r"array\(2,\).* as the state of parameter"):
        in_half(way, optimizer, units=3)[1].load_states(str(tmp_path / "states"))
