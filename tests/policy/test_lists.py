"""The operator lists, held to MXNet's registry and to what its operators accept."""

import ctypes
import json
import re
from pathlib import Path

import pytest
from mxnet.base import _LIB, check_call, mx_uint

from helpers import ROOT
from mxamp.framework.data import parse_toml
from mxamp.framework.operators import registry
from mxamp.graph.ir import Node, infer_outputs
from mxamp.policy.lists import own_data
from mxamp.policy.policy import Policy

NOTES = parse_toml(Path(__file__).with_name("notes.toml").read_text())


@pytest.fixture
def data(dtype):
    return json.loads(own_data(dtype))


def expanded(group):
    for pattern in group["operators"]:
        if pattern.endswith("*"):
            yield from (name for name in registry() if name.startswith(pattern[:-1]))
        else:
            yield pattern


def test_every_operator_has_exactly_one_class(data):
    conditional = {name for group in data["conditional"] for name in expanded(group)}
    listed = [name for group in data["group"] for name in expanded(group)] + sorted(conditional)
    assert len(listed) == len(set(listed)), sorted(n for n in listed if listed.count(n) > 1)
    assert set(listed) == set(registry()), "new, renamed or unknown operators"


# ---------------------------------------------------------------------- numbers as attributes


def attributes(name):
    """The arguments of an operator, and MXNet's description of each."""
    many = ctypes.POINTER(ctypes.c_char_p)
    title, about, variadic, returns = (ctypes.c_char_p() for _ in range(4))
    count, names, types, texts = mx_uint(), many(), many(), many()
    found = (title, about, count, names, types, texts, variadic, returns)
    handle = ctypes.c_void_p(registry()[name].handle)
    check_call(_LIB.MXSymbolGetAtomicSymbolInfo(handle, *map(ctypes.byref, found)))
    return {names[i].decode(): types[i].decode() for i in range(count.value)}


def numbers(name):
    """Those that are floating-point numbers."""
    described = attributes(name).items()
    return {
        one for one, what in described if "{" not in what and ("float" in what or "double" in what)
    }


def test_every_number_is_watched_by_a_condition_or_exempt(dtype):
    exempt = {one for group in NOTES[dtype]["exempt"] for one in group["attributes"]}
    undecided, watched = set(), set()
    for device in ("cpu", "gpu") if dtype == "float16" else ("cpu",):
        for name, rule in Policy.default(dtype, device).rules.items():
            if rule.op_class in ("low", "widest", "neutral"):
                ranged = {c.attribute for c in rule.conditions if c.beyond_range}
                undecided |= {f"{name}.{one}" for one in numbers(name) - ranged}
                watched |= {f"{name}.{one}" for one in ranged}
    assert undecided == {one for one in exempt if one.split(".")[0] in registry()}
    assert not exempt & watched


@pytest.mark.parametrize("name, attrs, inputs, output", [
    ("BatchNorm", {}, "hffff", "h"), ("Embedding", {"input_dim": "3", "output_dim": "2"}, "fh", "h"),
    ("take", {}, "hf", "h"), ("pick", {}, "hf", "h"), ("gather_nd", {}, "hf", "h"),
    ("where", {}, "fhh", "h"), ("_npi_where", {}, "fhh", "h"),
    ("SequenceMask", {"use_sequence_length": "True"}, "hf", "h"),
    ("SequenceLast", {"use_sequence_length": "True"}, "hf", "h"),
    ("SequenceReverse", {"use_sequence_length": "True"}, "hf", "h"),
    ("_contrib_boolean_mask", {}, "hf", "h"), ("reshape_like", {}, "hf", "h"),
    ("slice_like", {}, "hf", "h"), ("broadcast_like", {}, "hf", "h"),
])  # fmt: skip
def test_mxnet_accepts_inputs_that_keep_their_dtype(dtype, name, attrs, inputs, output):
    kinds = {"h": dtype, "f": "float32"}
    node = Node(name, "n", attrs, num_outputs=3 if name == "BatchNorm" else 1)
    assert infer_outputs(node, [kinds[i] for i in inputs])[0] == kinds[output]


# Names of inputs that hold indices, lengths, labels, coordinates or conditions.
POSITIONS = re.compile(
    r"ind|length|label|roi|offset|grid|anchor|obj|marks|condition|matches|im_info|^h$|loc"
)


# All inputs of these have one dtype in MXNet, or the lengths must be integers.
ALIKE = {
    "BilinearSampler", "CTCLoss", "LinearRegressionOutput", "LogisticRegressionOutput",
    "MAERegressionOutput", "ROIPooling", "SVMOutput", "SoftmaxOutput", "SpatialTransformer",
    "_contrib_DeformableConvolution", "_contrib_DeformablePSROIPooling",
    "_contrib_ModulatedDeformableConvolution", "_contrib_MultiBoxDetection",
    "_contrib_MultiBoxTarget", "_contrib_MultiProposal", "_contrib_PSROIPooling",
    "_contrib_Proposal", "_contrib_ROIAlign", "_contrib_RROIAlign", "_contrib_box_decode",
    "_contrib_box_encode", "_contrib_count_sketch", "_contrib_hawkesll", "_contrib_mrcnn_mask_target",
    "softmax", "softmax_cross_entropy",
}  # fmt: skip


def test_indices_are_kept_in_whatever_class_a_policy_has_their_operators(dtype):
    policy = Policy.default(dtype, "cpu")
    found = {
        name
        for name, operator in registry().items()
        if not {one for one in operator.inputs if POSITIONS.search(one) or one == "mask"}
        <= set(policy.rule(name).keep_inputs)
    }
    assert found <= ALIKE
    # Their names don't tell.
    for name in ("_onehot_encode", "_ravel_multi_index", "_unravel_index"):
        assert policy.rule(name).keep_inputs == registry()[name].inputs
        assert policy.rule(name).op_class == "untouched"
    for name in ("Embedding", "_contrib_SparseEmbedding"):
        assert "data" in policy.rule(name).keep_inputs


# ---------------------------------------------------------------------- evidence for bfloat16

PROBE = json.loads((ROOT / "lists" / "bfloat16-probe.json").read_text())["operators"]
# Output and gradient are rounded once, which is 1.7e-3 at most; kernels that truncate reach twice that.
ROUNDING = 4e-3


BFLOAT16 = json.loads(own_data("bfloat16"))


def in_bfloat16():
    """The operators that may compute in bfloat16, but those that do so in float32 on rounded values."""
    missing = {
        name for group in BFLOAT16["missing"] if "unless" not in group for name in expanded(group)
    }
    return sorted(
        name
        for group in BFLOAT16["group"] + BFLOAT16["conditional"]
        if group.get("class", group.get("otherwise")) in ("low", "widest", "neutral")
        for name in expanded(group)
        if name not in missing
    )  # fmt: skip


@pytest.mark.parametrize("name", in_bfloat16())
def test_what_computes_in_bfloat16_works_there_and_is_no_slower_or_says_why(name):
    for layout, found in PROBE[name].items():
        assert "failure" not in found, (layout, found)
        assert max(found["output_error"], found["gradient_error"]) < ROUNDING, layout
    layouts = PROBE[name].values()
    slow = any(min(found["forward_speed"], found["training_speed"]) < 0.8 for found in layouts)
    assert slow == (name in NOTES["slower"]), PROBE[name]
