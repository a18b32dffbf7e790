import json

import mxnet as mx
import numpy as np
import pytest

from helpers import ROOT, check_python
from mxamp.errors import UnknownNameError
from mxamp.framework import operators
from mxamp.framework.operators import prop_class, registry, resolve, starts_backward, with_trait
from mxamp.graph.ir import VERSION, Graph, Node


def test_the_whole_registry_is_there():
    gpu_build = "CuDNNBatchNorm" in registry()
    assert len(registry()) == len(operators.by_handle()) == (892 if gpu_build else 886)
    if not gpu_build:
        assert sum(1 + len(op.aliases) for op in registry().values()) == 1167


@pytest.mark.parametrize("alias, name", [
    ("concat", "Concat"), ("Concat", "Concat"), ("_npx_convolution", "Convolution"),
    ("sum_axis", "sum"), ("_sparse_dot", "dot"), ("linalg_gemm2", "_linalg_gemm2"),
    ("softmax", "softmax"), ("identity", "_copy"),
])  # fmt: skip
def test_resolve(alias, name):
    assert resolve(alias).name == name
    assert resolve(alias) is registry()[name]


@pytest.mark.parametrize(
    "name, close", [("Convolutoin", "Convolution"), ("Dense", "Full"), (7, "")]
)
def test_unknown_names(name, close):
    with pytest.raises(UnknownNameError, match=close):
        resolve(name)


def test_what_is_known_of_an_operator():
    norm = resolve("BatchNorm")
    assert norm.inputs == ("data", "gamma", "beta", "moving_mean", "moving_var")
    assert norm.defaults["axis"] == "1"
    assert norm.mutable_inputs == (3, 4)
    assert not norm.variadic
    assert resolve("Concat").variadic
    assert resolve("add_n").variadic


def test_an_rnn_has_a_cell_state_only_as_lstm():
    rnn = resolve("RNN")
    assert rnn.positions(("sequence_length",), {"mode": "lstm"}) == (4,)
    assert rnn.positions(("sequence_length",), {"mode": "gru"}) == (3,)


# Attributes without which an operator that writes to its inputs can't be made.
REQUIRED = {
    "_contrib_SyncBatchNorm": {"key": "k"}, "signum_update": {"lr": 1}, "ftml_update": {"lr": 1, "t": 1},
    "lamb_update_phase1": {"t": 1, "wd": 0}, "mp_lamb_update_phase1": {"t": 1, "wd": 0},
    "_adamw_update": {"lr": 1, "eta": 1}, "_mp_adamw_update": {"lr": 1, "eta": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n, op in registry().items() if op.mutable_inputs])
def test_mutable_inputs_are_what_mxnet_says(name):
    operator = registry()[name]
    count = max(len(operator.inputs), max(operator.mutable_inputs) + 1)
    if name.startswith("_contrib_quantized"):
        pytest.skip("takes calibrated inputs only")
    attrs = REQUIRED.get(name, {"lr": 1} if "update" in name else {})
    variables = [Node("null", f"v{i}") for i in range(count)]
    node = Node(name, "n", {k: str(v) for k, v in attrs.items()}, [(i, 0) for i in range(count)])
    symbol = Graph([*variables, node], [(count, 0)], VERSION).to_symbol()
    assert symbol.list_auxiliary_states() == [f"v{i}" for i in operator.mutable_inputs]


# ---------------------------------------------------------------------- who starts the backward pass

PROBE = json.loads((ROOT / "lists" / "loss-outputs-probe.json").read_text())["operators"]


def test_every_operator_was_probed():
    in_gpu_builds = ("CuDNNBatchNorm", "_backward_CuDNN", "_FusedOp", "_contrib_mrcnn_mask_target")
    assert set(PROBE) >= {name for name in registry() if not name.startswith(in_gpu_builds)}
    verdicts = {"ignores", "adds", "scales", "zero", "none", "not probed"}
    for name, found in PROBE.items():
        assert found["verdict"] in verdicts
        assert found.get("reason") or found["verdict"] != "not probed", name


def test_the_starters_are_those_that_ignore_the_head_gradient():
    ignores = {name for name, found in PROBE.items() if found["verdict"] == "ignores"}
    assert ignores == with_trait("starts_backward")


@pytest.mark.parametrize("name", sorted(with_trait("starts_backward")))
def test_attributes_that_were_probed_beside(name):
    assert starts_backward(name, {})
    for variant in PROBE[name].get("variants", []):
        assert starts_backward(name, variant["attributes"]) == (variant["verdict"] == "ignores")


@pytest.mark.parametrize("name, attributes, starts", [
    ("SoftmaxOutput", {"out_grad": "True"}, True), ("sin", {}, False), ("BlockGrad", {}, False),
    ("_Native", {}, False), ("_Native", {"need_top_grad": "False"}, True),
    ("IdentityAttachKLSparseReg", {}, False),
])  # fmt: skip
def test_starts_backward(name, attributes, starts):
    assert starts_backward(name, attributes) == starts


# ---------------------------------------------------------------------- operators of users


def register(name, **defaults):
    @mx.operator.register(name)
    class Prop(mx.operator.CustomOpProp):
        def __init__(self, need="1"):
            super().__init__(need_top_grad=defaults.get("need", bool(int(need))))

    return Prop


def starts(name, **attributes):
    return starts_backward("Custom", {"op_type": name, "__ctx_group__": "a", **attributes})


def test_a_custom_operator_says_whether_it_reads_the_head_gradient():
    for need in (True, False):
        cls = register(f"custom_{need}", need=need)
        assert prop_class(f"custom_{need}") is cls
        assert starts(f"custom_{need}") != need
    register("custom_by_attribute")
    assert not starts("custom_by_attribute", need=1)
    assert starts("custom_by_attribute", need=0)


def test_the_last_of_two_classes_of_one_name_counts():
    register("custom_twice", need=True)
    assert not starts("custom_twice")
    register("custom_twice", need=False)
    assert starts("custom_twice")


def test_unknown_custom_operators_need_the_head_gradient_until_they_are_registered():
    register("custom_fails", need=False)
    assert not starts("custom_fails", unknown=1)
    assert not starts("no_such_operator_yet")
    register("no_such_operator_yet", need=False)
    assert starts("no_such_operator_yet")


@pytest.mark.slow
@pytest.mark.skipif(
    not np.__version__.startswith("1.23"), reason="MXNet imports here after mxamp only"
)
def test_a_class_registered_before_mxamp_is_imported():
    check_python("""
        import mxnet as mx

        @mx.operator.register("early")
        class Prop(mx.operator.CustomOpProp):
            def __init__(self):
                super().__init__(need_top_grad=False)

        from mxamp.framework.operators import starts_backward
        assert starts_backward("Custom", {"op_type": "early"})
    """)
