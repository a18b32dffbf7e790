"""Saved policies: what is loaded is what was saved, on this machine and on others."""

import pytest

import mxamp as amp
from mxamp.policy.decision import decide
from mxamp.policy.policy import Policy

BOTH = {"avx512", "avx512_bf16"}
F16, BF16 = amp.Policy.default("float16", "cpu"), Policy.default("bfloat16")

POLICIES = {
    "float16": F16, "bfloat16": BF16, "float16 on GPUs": Policy.default("float16", "gpu"),
    "untuned": BF16.untuned(),
    "in float32": BF16.in_float32(),
    "low": F16.override(low=["exp", "Activation"]),
    "fp32": BF16.override(fp32=["Convolution", "Custom"]),
    "widest": BF16.override(widest=["softmax"]),
    "conditional": BF16.override(conditional=[("softmax", "axis", [-1, 0]), ("softmax", "use_length", [True])]),
    "conditions without values": F16.override(conditional=[("softmax", "axis", [])]),
    "a class and a condition": F16.override(low=["exp", "Activation"], conditional=[("Activation", "act_type", ["relu"])]),
    "lists": F16.override(low=["dot"], fp32=["exp"], widest=[], conditional=[], replace_lists=True),
    "layers": F16.override(fp32_layers=['a"b\\', "*_é\n\t", "", "x" * 99, "x\x7f\x00\u2028😀"]),
    "no substitutions": BF16.override(substitutions=[]),
}  # fmt: skip


def saved(policy, folder):
    path = folder / "saved.toml"
    policy.save(path)
    return path


@pytest.mark.parametrize("name", POLICIES)
def test_changed_policies(tmp_path, name):
    policy = POLICIES[name]
    path = saved(policy, tmp_path)
    found = Policy.load(path)
    assert found is policy
    assert dict(found.substitutions) == dict(policy.substitutions)
    text = path.read_text()
    found.save(path)
    assert path.read_text() == text


def test_conditions_of_several_tables_and_attributes(tmp_path):
    path = tmp_path / "own.toml"
    table = '[[conditional]]\noperators = ["BatchNorm"]\notherwise = "low"\n'
    path.write_text(
        'format = 1\ndtype = "bfloat16"\n'
        + table + 'attribute = ["axis", "eps"]\nvalues = ["1"]\nreason = "one"\n'
        + table + 'attribute = ["eps", "momentum"]\nbeyond_range = true\nreason = "two"\n'
    )  # fmt: skip
    policy = Policy.load(path)
    for attrs, reason in (
        ({"axis": "1"}, "axis=1: one"),
        ({"axis": "2", "eps": "1e-40"}, "eps=1e-40: two"),
    ):
        assert decide("BatchNorm", attrs, ["float32"], policy).reason == reason
    assert Policy.load(saved(policy, tmp_path)) is policy


def test_a_file_holds_changes(tmp_path, caplog):
    policy = BF16.override(low=["log", "exp"], fp32_layers=["head_*"]).untuned()
    path = saved(policy, tmp_path)
    text = path.read_text()
    assert "[[change]]\nlow = [" in text and '    "head_*",\n' in text
    assert "[[change]]\nuntuned = true\n" in text
    path.write_text('mxamp = "2.0.0"\nlists = "0a1b2c3d"\n' + text)  # as `save` once did
    assert Policy.load(path) is policy and not caplog.text


@pytest.mark.backend
def test_substitutions_that_are_gone(tmp_path):
    path, whole = tmp_path / "own.toml", '[substitutions]\nrelu = ""\nadam = ""\n'
    for text in ('[[change]]\nsubstitutions = ["relu", "adam"]\n', whole):
        path.write_text('format = 2\ndtype = "bfloat16"\ndevice = "cpu"\n' + text)
        assert {*Policy.load(path).substitutions} == {"relu"}


@pytest.mark.backend
def test_the_kernels_are_those_of_the_machine_that_loads(tmp_path, on_machine):
    on_machine(0, BOTH)
    fast = Policy.default("bfloat16")
    assert not fast.rule("Convolution").no_kernel
    path = saved(fast, tmp_path)
    on_machine()
    slow = Policy.load(path)
    assert slow is Policy.default("bfloat16") is not fast
    assert decide("Convolution", {}, ["float32"] * 3, slow).rounded_to == "bfloat16"
    back = saved(slow, tmp_path)
    on_machine(0, BOTH)
    assert Policy.load(back) is fast


def test_a_file_is_for_one_kind_of_device(tmp_path):
    with pytest.raises(amp.ArgumentError, match="saved.toml: the policy is for the cpu only"):
        Policy.load(saved(F16, tmp_path), device="gpu")


def test_classes_of_custom_operators_are_those_of_the_process(tmp_path):
    amp.register_custom_operator("mine", "half")
    policy = Policy.default("float16", "cpu")
    path = saved(policy, tmp_path)
    assert "mine" not in path.read_text()
    assert Policy.load(path) == policy
    custom = lambda policy, name: decide("Custom", {"op_type": name}, ["float32"], policy).precision  # noqa: E731
    assert custom(policy, "mine") == "float16"
    amp.register_custom_operator("mine", "float")
    amp.register_custom_operator("other", "half")
    loaded = Policy.load(path)
    assert (custom(loaded, "mine"), custom(loaded, "other")) == ("float32", "float16")
