"""Regions of `autocast` in a model's own code: the same in graphs as in eager calls."""

import contextlib

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

import mxamp as amp
from conftest import DTYPES, assert_unpatched
from helpers import custom_operator, exported, initialized, randn, same, untuned, values
from mxamp.framework.patching import _stacks
from mxamp.graph.ir import Graph
from mxamp.policy.regions import REGION
from mxamp.policy.rules import custom_operators

ROWS, UNITS = 32, 16


def off():
    return amp.autocast(enabled=False)


class Net(nn.HybridBlock):
    """A dense layer, what is tested, and a dense layer."""

    def __init__(self, body, **options):
        super().__init__(**options)
        self._body = body
        with self.name_scope():
            self.first = nn.Dense(UNITS, in_units=UNITS, flatten=False)
            self.inner = nn.Dense(UNITS, in_units=UNITS, flatten=False)
            self.last = nn.Dense(UNITS, in_units=UNITS, flatten=False)

    def hybrid_forward(self, F, x):
        return self.last(self._body(F, self.inner, self.first(x)))


def made(body):
    net = initialized(Net(body), init=mx.init.Normal(0.5))
    for seed, param in enumerate(net.collect_params().values()):
        data = randn(*param.shape, seed=seed, scale=0.4)
        param.set_data(data.as_np_ndarray() if mx.util.is_np_array() else data)
    return net


# The code in the middle of a network: it computes with `x`, from the first layer, and a dense layer.


def in_off(F, layer, x):
    with off():
        return F.exp(layer(F.cast(x, "float32")) * 0.1)


def in_region(name, **options):
    def body(F, layer, x):
        with amp.autocast(**options):
            return F.exp(layer(x) * 0.1)

    body.__name__ = f"in_{name}"
    return body


in_float16, in_bare = in_region("float16", dtype="float16"), in_region("bare")
in_bfloat16 = in_region("bfloat16", policy=untuned("bfloat16"))


def in_policy(F, layer, x):
    policy = untuned("bfloat16").override(fp32=["FullyConnected"], low=["exp"])
    with amp.autocast(policy=policy):
        return layer(F.exp(layer(x) * 0.1))


def nested(F, layer, x):
    with amp.autocast(policy=untuned("bfloat16")):
        x = layer(x)
        with off():
            x = F.exp(F.cast(x, "float32") * 0.1)
            with amp.autocast():
                x = layer(x)
        return F.exp(layer(x) * 0.1)


@amp.float_function
def float_loss(F, layer, x):
    return F.exp(layer(x) * 0.1)


@amp.half_function
def half_scores(F, x, y):
    return F.exp(x * 0.1) + F.tanh(y)


@amp.promote_function
def mixed(F, x, y):
    return F.relu(x), F.relu(y[0])


def in_half_function(F, layer, x):
    with off():
        y = F.exp(F.cast(layer(F.cast(x, "float32")), "float32") * 0.1)
    return half_scores(F, y, layer(x))


def in_promote_function(F, layer, x):
    with off():
        y = F.exp(F.cast(layer(F.cast(x, "float32")), "float32") * 0.1)
    x, y = mixed(F, x, [y])
    return F.concat(F.relu(x), F.relu(y), dim=1).slice_axis(axis=1, begin=4, end=4 + UNITS)


FORMS = [
    in_off, in_float16, in_bfloat16, in_bare, in_policy, nested, float_loss,
    in_half_function, in_promote_function,
]  # fmt: skip

AROUND = {
    "float16": lambda: amp.autocast(policy=untuned("float16")),
    "bfloat16": lambda: amp.autocast(policy=untuned("bfloat16")),
    "nothing": contextlib.nullcontext,
    "off": off,
}


def eager(net, x, around):
    with around():
        return values(net(x)).astype("float32")


def hybridized(net, x, around, **flags):
    net.hybridize(**flags)
    with around():
        net(x)
        return net(x)


