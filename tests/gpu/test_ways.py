"""Each way to run a graph gives the same on GPUs as on CPUs, where products round once too."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import mxamp as amp
from helpers import backpropagate, custom_operator, initialized, kind, leaf, sequential
from nets import NETS, Control, attention, made

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Cannot decide type")]


def on(device, make):
    """Return one of the nets and its inputs on a device, with the same values each time."""
    np.random.seed(0)
    net, data = made(make)
    params = net.collect_params()
    params.reset_ctx(device)
    return net, [x.as_in_context(device) for x in data]


def symbolic(net, data, device):
    """Return a net's symbol, and its arguments and auxiliary states on a device."""
    symbol = net(*[mx.sym.var(f"data{i}") for i in range(len(data))])
    arrays = {f"data{i}": x for i, x in enumerate(data)}
    arrays.update((name, p.data(device)) for name, p in net.collect_params().items())
    args = {name: arrays[name] for name in symbol.list_arguments()}
    return symbol, args, {name: arrays[name] for name in symbol.list_auxiliary_states()}


def bound(net, data, device):
    with amp.autocast(enabled=False):
        symbol, args, states = symbolic(net, data, device)
    return symbol.bind(device, args, aux_states=states, grad_req="null").forward()[0]


def simply_bound(net, data, device):
    with amp.autocast(enabled=False):
        symbol, args, states = symbolic(net, data, device)
    shapes = {name: array.shape for name, array in args.items()}
    executor = symbol.simple_bind(device, grad_req="null", **shapes)
    executor.copy_params_from(args, states)
    return executor.forward()[0]


def of_a_module(net, data, device):
    with amp.autocast(enabled=False):
        symbol, args, states = symbolic(net, data, device)
    names = [f"data{i}" for i in range(len(data))]
    module = mx.mod.Module(symbol, names, label_names=None, context=device)
    shapes = [(name, args[name].shape) for name in names]
    module.bind(shapes, for_training=False)
    module.set_params({n: a for n, a in args.items() if n not in names}, states)
    module.forward(mx.io.DataBatch(data), is_train=False)
    return module.get_outputs()[0]


def hybridized(net, data, device, **flags):
    net.hybridize(**flags)
    net(*data)
    return net(*data)


def static(net, data, device):
    return hybridized(net, data, device, static_alloc=True, static_shape=True)


def imported(net, data, device):
    with amp.autocast(enabled=False):
        symbol, args, states = symbolic(net, data, device)
    block = gluon.SymbolBlock(symbol, [mx.sym.var(f"data{i}") for i in range(len(data))])
    for name, param in block.collect_params().items():
        param._load_init({**args, **states}[name], device)
    block.hybridize()
    return block(*data)


def converted(net, data, device, **options):
    policy = amp.current_policy()
    net.hybridize()
    with amp.autocast(enabled=False):
        net(*data)
        low = amp.convert_hybrid_block(net, policy=policy, example_inputs=data, **options)
        return low(*data)


def cast_offline(net, data, device):
    return converted(net, data, device, cast_optional_params=True)


def eager(net, data, device):
    return net(*data)


WAYS = [
    eager, hybridized, static, bound, simply_bound, of_a_module, imported, converted, cast_offline,
]  # fmt: skip


def assert_close(mine, theirs, tolerance=4e-3):
    mine, theirs = (np.asarray(x, dtype="float64") for x in (mine, theirs))
    assert np.isfinite(mine).all()
    scale = max(float(np.abs(theirs).max()), 1e-6)
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * scale)


def output(way, make, device, policy):
    net, data = on(device, make)
    with amp.autocast(policy=policy):
        return way(net, data, device).astype("float32").asnumpy()


@pytest.mark.parametrize("make", NETS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_inference(way, make, device, policy, fusion):
    if way is of_a_module and make is attention:
        pytest.skip("a module's inputs share their first axis")
    wanted = output(eager, make, mx.cpu(), amp.Policy.default("float16", "cpu"))
    assert_close(output(way, make, device, policy), wanted)


def trained(make, device, policy, **hybrid):
    """Return the loss and the gradients of one pass, by parameter."""
    net, data = on(device, make)
    if hybrid:
        net.hybridize(**hybrid)
    with amp.autocast(policy=policy):
        loss = backpropagate(lambda: (net(*data).astype("float32") ** 2).mean())
    params = net.collect_params().items()
    found = {name.partition("_")[2]: p.grad(device) for name, p in params if p.grad_req != "null"}
    assert {kind(gradient) for gradient in found.values()} == {"float32"}
    return loss.asscalar(), {name: gradient.asnumpy() for name, gradient in found.items()}


HOW = {"eager": {}, "hybridized": {"static_alloc": False}, "static": {"static_alloc": True}}


@pytest.mark.parametrize("make", NETS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("how", HOW)
def test_gradients(how, make, device, policy, fusion):
    loss, gradients = trained(make, device, policy, **HOW[how])
    wanted_loss, wanted = trained(make, mx.cpu(), amp.Policy.default("float16", "cpu"))
    assert_close(loss, wanted_loss)
    largest = max(float(np.abs(gradient).max()) for gradient in wanted.values())
    for mine, theirs in zip(gradients.values(), wanted.values()):
        # Where gradients cancel, rounding is what is left.
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-2 * largest)


@pytest.mark.parametrize("name", ["foreach", "while_loop", "cond"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_loops(name, hybrid, device, policy, fusion):
    found = []
    for where, used in ((device, policy), (mx.cpu(), amp.Policy.default("float16", "cpu"))):
        net = initialized(Control(name), init=mx.init.Constant(0.1), ctx=where, hybridize=hybrid)
        with amp.autocast(policy=used):
            out = net(mx.nd.ones((3, 2, 4), ctx=where))
        out = out[0] if isinstance(out, (list, tuple)) else out
        found.append(out.astype("float32").asnumpy())
    assert_close(*found)


@custom_operator("gpu_test_doubled")
class Doubled(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * 2)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0] * 2)


class WithCustom(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = gluon.nn.Dense(4, in_units=4)

    def hybrid_forward(self, F, x):
        return self.dense(F.Custom(self.dense(x), op_type="gpu_test_doubled"))


@pytest.mark.parametrize("hybrid", [False, True])
def test_custom_operators(hybrid, device, policy, fusion):
    net = initialized(WithCustom(), init=mx.init.Constant(0.25), ctx=device, hybridize=hybrid)
    x = leaf(mx.nd.ones((2, 4), ctx=device))
    with amp.autocast(policy=policy):
        out = backpropagate(lambda: net(x))
    assert (out.asnumpy() == 2).all()
    assert (x.grad.asnumpy() == 2).all()


def test_numpy_operators(device, policy, fusion):
    mx.npx.set_np()
    layers = gluon.nn.Dense(8, activation="relu", in_units=4), gluon.nn.Dense(2, in_units=8)
    net = sequential(*layers, init=mx.init.Xavier(), ctx=device)
    found = []
    x = mx.np.random.normal(size=(3, 4), ctx=device)
    for hybrid in (False, True):
        net.hybridize(hybrid)
        with amp.autocast(policy=policy):
            loss = backpropagate(lambda: mx.np.square(mx.np.matmul(net(x), net(x).T)).mean())
        found.append([float(loss), net[0].weight.grad(device).asnumpy()])
    assert_close(found[0][0], found[1][0])
    assert_close(found[0][1], found[1][1], 2e-2)
