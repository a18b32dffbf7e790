import gc
import weakref

import pytest

import mxamp as amp
from mxamp.policy.decision import decide
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


def test_untuned_policies_differ_and_say_the_same_of_classes():
    policy = Policy.default("bfloat16")
    untuned = policy.untuned()
    assert policy != untuned == untuned.untuned()
    assert untuned.operators("low") == policy.operators("low")
    assert not untuned.substitutions
    exact = {one.name for rule in untuned.rules.values() for one in rule.by_shape}
    assert exact == {"cast_weight", "volume_views", "padded_kernel"}


def test_nothing_is_lowered_in_float32(dtype):
    amp.register_custom_operator("mine", "half")
    amp.register_custom_operator("sum", "promote")
    given = {"conditional": [("Activation", "act_type", ["relu"])], "fp32_layers": ["a"]}
    policy = Policy.default(dtype, "cpu").override(low=["exp", "Activation"], **given)
    changed = policy.in_float32()
    assert not any(rule.lowers for rule in changed.rules.values())
    for name in ("exp", "FullyConnected", "Activation", "Convolution"):
        decision = decide(name, {"act_type": "tanh"}, ["float32"] * 3, changed)
        assert (decision.precision, decision.changes) == ("float32", False)
    assert changed.fp32_layers == ("a",) and changed.substitutions == policy.substitutions
    for name, precision in (("mine", "float32"), ("sum", "float16")):
        decision = decide("Custom", {"op_type": name}, ["float16"], changed)
        assert decision.precision == precision, decision.reason


def test_a_policy_is_freed_with_its_last_holder():
    policy = Policy.default("float16", "cpu")
    made = [policy.override(fp32_layers=f"layer{i}") for i in range(3)]
    again = policy.override(fp32_layers="layer1")
    assert again is made[1]  # who makes it in each step finds its caches
    held = [weakref.ref(policy) for policy in made]
    del made, again
    gc.collect()
    assert [one() for one in held] == [None] * 3
