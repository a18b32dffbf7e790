import mxnet as mx
import pytest
from mxnet import autograd, nd

import mxamp as amp
from helpers import initialized, randn, with_avx512
from models import GPU
from mxamp.tools.debugging.measured import block_of
from nets import Control, made, perceptron


def dense_net():
    data = mx.sym.var("data")
    net = mx.sym.FullyConnected(data, num_hidden=4, name="fc")
    net = mx.sym.Activation(net, act_type="softrelu", name="act")
    return mx.sym.softmax(mx.sym.BlockGrad(net, name="block"), name="soft")


def test_each_operator_has_a_precision_and_a_reason():
    plan = amp.explain(dense_net(), policy=GPU)
    assert [(n.name, n.operator, n.precision) for n in plan] == [
        ("fc", "FullyConnected", "float16"), ("act", "Activation", "float32"),
        ("block", "BlockGrad", "float32"), ("soft", "softmax", "float32"),
    ]  # fmt: skip
    assert "act_type=softrelu" in plan["act"].reason
    assert "tensor cores" in plan["fc"].reason
    assert len(plan) == 4
    lines = str(plan).splitlines()
    assert lines[1].split()[:3] == ["fc", "FullyConnected", "float16"]
    summary = "if converted to float16: 4 operators: 1 in float16, 3 in float32; 4 casts"
    assert lines[-1].startswith(summary)
    assert (plan.casts[0].source, plan.casts[0].dtype) == ("data", "float16")
    assert "fc" in plan and "none" not in plan
    with pytest.raises(LookupError, match="unknown operator name 'none'"):
        plan["none"]
    assert [node.name for node in plan.filter(name="s*", precision="float32")] == ["soft"]
    assert [node.name for node in plan.filter(operator="_npx_activation")] == ["act"]


def test_what_runs_is_explained_by_the_policy_that_is_on():
    def explained(*arguments, **options):
        plan = amp.explain(dense_net(), *arguments, **options)
        return plan.target_dtype, plan.mode

    with amp.autocast("bfloat16"):
        assert explained() == ("bfloat16", "inference")
        assert explained(mode="training") == ("bfloat16", "training")
        assert explained("float16", mode="training") == ("float16", "training")
        assert explained("bfloat16") == ("bfloat16", "converted")
        assert explained(mode="converted") == ("bfloat16", "converted")
    assert explained() == ("float16", "converted")  # as convert_symbol(net)


@with_avx512
def test_a_block_that_has_run_is_explained_as_it_ran():
    # A dense layer of 30 rows computes in bfloat16 in inference, and in float32 in training.
    net, data = mx.gluon.nn.Dense(1024, in_units=1024, prefix="fc_"), nd.ones((30, 1024))
    initialized(net, hybridize=True)
    with amp.autocast("bfloat16"):
        net(data)
        assert amp.explain(net)["fc_fwd"].precision == "bfloat16"
        with autograd.record():
            net(data)
    plan = amp.explain(net)
    assert (plan.target_dtype, plan.mode) == ("bfloat16", "training")
    assert plan["fc_fwd"].precision == "float32"
    assert plan.summary().startswith("training in bfloat16: 1 operator")
    assert amp.explain(net, mode="inference")["fc_fwd"].precision == "bfloat16"
    with amp.autocast("float16"):
        assert amp.explain(net).target_dtype == "float16"


@with_avx512
@pytest.mark.parametrize("options", [{}, {"cast_optional_params": True}, {"fuse": True}])
def test_a_converted_block_is_explained_by_its_own_policy(options, caplog, on_machine):
    on_machine(features={"avx512", "avx512_bf16"})
    net, data = mx.gluon.nn.Dense(1024, in_units=1024, activation="relu"), nd.ones((300, 1024))
    net.initialize()
    fast = amp.convert_hybrid_block(net, "bfloat16", example_inputs=data, **options)
    for _ in range(2):
        plan = amp.explain(fast)
        assert (plan.target_dtype, plan.counts()["bfloat16"]) == ("bfloat16", 2)
        fast(data)
    assert not caplog.records
    if not options:
        fast(data[:2])
        assert amp.explain(fast).counts()["float32"]  # as it ran: a layer of few rows


def test_a_converted_symbol_is_shown_as_it_is(caplog):
    symbol = amp.convert_symbol(dense_net(), policy=GPU)
    caplog.clear()
    plan = amp.explain(symbol)
    assert (plan.mode, plan.target_dtype) == ("as it is", "float16")
    again = amp.explain(symbol, policy=GPU)
    assert [(n.name, n.precision) for n in plan] == [(n.name, n.precision) for n in again]
    assert plan["soft"].reason == "its inputs are float32"
    assert plan.summary().startswith("the model as it is: 4 operators: ")
    assert not caplog.records


