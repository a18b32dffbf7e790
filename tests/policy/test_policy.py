from contextlib import nullcontext

import mxnet as mx
import pytest

import mxamp as amp
from helpers import same, values
from mxamp.graph.casts.insert import rewrite
from mxamp.graph.ir import Graph, Usage
from mxamp.graph.speed.shape_rules import choose
from mxamp.policy.decision import decide
from mxamp.policy.policy import Policy
from mxamp.policy.rules import Condition
from nets import attention, convolutional, decoder, embedded, made, perceptron, separable


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


def test_policies_show_themselves_in_one_line():
    changed = Policy.default("float16", "gpu").override(fp32=["dot"], fp32_layers=["a", "b*"])
    text = "<Policy float16 on gpu: fp32=('dot',), fp32_layers=('a', 'b*')>"
    assert repr(changed) == str(changed) == text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            {"target_dtype": "bfloat16"},
            "the policy is for float16, but bfloat16 is given beside it",
        ),
        ({"fp32_ops": ["dot"]}, "a policy contains operator lists"),
        ({"ctx": mx.gpu()}, "the policy is for cpu, but gpu is given"),
        ({"ctx": []}, "not an empty list"),
        ({"ctx": [mx.cpu(), mx.gpu()]}, "cpu and gpu"),
    ],
)
def test_a_policy_beside_what_differs_from_it(arguments, words):
    with pytest.raises(amp.ArgumentError, match=words):
        amp.init(policy=Policy.default("float16", "cpu"), **arguments)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"low": "dot"}, "the low operators must be a list of names, not 'dot'"),
        (
            {"fp32_layers": "head_*"},
            "fp32_layers must be a list of names or of Gluon blocks, not 'head_.'",
        ),
        ({"substitutions": "relu"}, "not 'relu'"),
        ({"conditional": ("Activation", "act_type", ["relu"])}, "not 'Activation'"),
        ({"conditional": [("Activation", "act_type", "relu")]}, "must be a list, not 'relu'"),
        ({"conditional": [("Activation", "act_typ", ["relu"])]}, "the closest is 'act_type'"),
    ],
)
def test_overrides_that_are_wrong(change, words):
    with pytest.raises(amp.ArgumentError, match=words):
        Policy.default("float16", "cpu").override(**change)


def test_unlisted_operators_run_in_float32():
    policy = Policy.default("float16", "cpu")
    assert decide("my_library_operator", {}, ["float16"], policy).reads == ("float32",)


def test_untuned_policies_differ_and_say_the_same_of_classes():
    policy = Policy.default("bfloat16")
    untuned = policy.untuned()
    assert untuned != policy
    assert untuned == untuned.untuned()
    assert untuned.operators("low") == policy.operators("low")
    assert not untuned.substitutions
    exact = {one.name for rule in untuned.rules.values() for one in rule.by_shape}
    assert exact - {"cast_weight"} == {"volume_views"}
    assert "cast_weight" in exact
    assert policy.override(fp32=["relu"]).substitutions == policy.substitutions
    assert policy.override(substitutions=["relu6"]) != policy


def test_nothing_is_lowered_in_float32(dtype, monkeypatch):
    monkeypatch.setattr("mxamp.policy.policy._custom_classes", {"mine": "low", "sum": "widest"})
    policy = Policy.default(dtype, "cpu").override(
        low=["exp", "Activation"],
        conditional=[("Activation", "act_type", ["relu"])],
        fp32_layers=["a"],
    )
    policy = policy.override(conditional=[("FullyConnected", "no_bias", [True])])
    assert policy.rule("FullyConnected").conditions and policy.rule("Activation").conditions
    changed = policy.in_float32()
    assert {rule.op_class for rule in changed.rules.values()} == {
        "fp32",
        "widest",
        "neutral",
        "untouched",
    }
    left = {one for rule in changed.rules.values() for one in rule.by_shape}
    assert all(one.reason.is_detour for one in left)
    assert bool(left) == (dtype == "bfloat16")
    for name in ("exp", "FullyConnected", "Activation", "Convolution"):
        assert changed.rule(name).shown_class == "fp32"
        decision = decide(name, {"act_type": "tanh"}, ["float32"] * 3, changed)
        assert (decision.precision, decision.changes) == ("float32", False)
    assert not changed.rule("Convolution").given and changed.rule("exp").given
    assert changed.fp32_layers == ("a",) and changed.substitutions == policy.substitutions
    for name, precision in (("mine", "float32"), ("sum", "float16"), ("other", "float32")):
        decision = decide("Custom", {"op_type": name}, ["float16"], changed)
        assert decision.precision == precision, decision.reason


def outputs_of(net, data, way, policy):
    """What a net gives in one way of running it, with its gradients."""
    with amp.autocast(policy=policy) if policy is not None else nullcontext():
        if way == "bound":
            symbol = net(*(mx.sym.var(f"data{i}") for i in range(len(data))))
            arrays = {f"data{i}": array for i, array in enumerate(data)}
            arrays.update((name, p.data()) for name, p in net.collect_params().items())
            args = {name: arrays[name] for name in symbol.list_arguments()}
            aux = {name: arrays[name].copy() for name in symbol.list_auxiliary_states()}
            return [values(out) for out in symbol.bind(mx.cpu(), args, aux_states=aux).forward()]
        net.hybridize(way == "hybridized")
        with mx.autograd.record():
            out = net(*data)
        out.backward()
    grads = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
    return [values(array) for array in (out, *grads)]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "make", [convolutional, separable, attention, perceptron, embedded, decoder]
)
@pytest.mark.parametrize("way", ["eager", "hybridized", "bound"])
def test_in_float32_nets_compute_what_plain_mxnet_computes(dtype, way, make):
    net, data = made(make)
    wanted = outputs_of(net, data, way, None)
    policy = Policy.default(dtype, "cpu").in_float32()
    if way != "eager":
        policy = policy.override(substitutions=())
        graph = Graph.from_symbol(net(*(mx.sym.var(f"data{i}") for i in range(len(data)))))
        usage = Usage(training=True)
        assert rewrite(graph, policy, usage, choose(graph, policy, usage)).graph == graph
    found = outputs_of(net, data, way, policy)
    assert len(found) == len(wanted)
    assert all(map(same, found, wanted))
