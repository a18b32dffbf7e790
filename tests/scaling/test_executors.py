"""What executors and modules train is scaled, or stays in float32."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

import mxamp as amp
from helpers import pairwise, randn, untuned
from mxamp.graph.gradients import with_scale_input
from mxamp.graph.ir import Graph

DATA = randn(16, 4)
LABEL = nd.array(np.arange(16) % 2)
SHAPES = {"data": (16, 4), "softmax_label": (16,)}


def network(out="softmax"):
    """A net of two parts for two devices."""
    with mx.AttrScope(ctx_group="first"):
        net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="one")
        net = mx.sym.Activation(net, act_type="tanh")
    with mx.AttrScope(ctx_group="second"):
        net = mx.sym.FullyConnected(net, num_hidden=2, name="two")
        if out == "softmax":
            return mx.sym.SoftmaxOutput(net, name="softmax", normalization="batch")
        return mx.sym.MakeLoss(mx.sym.mean(net**2), name="loss")


def values(name, shape):
    seed = sum(map(ord, name))
    return nd.array(np.random.RandomState(seed).uniform(-0.5, 0.5, shape))


def gradient_of_executor(how):
    """The gradient of a weight, after one pass of an executor."""
    symbol = network()
    names = symbol.list_arguments()
    shapes = dict(zip(names, symbol.infer_shape(**SHAPES)[0]))
    arrays = {name: values(name, shape) for name, shape in shapes.items()}
    arrays.update(data=DATA, softmax_label=LABEL)
    if how == "bind":
        grads = {"one_weight": nd.zeros(shapes["one_weight"])}
        executor = symbol.bind(mx.cpu(), arrays, grads, {"one_weight": "write"})
    else:
        executor = symbol.simple_bind(mx.cpu(), **SHAPES)
        executor.copy_params_from(arrays)
    executor.forward(is_train=True)
    executor.backward()
    return executor.grad_dict["one_weight"].asnumpy()


@pytest.mark.parametrize("how", ["bind", "simple_bind"])
@pytest.mark.parametrize("on", ["init", "autocast"])
def test_executors_in_training_stay_in_float32(how, on, caplog):
    plain = gradient_of_executor(how)
    if on == "init":
        amp.init("float16", ctx=mx.cpu())
    for _ in range(2):
        with amp.autocast("float16"):
            np.testing.assert_array_equal(gradient_of_executor(how), plain)
    assert caplog.text.count("stay in float32") == 1
    caplog.clear()
    with amp.autocast(policy=untuned("bfloat16")):
        found = gradient_of_executor(how)
    assert (found != plain).any()
    np.testing.assert_allclose(found, plain, atol=2e-3)
    assert "stay in float32" not in caplog.text


def trained(out, contexts, *, groups, optimizer, sizes=(16, 16, 16)):
    """The parameters of a module after some steps."""
    label = [("softmax_label", (16,))] if out == "softmax" else None
    names = ["softmax_label"] if label else None
    group2ctxs = {"first": mx.cpu(0), "second": mx.cpu(1)} if groups else None
    module = mx.mod.Module(network(out), label_names=names, context=contexts, group2ctxs=group2ctxs)
    module.bind([("data", (16, 4))], label)
    args, _, _ = network(out).infer_shape(**{k: SHAPES[k] for k in SHAPES if k == "data" or label})
    given = zip(network(out).list_arguments(), args)
    module.init_params(arg_params={k: values(k, s) for k, s in given if k not in SHAPES})
    settings = {"learning_rate": 0.5, "rescale_grad": 1.0}
    module.init_optimizer(optimizer=optimizer, optimizer_params=settings)
    for size in sizes:
        batch = mx.io.DataBatch([DATA[:size]], [LABEL[:size]] if label else [])
        module.forward(batch, is_train=True)
        module.backward()
        module.update()
    return {name: array.asnumpy() for name, array in module.get_params()[0].items()}


@pytest.mark.parametrize(
    "out, groups, sizes", pairwise(["softmax", "loss"], [False, True], [(16, 16), (16, 8, 16)])
)
def test_modules_of_a_model_over_two_devices(out, groups, sizes, dtype):
    plain = trained(out, mx.cpu(), groups=groups, optimizer="sgd", sizes=sizes)
    amp.init(policy=untuned(dtype))
    optimizer = amp.decorate("sgd", init_loss_scaling=256)
    found = trained(out, mx.cpu(), groups=groups, optimizer=optimizer, sizes=sizes)
    assert (optimizer.scaling.steps, optimizer.scaling.skips) == (len(sizes), 0)
    for name, array in plain.items():
        np.testing.assert_allclose(found[name], array, atol=3e-3)


def test_added_operators_run_on_the_device_of_their_input():
    """MXNet's fusion for GPUs ends the process at nodes without one."""
    graph = with_scale_input(Graph.from_symbol(network()))
    added = [node for node in graph.nodes if "_amp_" in node.name and not node.is_variable]
    assert len(added) == 6
    assert {node.attrs["__ctx_group__"] for node in added} == {"second"}


def test_a_module_that_is_not_decorated(caplog):
    plain = trained("softmax", mx.cpu(), groups=False, optimizer="sgd")
    amp.init("float16", ctx=mx.cpu())
    found = trained("softmax", mx.cpu(), groups=False, optimizer="sgd")
    for name, array in plain.items():
        np.testing.assert_array_equal(found[name], array)
    assert "decorate the optimizer" in caplog.text
    amp.decorate("sgd")
    trained("softmax", mx.cpu(), groups=False, optimizer="sgd")
    assert "decorate its optimizer" in caplog.text