def test_integer_inputs_of_a_run_are_known():
    plan = amp.explain(mx.sym.shape_array(mx.sym.var("data")), policy=GPU)
    assert plan.summary() == "if converted to float16: 1 operator: 1 as is; 0 casts"
    net = initialized(mx.gluon.nn.Embedding(4, 3), hybridize=True)
    with amp.autocast("float16"):
        net(nd.array([1, 2], dtype="int32"))
    assert all(cast.source != "data" for cast in amp.explain(net).casts)


def test_reasons_name_exclusions_and_missing_kernels():
    plan = amp.explain(dense_net(), policy=GPU, excluded_sym_names=["f*"])
    assert plan["fc"].precision == "float32" and "by name" in plan["fc"].reason
    assert not plan.casts
    on_cpu = amp.explain(dense_net(), policy=amp.Policy.default("float16", "cpu"))
    assert "no half-precision gemm" in on_cpu["fc"].reason


def test_a_block_that_has_not_run_needs_an_example():
    net, data = made(perceptron)
    with pytest.raises(amp.StateError, match="hybridize"):
        amp.explain(net)
    plan = amp.explain(net, policy=GPU, example_inputs=data[0])
    assert plan.counts()["float16"] >= 2 and plan.inputs == ("data",)
    layer = plan.nodes[0].name
    with pytest.raises(amp.UnknownNameError, match=f"closest .*'{layer}'.*Gluon adds _fwd"):
        plan[layer[: -len("_fwd")]]


def test_bodies_of_loops_are_explained():
    plan = amp.explain(Control("foreach")(mx.sym.var("data")), policy=GPU)
    assert any(n.operator == "FullyConnected" and n.precision == "float16" for n in plan.nodes)


def test_to_dot():
    params = {"fc_weight": randn(4, 4), "fc_bias": randn(4)}
    dot = amp.explain(dense_net(), policy=GPU, params=params).to_dot()
    lines = {line.split(" [")[0].strip(): line for line in dot.splitlines()}
    assert r'label="fc\nFullyConnected"' in lines['"fc"'] and "#8fd18f" in lines['"fc"']
    assert "#f5d76e" in lines['"soft"']
    assert '"data" -> "fc" [label="float16"]' in dot
    assert '"block" -> "soft"\n' in dot
    assert "fc_weight" not in dot


def test_modes_and_shapes():
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1024, name="fc")
    weight = {"fc_weight": mx.nd.zeros((1024, 1024)), "fc_bias": mx.nd.zeros(1024)}
    found = []
    for rows, mode in ((4, "converted"), (4, "inference"), (30, "inference"), (30, "training")):
        shapes = {"data": (rows, 1024)}
        plan = amp.explain(net, "bfloat16", params=weight, mode=mode, input_shapes=shapes)
        found.append(plan["fc"].precision)
    assert found == ["bfloat16", "float32", "bfloat16", "float32"]
    block, _ = block_of((net, weight, {}), [])
    for rows, precision in ((4, "float32"), (30, "bfloat16")):
        example = nd.ones((rows, 1024))
        plan = amp.explain(block, "bfloat16", example_inputs=example, mode="inference")
        assert plan["fc"].precision == precision


class Region(mx.gluon.HybridBlock):
    """Two dense layers, the second in a float32 region."""

    def __init__(self):
        super().__init__(prefix="region_")
        with self.name_scope():
            self.first = mx.gluon.nn.Dense(4, in_units=4, prefix="first_")
            self.second = mx.gluon.nn.Dense(4, in_units=4, prefix="second_")

    def hybrid_forward(self, F, x):
        x = self.first(x)
        with amp.autocast("float32"):
            return self.second(x)


@pytest.mark.parametrize("mode", ["converted", "inference", "training"])
def test_a_float32_region_computes_in_float32(mode):
    net = initialized(Region(), hybridize=True)
    net(nd.ones((2, 4)))
    plan = amp.explain(net, policy=GPU, mode=mode)
    assert plan["region_first_fwd"].precision == "float16"
    second = plan["region_second_fwd"]
    assert second.precision == "float32" and second.reason.startswith("autocast('float32') in the")
    assert second.inputs[0] == ("region_first_fwd", "float32")
