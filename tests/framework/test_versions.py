"""What older versions of MXNet lack, as data."""

import re

import mxnet as mx
import pytest

import mxamp as amp
from mxamp.errors import ArgumentError, UnknownNameError
from mxamp.framework import operators, versions
from mxamp.framework.operators import lacks, needs_one_dtype, registry, resolve
from mxamp.policy.decision import decide
from mxamp.policy.lists import list_from_data, lists_folder, parse_toml, read_list

NEW = {name: one.since for one in versions.FEATURES.values() for name in one.operators}


@pytest.fixture
def loaded(monkeypatch):
    """Has MXNet be of another version, without the operators that came later."""

    def load(version):
        if versions.release(version) > versions.release(mx.__version__):
            pytest.skip(f"MXNet {mx.__version__} can't stand for {version}")
        older = {name for _, one in versions.lacking(version) for name in one.operators}
        kept = {name: one for name, one in registry().items() if name not in older}
        monkeypatch.setattr(versions, "_loaded_version", lambda: version)
        monkeypatch.setattr(operators, "registry", lambda: kept)
        for cached in (operators._by_name, operators._of_later_versions):
            cached.cache_clear()
        monkeypatch.setattr("mxamp.policy.lists.registry", lambda: kept)
        return kept

    yield load
    for cached in (operators._by_name, operators._of_later_versions):
        cached.cache_clear()


@pytest.mark.parametrize(
    "version, names",
    [
        ("1.7.0", set(versions.FEATURES)), ("1.9.1", set()), ("1.9.0", {"quantized_rnn"}),
        ("1.8.0", set(versions.FEATURES) - {"mixed_broadcast_like", "skipped_updates", "norm_relu"}),
    ],
)  # fmt: skip
def test_what_a_version_lacks(version, names):
    assert {name for name, _ in versions.lacking(version)} == names


def test_every_feature_came_with_a_version_that_mxamp_runs_on():
    known = [versions.release(version) for version in versions.SUPPORTED]
    assert known == sorted(known)
    assert all(versions.release(one.since) in known[1:] for one in versions.FEATURES.values())
    assert versions.is_supported(mx.__version__)


@pytest.mark.parametrize("version", ["1.7.0", "1.8.0", "1.9.0"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_lists_load_without_the_operators_that_came_later(version, dtype, loaded):
    kept = loaded(version)
    data = own_list(dtype)
    device = "gpu" if dtype == "float16" else "cpu"
    assert set(list_from_data(data, device, frozenset()).rules) == set(kept)


def own_list(dtype):
    return parse_toml((lists_folder() / f"{dtype}.toml").read_text())


def test_unknown_names_stay_errors(loaded):
    loaded("1.7.0")
    data = {
        "format": 1,
        "dtype": "bfloat16",
        "group": [{"class": "low", "operators": ["Convolutoin"], "reason": "r"}],
    }
    with pytest.raises(UnknownNameError, match="unknown operator 'Convolutoin'; the closest"):
        list_from_data(data, "cpu", frozenset())


def test_operators_of_later_versions_are_named(loaded):
    loaded("1.7.0")
    assert lacks("_contrib_quantize_asym")
    assert not lacks("Convolution")
    with pytest.raises(UnknownNameError, match="came with MXNet 1.9.1"):
        resolve("_contrib_quantize_asym")


def test_float16_on_cpus_is_an_error_where_it_has_no_casts(loaded):
    loaded("1.8.0")
    with pytest.raises(ArgumentError, match="MXNet 1.8.0 has no float16 casts.*give bfloat16"):
        amp.Policy.default("float16", device="cpu")
    assert amp.Policy.default("float16", device="gpu").device == "gpu"


def test_inputs_of_one_dtype(loaded):
    loaded("1.7.0")
    assert needs_one_dtype("broadcast_like")
    rules = list_from_data(own_list("float16"), "gpu", frozenset()).rules
    assert rules["broadcast_like"].keep_inputs == ()
    assert rules["reshape_like"].keep_inputs == ("rhs",)


@pytest.mark.parametrize("own", [False, True])
def test_kernels_of_later_versions_are_not_asked_for(own, loaded, tmp_path):
    """Before 1.9.0 transposed convolutions in bfloat16 failed: "Unknown type enum 12"."""
    loaded("1.8.0")
    path = lists_folder() / "bfloat16.toml"
    if own:
        path = tmp_path / "own.toml"
        path.write_text(
            'format = 1\ndtype = "bfloat16"\n'
            '[[group]]\nclass = "low"\noperators = ["Convolution"]\nreason = "products"\n'
        )
    rules = read_list(path, "cpu", frozenset({"avx512"})).rules
    rule = rules["Deconvolution"]
    assert rule.op_class == "fp32"
    assert (rule.missing, rule.by_shape) == ("its bfloat16 kernel came with MXNet 1.9.0", ())
    if not own:
        assert rules["Convolution"].op_class == "low"
    policy = amp.Policy.load(path, "cpu")
    inputs = ["float32", "float32"]
    assert not decide("Deconvolution", {}, inputs, policy).changes
    given = policy.override(low=["Deconvolution"])
    assert decide("Deconvolution", {}, inputs, given).reads == ("float64",) * 2


@pytest.mark.parametrize("asks", [False, True])
def test_updates_are_skipped_where_trainers_do_not_ask(asks, monkeypatch):
    """Trainers of MXNet 1.7 don't ask whether gradients overflowed: here one is made like theirs."""

    class Trainer(mx.gluon.Trainer):
        def _update(self, ignore_stale_grad=False):
            scaler = self.__dict__.pop("_amp_loss_scaler") if not asks else None
            super()._update(ignore_stale_grad)
            if scaler is not None:
                self._amp_loss_scaler = scaler

    if not asks:
        monkeypatch.setattr("mxamp.scaling.hook.has_feature", lambda name: False)
    net = mx.gluon.nn.Dense(1, in_units=2)
    net.initialize()
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    amp.init_trainer(trainer, amp.LossScaler(init_scale=4.0))
    before = net.weight.data().asnumpy()
    for value, stepped in ((float("inf"), False), (1.0, True)):
        with mx.autograd.record():
            loss = net(mx.nd.full((1, 2), value)).sum()
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
        trainer.step(1)
        assert trainer.amp_last_step.stepped is stepped
        assert (net.weight.data().asnumpy() == before).all() is not stepped or not stepped
    assert abs(net.weight.data().asnumpy() - (before - 1)).max() < 1e-6
    assert (trainer.amp_steps, trainer.amp_skips) == (1, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_entries_are_marked_with_the_version_they_came_with(dtype):
    """Each name that a version lacks stands in the lists with a comment that says so."""
    text = (lists_folder() / f"{dtype}.toml").read_text()
    marked = dict(re.findall(r'"(\w+)",  # since MXNet ([\d.]+)', text))
    assert marked == {name: since for name, since in NEW.items() if f'"{name}"' in text}
