import pickle
from contextlib import nullcontext

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import mx_dtype, same, values
from mxamp.framework.operators import registry
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


def test_operators_by_dtype():
    for policy in (Policy.default("float16", "cpu"), Policy.default("bfloat16")):
        assert policy.operators("float32") == policy.operators("fp32")
        assert policy.operators(np.float32) == policy.operators("fp32")
        assert policy.operators(policy.target_dtype) == policy.operators("low")
        assert policy.operators(mx_dtype(policy.target_dtype)) == policy.operators("low")
    for wrong in ("lo", "float16", 3, None):
        with pytest.raises(amp.ArgumentError, match="'conditional', 'bfloat16' or 'float32', not"):
            policy.operators(wrong)


def test_policies_show_themselves_in_one_line():
    policy = Policy.default("float16", "gpu")
    counts = {name: len(policy.operators(name)) for name in ("low", "fp32", "conditional")}
    text = repr(policy)
    assert text == str(policy)
    assert text.startswith(
        f"<Policy float16 on gpu: {counts['low']} operators low, {counts['fp32']} "
    )
    assert text.endswith(f", {counts['conditional']} conditional>")
    changed = policy.override(fp32=["dot"], fp32_layers=["a", "b*"])
    assert repr(changed).endswith("conditional, 1 override, 2 layer names in float32>")
    single = Policy.from_lists("float16", ["dot"], policy=None, ctx="gpu")
    assert repr(single).startswith("<Policy float16 on gpu: 1 operator low, ")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"low": "dot"}, "the low operators must be a list of names, not 'dot'"),
        ({"low": 3}, "not 3"),
        ({"low": [3]}, "named by a string, not by 3"),
        (
            {"fp32_layers": "head_*"},
            "fp32_layers must be a list of names or of Gluon blocks, not 'head_.'",
        ),
        ({"fp32_layers": [3]}, r"not \[3\]"),
        ({"substitutions": "relu"}, "not 'relu'"),
        ({"substitutions": 3}, "not 3"),
        ({"conditional": 3}, "not 3"),
        ({"conditional": ("Activation", "act_type", ["relu"])}, "not 'Activation'"),
        ({"conditional": [("Activation", "act_type", "relu")]}, "must be a list, not 'relu'"),
        ({"conditional": [("Activation", "act_type", 3)]}, "must be a list, not 3"),
        ({"conditional": [("Activation", "act_typ", ["relu"])]}, "the closest is 'act_type'"),
    ],
)
def test_overrides_that_are_wrong(change, words):
    with pytest.raises(amp.ArgumentError, match=words):
        Policy.default("float16", "cpu").override(**change)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("bfloat16",), "the policy is for float16, but bfloat16 is given beside it"),
        ((mx_dtype("bfloat16"),), "the policy is for float16, but bfloat16"),
        (("float16", ["dot"]), "a policy contains operator lists"),
        (("float8",), "not 'float8'"),
    ],
)
def test_a_policy_beside_what_differs_from_it(arguments, words):
    policy = Policy.default("float16", "cpu")
    with pytest.raises(amp.ArgumentError, match=words):
        Policy.from_lists(*arguments, policy=policy)
    with pytest.raises(amp.ArgumentError, match="the policy is for cpu, but gpu is given"):
        Policy.from_lists(policy=policy, ctx=mx.gpu())
    with pytest.raises(amp.ArgumentError, match="the policy is for bfloat16, but float16"):
        Policy.from_lists("float16", policy=Policy.default("bfloat16"))
    assert Policy.from_lists("float16", policy=policy, ctx=[mx.cpu()]) is policy
    assert Policy.from_lists(policy=Policy.default("bfloat16")).target_dtype == "bfloat16"


@pytest.mark.parametrize("ctx, words", [
    ("tpu", "not 'tpu'"), (3, "not 3"), ([], "not an empty list"), ([mx.cpu(), mx.gpu()], "cpu and gpu"),
])  # fmt: skip
def test_contexts_that_are_none(ctx, words):
    with pytest.raises(amp.ArgumentError, match=words):
        Policy.from_lists("float16", ctx=ctx)


def test_operators_by_class():
    policy = Policy.default("float16", "cpu")
    assert "Activation" in policy.operators("conditional")
    assert "Activation" not in policy.operators("neutral")
    kinds = ("low", "fp32", "widest", "neutral", "untouched", "conditional")
    assert sum(len(policy.operators(kind)) for kind in kinds) == len(registry())


def test_unlisted_operators_run_in_float32():
    policy = Policy.default("float16", "cpu")
    assert decide("my_library_operator", {}, ["float16"], policy).reads == ("float32",)


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
operators = ["_linalg_d*"]
"""


def test_a_list_of_ones_own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(LIST)
    policy = Policy.load(path, device="cpu")
    assert policy.operators("low") == ["dot"]
    matching = [name for name in registry() if name.startswith("_linalg_d")]
    assert policy.operators("fp32") == sorted(matching)
    assert "_linalg_det" in matching and len(policy.rules) == len(matching) + 1


@pytest.mark.parametrize("device", ["tpu", 3])
def test_devices(device):
    with pytest.raises(amp.ArgumentError, match="'cpu', 'gpu' or a Context"):
        Policy.default("float16", device)


def test_errors_pickle():
    error = pickle.loads(pickle.dumps(amp.UnknownNameError("words")))  # noqa: S301
    assert isinstance(error, amp.AmpError)
    assert isinstance(error, ValueError)


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


def test_in_float32_graphs_have_substitutions():
    symbol = mx.sym.LayerNorm(
        mx.sym.relu(mx.sym.Convolution(mx.sym.var("x"), kernel=(3, 3), num_filter=16))
    )
    shapes = {"x": (2, 3, 8, 8)}
    plan = amp.explain(
        symbol, policy=Policy.default("bfloat16").in_float32(), mode="training", input_shapes=shapes
    )
    operators = [node.operator for node in plan]
    assert {node.precision for node in plan} == {"float32"}
    assert "Activation" in operators and "relu" not in operators and "LayerNorm" not in operators
    assert operators[0] == "Convolution", "with three channels: the fourth is for bfloat16"
