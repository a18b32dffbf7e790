"""The scaler in a trainer's state files."""

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import check_python
from mxamp.scaling.checkpoint import append_state, read_state
from training import batches, poisoned, setup, ten_steps, train


def test_round_trip(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"pickle")
    assert read_state(path) is None
    append_state(path, {"a": [1.5, "x"]})
    assert read_state(path) == {"a": [1.5, "x"]}
    append_state(path, {"b": 2})
    assert read_state(path) == {"b": 2}


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-20] + b[-8:], lambda b: b[-16:], lambda b: b[-8:]]
)
def test_damaged_files_are_named(tmp_path, damage):
    path = tmp_path / "states"
    path.write_bytes(b"pickle")
    append_state(path, {"scaler": 1})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(amp.ArgumentError, match="damaged"):
        read_state(path)


def test_states_carry_the_scaler(tmp_path):
    path = str(tmp_path / "states")
    net, trainer = setup(scaler=amp.LossScaler(init_scale=1024, growth_interval=7), momentum=0.9)
    train(net, trainer, poisoned(batches(1)[0]))
    train(net, trainer, batches(1)[0])
    trainer.save_states(path)
    _, other = setup(scaler=amp.LossScaler(), momentum=0.9)
    other.load_states(path)
    assert other._amp_loss_scaler.scaler == trainer._amp_loss_scaler.scaler
    assert other.amp_loss_scale == 512
    assert (other._amp_loss_scaler.steps, other._amp_loss_scaler.skips) == (1, 1)


def test_loading_before_init_trainer(tmp_path):
    path = str(tmp_path / "states")
    amp.init("float16", ctx=mx.cpu())
    _, trainer = setup(scaler=amp.LossScaler(init_scale=4))
    trainer.save_states(path)
    _, other = setup()
    other.load_states(path)
    amp.init_trainer(other)
    assert other.amp_loss_scale == 4


def test_files_from_before_still_load(tmp_path):
    path = str(tmp_path / "states")
    _, plain = setup(momentum=0.9)
    plain.save_states(path)
    _, trainer = setup(scaler=amp.LossScaler(init_scale=8), momentum=0.9)
    trainer.load_states(path)
    assert trainer.amp_loss_scale == 8


def test_a_damaged_state_changes_nothing(tmp_path):
    path = tmp_path / "states"
    net, trainer = setup(scaler=amp.LossScaler(init_scale=8), momentum=0.9)
    train(net, trainer, batches(1)[0])
    trainer.save_states(str(path))
    content = path.read_bytes()
    path.write_bytes(content[:-20] + content[-8:])
    before = trainer._updaters[0].get_states()
    with pytest.raises(amp.ArgumentError):
        trainer.load_states(str(path))
    assert trainer._updaters[0].get_states() == before


def test_files_load_in_plain_mxnet(tmp_path):
    path = str(tmp_path / "states")
    net, trainer = setup(scaler=amp.LossScaler(init_scale=8), momentum=0.9)
    train(net, trainer, batches(1)[0])
    trainer.save_states(path)
    block = "sys.modules['mxamp'] = None" if np.__version__ < "1.24" else "import mxamp"
    check_python(
        f"""
        import sys
        {block}
        import mxnet as mx
        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.Dense(8, in_units=4), mx.gluon.nn.Dense(2, in_units=8))
        net.initialize()
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {{"momentum": 0.9}})
        trainer.load_states({path!r})
        assert trainer.optimizer.num_update == 1
        """
    )


RESUME = """
import mxnet as mx
import mxamp as amp
from training import ten_steps
amp.init({dtype!r}, ctx=mx.cpu())
ten_steps({dtype!r}, 5, 10, load={half!r}, out={out!r})
"""


def test_ten_steps_are_five_and_five_in_another_process(dtype, tmp_path):
    amp.init(dtype, ctx=mx.cpu())
    whole, half, resumed = (str(tmp_path / name) for name in ("whole", "half", "resumed"))
    ten_steps(dtype, 0, 10, out=whole)
    ten_steps(dtype, 0, 5, save=half)
    check_python(RESUME.format(dtype=dtype, half=half, out=resumed))
    whole, resumed = np.load(whole + ".npz"), np.load(resumed + ".npz")
    assert whole["skips"] == 2
    for name in whole.files:
        np.testing.assert_array_equal(whole[name], resumed[name])
