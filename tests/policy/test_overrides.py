"""Changes to a policy: layers that stay in float32, given as Gluon blocks, and lists replaced."""

import pytest
from mxnet.gluon import nn, rnn

import mxamp as amp
from helpers import exported, randn
from mxamp.policy.overrides import layer_patterns

POLICY = amp.Policy.default("bfloat16")


class Head(nn.HybridBlock):
    """A block with a child that has a name of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.out = nn.Dense(4, prefix="out_")

    def hybrid_forward(self, F, x):
        return F.tanh(self.out(x))


@pytest.fixture
def net():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(12):
            net.add(nn.Dense(8))
        two = nn.HybridSequential(prefix="")
        two.add(nn.Dense(8, prefix="a_"), nn.Dense(8, prefix="aa_"))
        net.add(two, Head())
    net.initialize()
    net(randn(64, 8))
    return net


GIVEN = {
    "a block": (lambda net: net[1], {"net_dense1_fwd"}),
    "a name": (lambda net: "net_dense1_fwd", {"net_dense1_fwd"}),
    "a list": (lambda net: [net[10], "*dense2_*"], {"net_dense10_fwd", "net_dense2_fwd"}),
    "children alone": (lambda net: net[12], {"net_a_fwd", "net_aa_fwd"}),
    "one child": (lambda net: net[12][0], {"net_a_fwd"}),
    "with children": (lambda net: net[13], {"net_out_fwd", "net_head0_tanh0"}),
}


@pytest.mark.parametrize("case", GIVEN)
def test_blocks_stand_for_their_layers(net, case):
    choose, names = GIVEN[case]
    x, given = randn(64, 8), choose(net)
    everywhere = amp.explain(net, POLICY.target_dtype, example_inputs=x)
    for options in ({"policy": POLICY.override(fp32_layers=given)}, {"excluded_sym_names": given}):
        target = None if "policy" in options else "bfloat16"
        plan = amp.explain(net, target, example_inputs=x, **options)
        kept = {node.name for node in plan if "is kept in float32 by name" in node.reason}
        assert kept == names
        others = [node for node in plan if node.name not in names and node.operator != "tanh"]
        assert all(node.precision == everywhere[node.name].precision for node in others)


def test_recurrent_layers_and_symbol_blocks(net, tmp_path):
    assert layer_patterns("here", rnn.LSTM(4, prefix="lstm_")) == [["lstm_*"]]
    net.hybridize()
    net(randn(64, 8))
    with pytest.warns(UserWarning, match="Cannot decide type"):
        block = exported(net, tmp_path)
    (names,) = layer_patterns("here", block)
    assert {"net_dense0_fwd", "net_head0_tanh0"} <= set(names)


def test_a_replaced_list_leaves_the_other_lists_as_they_are():
    policy = POLICY.override(low=["exp"], replace_lists=True)
    assert policy.rule("FullyConnected").op_class == "neutral"
    for name in ("softmax", "add_n", "Activation"):
        assert policy.rule(name).op_class == POLICY.rule(name).op_class != "low"
