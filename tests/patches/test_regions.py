"""Regions of `autocast` in a model's own code: the same in graphs as in eager calls."""

import contextlib

import mxnet as mx
import pytest
from mxnet.gluon import SymbolBlock, nn

import mxamp as amp
from helpers import randn, same, values

ROWS, UNITS = 32, 16


def untuned(dtype):
    return amp.Policy.default(dtype, "cpu").untuned()


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
    net = Net(body)
    net.initialize(mx.init.Normal(0.5))
    for name, param in net.collect_params().items():
        param.set_data(randn(*param.shape, seed=len(name), scale=0.4))
    return net


# What each does to `x`, which the first layer has computed, with a dense layer.


def in_off(F, layer, x):
    with off():
        return F.exp(layer(F.cast(x, "float32")) * 0.1)


def in_off_as_it_comes(F, layer, x):
    with off():
        x = F.exp(x * 0.1)
    return layer(x)


def in_float16(F, layer, x):
    with amp.autocast("float16"):
        return F.exp(layer(x) * 0.1)


def in_bfloat16(F, layer, x):
    with amp.autocast("bfloat16"):
        return F.exp(layer(x) * 0.1)


def in_bare(F, layer, x):
    with amp.autocast():
        return F.exp(layer(x) * 0.1)


def in_policy(F, layer, x):
    policy = untuned("bfloat16").override(fp32=["FullyConnected"], low=["exp"])
    with amp.autocast(policy=policy):
        return layer(F.exp(layer(x) * 0.1))


def nested(F, layer, x):
    with amp.autocast("bfloat16"):
        x = layer(x)
        with off():
            x = F.exp(F.cast(x, "float32") * 0.1)
            with amp.autocast():
                x = layer(x)
        return F.exp(layer(x) * 0.1)


def again_in_off(F, layer, x):
    with off(), amp.autocast():
        x = layer(x)
    with off():
        return layer(F.cast(x, "float32"))


def twice(F, layer, x):
    x = layer(x)
    with off():
        return layer(F.cast(x, "float32"))


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


def promoted_alike(F, layer, x):
    x, y = mixed(F, x, [layer(x)])
    return F.relu(x) + y


FORMS = [
    in_off, in_off_as_it_comes, in_float16, in_bfloat16, in_bare, in_policy, nested, again_in_off,
    twice, float_loss, in_half_function, in_promote_function, promoted_alike,
]  # fmt: skip

AROUND = {
    "float16": lambda: amp.autocast(policy=untuned("float16")),
    "bfloat16": lambda: amp.autocast(policy=untuned("bfloat16")),
    "nothing": contextlib.nullcontext,
    "off": off,
}


def eager(net, x, around):
    with around(), amp.debugging.operator_stats() as stats:
        outputs = net(x)
    return values(outputs).astype("float32"), stats


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


def traced_under_another(net, x, around):
    net.hybridize()
    with amp.autocast("bfloat16"):
        net(x)
    with around():
        return net(x)


def bound(net, x, around):
    symbol = net(mx.sym.var("data"))
    arrays = {name: param.data() for name, param in net.collect_params().items()}
    with around():
        executor = symbol.bind(mx.cpu(), {**arrays, "data": x})
        return executor.forward()[0]


def module(net, x, around):
    symbol = net(mx.sym.var("data"))
    arrays = {name: param.data() for name, param in net.collect_params().items()}
    with around():
        model = mx.mod.Module(symbol, label_names=None)
        model.bind([("data", x.shape)], for_training=False)
        model.set_params(arrays, {})
        model.forward(mx.io.DataBatch([x]), is_train=False)
        return model.get_outputs()[0]


def loaded(net, x, around, folder):
    net.hybridize()
    net(x)
    net.export(str(folder / "net"))
    files = str(folder / "net-symbol.json"), ["data"], str(folder / "net-0000.params")
    with around():
        return SymbolBlock.imports(*files)(x)


def converted(net, x, around):
    with around():
        policy = amp.current_policy()
    return amp.convert_hybrid_block(net, policy=policy, example_inputs=x)(x)


def converted_and_loaded(net, x, around, folder):
    with around():
        policy = amp.current_policy()
    model = amp.convert_hybrid_block(net, policy=policy, example_inputs=x)
    model.export(str(folder / "net"))
    files = str(folder / "net-symbol.json"), ["data"], str(folder / "net-0000.params")
    return SymbolBlock.imports(*files)(x)


WAYS = [hybridized, static, traced_before, traced_under_another, bound, module]


@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("body", FORMS, ids=lambda form: form.__name__)
def test_graphs_follow_regions_as_eager_calls_do(body, around, tmp_path):
    x, net = randn(ROWS, UNITS), made(body)
    wanted, _ = eager(net, x, AROUND[around])
    ways = {way.__name__: way(net, x, AROUND[around]) for way in WAYS}
    if around in ("float16", "bfloat16"):
        ways["converted"] = converted(net, x, AROUND[around])
        ways["loaded"] = loaded(net, x, AROUND[around], tmp_path)
        ways["converted and loaded"] = converted_and_loaded(net, x, AROUND[around], tmp_path)
    wrong = [name for name, found in ways.items() if not same(found, wanted)]
    assert not wrong
