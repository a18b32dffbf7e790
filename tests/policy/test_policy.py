import pickle

import pytest

import mxamp as amp
from mxamp.framework.operators import registry
from mxamp.policy.policy import Policy
from mxamp.policy.rules import Condition


def test_policies_are_values():
    one, two = Policy.default("float16", "cpu"), Policy.default("float16", "cpu")
    assert one is two
    changed = one.override(fp32=["dot"])
    assert changed != one
    assert changed == one.override(fp32=["dot"])
    assert hash(changed) == hash(one.override(fp32=["dot"]))
    assert one.override() == one
    assert Policy.default("float16", "gpu") != one
    assert one != "float16"
    with pytest.raises(AttributeError):
        one.device = "gpu"


def test_override_takes_any_name_and_leaves_the_original():
    policy = Policy.default("float16", "cpu")
    changed = policy.override(fp32=["_npx_convolution"], widest=["softmax"], low=["exp"])
    assert changed.rule("Convolution").op_class == "fp32"
    assert changed.rule("softmax").op_class == "widest"
    assert changed.rule("exp").op_class == "low"
    assert policy.rule("Convolution").op_class == "low"
    assert changed.rule("dot") == policy.rule("dot")


def test_overriding_removes_conditions_and_adds_them():
    policy = Policy.default("float16", "cpu")
    assert policy.override(low=["Activation"]).rule("Activation").conditions == ()
    changed = policy.override(conditional=[("softmax", "axis", [-1, 0])])
    assert changed.rule("softmax").conditions == (Condition("axis", ("-1", "0"), default="-1"),)
    assert changed.rule("softmax").op_class == "neutral"


def test_layers_kept_by_name():
    policy = Policy.default("float16", "cpu").override(fp32_layers=["head_*"])
    assert policy.keeps_layer("head_dense0_fwd")
    assert not policy.keeps_layer("body_dense0_fwd")


def test_operators_by_class():
    policy = Policy.default("float16", "cpu")
    assert "Activation" in policy.operators("conditional")
    assert "Activation" not in policy.operators("neutral")
    kinds = ("low", "fp32", "widest", "neutral", "untouched", "conditional")
    assert sum(len(policy.operators(kind)) for kind in kinds) == len(registry())


def test_unlisted_operators_run_in_float32():
    assert Policy.default("float16", "cpu").rule("my_library_operator").op_class == "fp32"


LIST = """
format = 1
dtype = "float16"
[[group]]
class = "low"
reason = "fast"
operators = ["dot"]
[[group]]
class = "fp32"
reason = "wide"
operators = ["_linalg_*"]
"""


def test_a_list_of_ones_own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(LIST)
    policy = Policy.load(path, device="cpu")
    assert policy.operators("low") == ["dot"]
    assert "_linalg_det" in policy.operators("fp32")
    assert len(policy.rules) > 10


@pytest.mark.parametrize(
    "change, words",
    [
        (("format = 1", "format = 2"), "format 2"),
        (('"float16"', '"float8"'), "float8"),
        (('"dot"', '"dott"'), "dott"),
        (('"dot"', '"concat"'), "write 'Concat'"),
        (('"dot"', '"dot", "dot"'), "two groups"),
        (('"low"', '"lower"'), "'lower'"),
        (("[[group]]", "[[group"), "valid TOML"),
    ],
)
def test_lists_that_are_wrong(tmp_path, change, words):
    path = tmp_path / "own.toml"
    path.write_text(LIST.replace(*change, 1))
    with pytest.raises(amp.ArgumentError, match=words):
        Policy.load(path)


def test_a_list_that_is_not_there(tmp_path):
    with pytest.raises(amp.ArgumentError, match="no operator list"):
        Policy.load(tmp_path / "none.toml")


@pytest.mark.parametrize("device", ["tpu", 3])
def test_devices(device):
    with pytest.raises(amp.ArgumentError, match="'cpu' or 'gpu'"):
        Policy.default("float16", device)


def test_conditions():
    condition = Condition("scalar", beyond_range=True)
    assert condition.holds({"scalar": "-1e9"})
    assert condition.holds({"scalar": "1e-30"})
    assert not condition.holds({"scalar": "0"})
    assert not condition.holds({"scalar": "65504"})
    assert not condition.holds({"scalar": "True"})
    assert not condition.holds({})
    assert Condition("a", ("x",), default="x").holds({})


def test_features_follow_the_limit_on_onednn(monkeypatch):
    from mxamp.framework import machine

    monkeypatch.setattr(machine, "cpu_features", lambda: frozenset({"avx512", "avx512_bf16"}))
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    assert machine.features() == {"avx512", "avx512_bf16"}
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX512_CORE")
    assert machine.features() == {"avx512"}
    assert not Policy.default("bfloat16").rule("Convolution").missing
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "avx2")
    assert machine.features() == {"avx512", "avx512_bf16"}, "oneDNN knows capitals only"
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert machine.features() == frozenset()
    assert Policy.default("bfloat16").rule("Convolution").missing


def test_errors_pickle():
    error = pickle.loads(pickle.dumps(amp.UnknownNameError("words")))  # noqa: S301
    assert isinstance(error, amp.AmpError)
    assert isinstance(error, ValueError)


def test_lists_name_only_rules_and_substitutions_that_exist(tmp_path):
    path = tmp_path / "list.toml"
    for extra, words in (
        ('[substitutions]\nrelu7 = "faster"', "'relu6'"),
        ('[[by_shape]]\nrule = "many_rows"\noperators = ["dot"]\nreason = "why"', "few_rows"),
    ):
        path.write_text('format = 1\ndtype = "bfloat16"\n' + extra)
        with pytest.raises(amp.ArgumentError, match=words):
            Policy.load(path)


def test_untuned_policies_differ_and_say_the_same_of_classes():
    policy = Policy.default("bfloat16")
    untuned = policy.untuned()
    assert untuned != policy
    assert untuned == untuned.untuned()
    assert untuned.operators("low") == policy.operators("low")
    assert not untuned.chooses
    assert policy.override(fp32=["relu"]).substitutions == policy.substitutions
    assert policy.override(substitutions=["relu6"]) != policy


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a = " + b"[" * 100_000, b"not toml"])
def test_files_that_are_no_toml(tmp_path, content):
    path = tmp_path / "policy.toml"
    path.write_bytes(content)
    with pytest.raises(amp.ArgumentError, match="is not valid TOML"):
        Policy.load(path)