def static(net, x, around):
    return hybridized(net, x, around, static_alloc=True, static_shape=True)


def traced_before(net, x, around):
    net.hybridize()
    net(x)
    with around():
        return net(x)


def bound(net, x, around):
    arrays = {name: param.data() for name, param in net.collect_params().items()}
    symbol = net(mx.sym.var("data"))
    with around():
        return symbol.bind(mx.cpu(), {**arrays, "data": x}).forward()[0]


def low_model(net, x, around):
    with around():
        policy = amp.current_policy()
    return amp.convert_hybrid_block(net, policy=policy, example_inputs=x)


def converted(net, x, around):
    return low_model(net, x, around)(x)


WAYS = [hybridized, static, traced_before, bound]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("body", FORMS, ids=lambda form: form.__name__)
def test_graphs_follow_regions_as_eager_calls_do(body, around, tmp_path):
    x, net = randn(ROWS, UNITS), made(body)
    wanted = eager(net, x, AROUND[around])
    ways = {way.__name__: way(net, x, AROUND[around]) for way in WAYS}
    if around in DTYPES:
        ways["converted"] = converted(net, x, AROUND[around])
        with AROUND[around]():
            ways["loaded"] = exported(net, tmp_path)(x)
        low = low_model(net, x, AROUND[around])
        ways["converted and loaded"] = exported(low, tmp_path)(x)
    wrong = [name for name, found in ways.items() if not same(found, wanted)]
    assert not wrong


@pytest.mark.matrix
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("body", FORMS, ids=lambda form: form.__name__)
def test_gradients_go_through_regions(body, around):
    x, net, found = randn(ROWS, UNITS), made(body), []
    for hybridize in (False, True):
        net.hybridize(hybridize)
        x.attach_grad()
        with AROUND[around](), autograd.record():
            loss = mx.nd.cast(net(x), "float32").sum()
        loss.backward()
        arrays = [x.grad, *[param.grad() for param in net.collect_params().values()]]
        found.append([values(array) for array in arrays])
    for wanted, got in zip(*found):
        # MXNet's Cast truncates what goes through it eagerly.
        np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2 * np.abs(wanted).max())


def in_foreach(F, layer, x):
    def step(row, states):
        with off():
            total = states[0] + layer(F.exp(F.cast(row, "float32") * 0.1))
        return layer(row), [total]

    rows, states = F.contrib.foreach(step, F.reshape(x, (4, 8, UNITS)), [F.zeros((8, UNITS))])
    return F.concat(F.reshape(rows, (ROWS, UNITS)), states[0], dim=0)


def in_cond(F, layer, x):
    def then():
        with off():
            return layer(F.cast(x, "float32"))

    return F.contrib.cond(F.ones((1,)) > 0, then, lambda: F.cast(layer(x), "float32"))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("body", [in_foreach, in_cond], ids=lambda f: f.__name__)
def test_bodies_of_loops_follow_regions(body, around):
    x, net = randn(ROWS, UNITS), made(body)
    wanted = eager(net, x, AROUND[around])
    ways = [hybridized, traced_before, bound] + ([converted] if around in DTYPES else [])
    for way in ways:
        assert same(way(net, x, AROUND[around]), wanted)


def test_regions_around_the_call_are_not_the_blocks(tmp_path):
    x, net = randn(ROWS, UNITS), made(in_off)
    net.hybridize()
    with amp.autocast("bfloat16"):
        net(x)
    net.export(str(tmp_path / "net"))
    graph = Graph.from_symbol(mx.sym.load(str(tmp_path / "net-symbol.json")))
    assert graph.marks == {"off"}
    assert sum(REGION in node.attrs for node in graph.nodes if not node.is_variable) == 4


