"""`decide` as a table: class, inputs, device in; casts out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import with_avx512
from mxamp.errors import ArgumentError
from mxamp.framework.operators import registry
from mxamp.policy.decision import CASTABLE, decide
from mxamp.policy.policy import Policy
from mxamp.policy.rules import Reason

H, B, F, D, N = "float16", "bfloat16", "float32", "float64", "int32"


@pytest.mark.parametrize("operator, attributes, dtypes, reads", [
    # low: every float to float16
    ("FullyConnected", {}, [F, F, F], [H, H, H]),
    ("FullyConnected", {}, [H, F], [None, H]),
    ("FullyConnected", {}, [D, D], [None, None]),
    ("FullyConnected", {}, [D, H], [None, F]),
    ("FullyConnected", {}, [B, F], [F, None]),
    ("dot", {}, ["sparse", F], [None, None]),
    ("dot", {}, ["sparse", H], [None, F]),
    ("RNN", {"mode": "gru"}, [F, F, F, F], [H, H, H, None]),
    # fp32
    ("softmax", {}, [H], [F]), ("softmax", {}, [F], [None]), ("softmax", {}, [N], [None]),
    ("softmax", {}, [H, N], [F, None]),
    # widest
    ("broadcast_add", {}, [H, F], [F, None]), ("broadcast_add", {}, [H, H], [None, None]),
    ("broadcast_add", {}, [H, B], [F, F]), ("broadcast_add", {}, [H, N], [None, None]),
    ("Concat", {}, [H, F, H, N], [F, None, F, None]), ("add_n", {}, [H, D], [F, None]),
    # neutral
    ("transpose", {}, [H], [None]), ("take", {}, [H, F], [None, None]),
    ("where", {}, [F, H, H], [None, None, None]), ("where", {}, [F, H, F], [None, F, None]),
    ("BatchNorm", {}, [H, F, F, F, F], [None] * 5), ("BatchNorm", {}, [F] * 5, [None] * 5),
    # conditional
    ("Activation", {"act_type": "softrelu"}, [H], [F]),
    ("Activation", {"act_type": "relu"}, [H], [None]),
    ("LeakyReLU", {}, [H], [None]), ("LeakyReLU", {"act_type": "elu"}, [H], [F]),
    ("LeakyReLU", {"act_type": "prelu"}, [H, F], [None, H]),
    ("LeakyReLU", {"act_type": "prelu"}, [F, H], [None, F]),
    ("LeakyReLU", {"slope": "1e-9"}, [H], [F]),
    ("_plus_scalar", {"scalar": "-1e9"}, [H], [F]),
    ("clip", {"a_min": "1e-8", "a_max": "1"}, [H], [F]),
    ("clip", {"a_min": "0", "a_max": "1e5"}, [H], [F]),
    ("clip", {"a_min": "0", "a_max": "inf"}, [H], [None]),
    ("SequenceMask", {"value": "-1e9"}, [H, F], [F, None]),
    # only the second's shape is read
    ("reshape_like", {}, [H, F], [None, None]), ("slice_like", {}, [H, F], [None, None]),
    ("broadcast_like", {}, [H, F], [None, None]),
    # samplers
    ("_sample_normal", {}, [H, F], [F, None]), ("_npi_normal", {}, [F, H], [None, F]),
    # untouched
    ("sgd_update", {}, [H, F], [None, None]), ("Cast", {"dtype": "float32"}, [H], [None]),
    ("_zeros", {}, [], []),
    # from an operator library
    ("my_operator", {}, [H, F, N], [F, None, None]),
])  # fmt: skip
def test_float16_on_gpus(operator, attributes, dtypes, reads):
    decision = decide(operator, attributes, dtypes, Policy.default(H, "gpu"))
    assert list(decision.reads) == reads
    assert decision.rounded_to is None
    assert decision.reason


@pytest.mark.backend
def test_a_missing_kernel_computes_on_rounded_values():
    decision = decide("FullyConnected", {}, [F, H, N], Policy.default(H, "cpu"))
    assert decision.reads == (F, F, None)
    assert decision.rounded_to == H
    assert decision.precision == H
    assert decision.rounds(0, F)
    assert not decision.rounds(0, N)
    assert decide("Deconvolution", {}, [F, F], Policy.default(H, "cpu")).reads == (D, D)
    dilated = {"kernel": "(3, 3)", "dilate": "(1, 2)"}
    assert decide("Deconvolution", dilated, [F, F], Policy.default(H, "cpu")).reads == (None, None)
    with pytest.raises(ArgumentError, match="a weight in float16 has no right kernel"):
        decide("Deconvolution", dilated, [F, H], Policy.default(H, "cpu"))
    # There is none in float64 for three axes.
    volume = decide("Deconvolution", {"kernel": "(3, 3, 3)"}, [F, F], Policy.default(H, "cpu"))
    assert (volume.reads, volume.precision) == ((None, None), F)


@pytest.mark.parametrize("weight", [H, B])
@pytest.mark.backend
def test_a_deconvolution_reads_no_weight_through_a_cast(weight):
    policy, kept = Policy.default("bfloat16"), Reason("cast_weight", "its weight is cast")
    decision = decide("Deconvolution", {}, [F, weight, F, N], policy, kept_float32=kept)
    assert decision.reads == (D, D, D, None)
    assert (decision.rounded_to, decision.precision) == (F, F)
    assert decide("Deconvolution", {}, [weight, F], policy, kept_float32=kept).reads == (F, None)
    assert decide("Convolution", {}, [F, H], policy).rounded_to is None
    assert decide("Deconvolution", {}, [F, H], Policy.default(H, "gpu")).rounded_to is None


@with_avx512
def test_a_deconvolution_that_a_user_lowers_trains_through_its_cast():
    given = Policy.default("bfloat16").override(low=["Deconvolution"])
    assert decide("Deconvolution", {}, [F, F], given).reads == (D, D)
    assert decide("Deconvolution", {}, [F, B], given).reads == (B, None)


def test_layers_by_name():
    policy = Policy.default(H, "gpu").override(fp32_layers=["head*"])
    assert decide("FullyConnected", {}, [F, F], policy, "head0").reads == (None, None)
    assert decide("FullyConnected", {}, [H, F], policy, "head0").reads == (F, None)
    assert decide("FullyConnected", {}, [F, F], policy, "body0").reads == (H, H)
    assert "by name" in decide("FullyConnected", {}, [F, F], policy, "head0").reason


@pytest.mark.backend
def test_weights_of_grouped_convolutions_are_copied_before_the_cast():
    policy = Policy.default(B)
    assert decide("Convolution", {"num_group": "8"}, [F, F], policy).copied == {1}
    assert not decide("Convolution", {}, [F, F], policy).copied
    if not policy.rule("Convolution").no_kernel:
        assert not decide("Convolution", {"num_group": "8"}, [F, B], policy).copied


names = st.sampled_from(sorted(registry()))
kinds = st.lists(st.sampled_from([H, B, F, D, N, "int64", "bool", "sparse"]), max_size=6)
policies = st.sampled_from([(H, "cpu"), (H, "gpu"), (B, "cpu")])


@given(names, kinds, policies)
def test_what_holds_for_every_operator(name, dtypes, chosen):
    policy = Policy.default(*chosen)
    decision = decide(name, {}, dtypes, policy)
    assert len(decision.reads) == len(dtypes)
    for dtype, read in zip(dtypes, decision.reads):
        assert read is None or dtype in CASTABLE, "integers, booleans, float64 are never cast"
        assert read is None or read != dtype or decision.rounded_to, "no cast to what it is"
    for position in registry()[name].mutable_inputs:
        assert position >= len(dtypes) or decision.reads[position] is None
    if policy.rule(name).op_class == "untouched":
        assert not decision.changes
    # What it reads in the end, it would read unchanged.
    after = [read or dtype for dtype, read in zip(dtypes, decision.reads)]
    other_half = ({H, B} - {policy.target_dtype}).pop()
    # (The user's own other half precision goes up to float32, and would be lowered from there.)
    if decision.rounded_to is None and other_half not in dtypes:
        assert not decide(name, {}, after, policy).changes


@pytest.mark.parametrize("operator", ["transpose", "relu", "Flatten"])
def test_bfloat16_is_widened_under_a_float16_policy_of_cpus(operator):
    """Some of MXNet's bfloat16 kernels end the process, and only bfloat16 policies list them."""
    policy = Policy.default(H, "cpu")
    found = decide(operator, {}, ["bfloat16"], policy)
    assert (found.precision, found.reads) == ("float32", ("float32",))
    assert decide(operator, {}, ["float16"], policy).precision == "float16"