@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("body", FORMS, ids=lambda form: form.__name__)
def test_plain_mxnet_takes_no_notice(body, tmp_path):
    x, net = randn(ROWS, UNITS), made(body)
    wanted = values(net(x))
    net.hybridize()
    net(x)
    amp.shutdown()
    block = exported(net, tmp_path)
    assert block(x).dtype == np.float32
    np.testing.assert_allclose(values(block(x)), wanted.astype("float32"), rtol=0.05, atol=0.05)


REASONS = [
    (in_off, "exp", "autocast(enabled=False) in the model's code"),
    (in_policy, "exp", "autocast(policy=...) in the model's code: given as low"),
    (float_loss, "_copy", "float_function in the model's code"),
    (in_half_function, "_copy", "half_function in the model's code"),
]


@pytest.mark.parametrize("mode", ["inference", "training", "converted"])
@pytest.mark.parametrize("body, operator, reason", REASONS)
def test_explain_names_the_region(body, operator, reason, mode):
    plan = amp.explain(made(body), "bfloat16", example_inputs=randn(ROWS, UNITS), mode=mode)
    assert all(node.reason.startswith(reason) for node in plan.filter(operator=operator))


def test_user_lists_of_layers_come_before_regions():
    net, x = made(in_bfloat16), randn(ROWS, UNITS)
    policy = amp.Policy.default("float16", "cpu").override(fp32_layers=["*dense1_*"])
    plan = amp.explain(net, policy=policy, example_inputs=x).filter(name="*dense*")
    assert [node.precision for node in plan] == ["float16", "float32", "float16"]


def test_patches_stay_for_graphs_that_enter_regions_themselves():
    x, net = randn(ROWS, UNITS), made(in_off)
    net.hybridize()
    net(x)
    assert_unpatched()
    lowered = made(in_bfloat16)
    lowered(x)
    assert_unpatched()
    lowered.hybridize()
    first = lowered(x)
    assert _stacks
    amp.shutdown()
    assert_unpatched()
    assert same(lowered(x), first)
    assert not amp.is_enabled()


def test_symbols_hold_their_regions_until_shutdown():
    with amp.autocast("float16"), amp.autocast(policy=untuned("bfloat16")):
        symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=UNITS, name="fc")
    for wanted in ("bfloat16", "float32"):
        executor = symbol.simple_bind(mx.cpu(), data=(64, UNITS))
        with amp.debugging.operator_stats() as stats:
            executor.forward()
        assert stats["FullyConnected"] == {wanted: 1}
        amp.shutdown()


def generator():
    yield


async def coroutine():
    pass


@pytest.mark.parametrize("function", [generator, coroutine])
@pytest.mark.parametrize("decorator", [amp.autocast("bfloat16"), amp.float_function])
def test_functions_that_run_later_are_not_decorated(function, decorator):
    with pytest.raises(amp.ArgumentError, match="generator or coroutine.*with amp.autocast"):
        decorator(function)


@custom_operator("regions_twice")
class Twice(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * 2)


class CustomInside(mx.gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        with amp.autocast(enabled=False):
            return F.exp(F.Custom(x, op_type="regions_twice"))


@pytest.mark.parametrize("hybrid", [False, True])
def test_custom_operators_are_not_marked(hybrid):
    """MXNet would pass the mark to their constructor, which ends the process."""
    amp.init("bfloat16")
    x, net = randn(2, 3), CustomInside()
    net.hybridize(hybrid)
    np.testing.assert_allclose(values(net(x)), np.exp(2 * values(x)), rtol=1e-5)
    nodes = Graph.from_symbol(net(mx.sym.var("data"))).nodes
    assert {node.op: REGION in node.attrs for node in nodes[1:]} == {"Custom": False, "exp": True}


def test_a_half_custom_operator_in_a_region_is_warned_of(caplog):
    with amp.autocast("bfloat16"):
        custom_operators["regions_twice"] = "low"
        try:
            CustomInside()(mx.sym.var("data"))
        finally:
            custom_operators["regions_twice"] = "fp32"
    assert "custom operator 'regions_twice'" in caplog.text
