"""Loss scaling in the Module API."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.contrib.svrg_optimization.svrg_module import SVRGModule
from mxnet.module import Module

import mxamp as amp
from helpers import randn, run_python
from models import bound_module as bound
from models import module_of
from mxamp.frontends import module_api
from mxamp.graph.gradients import SCALE_INPUT

pytestmark = pytest.mark.usefixtures("unfused")


def test_a_module_keeps_its_own_symbol_and_gets_an_optimizer_by_name():
    optimizer = amp.decorate("sgd")  # before the module is bound
    module = bound()
    module.init_optimizer(optimizer=optimizer)
    assert module._optimizer.rescale_grad == 1 / 4
    assert optimizer.scaling.scaler.state_dict() == amp.LossScaler().state_dict()
    assert SCALE_INPUT in module._exec_group.execs[0].arg_dict
    assert SCALE_INPUT not in module.symbol.list_arguments()


def test_an_optimizer_and_explicit_gradients_of_outputs():
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    optimizer = mx.optimizer.SGD(learning_rate=0.1, rescale_grad=0.25)
    decorated = amp.decorate(optimizer, 64.0)
    assert not hasattr(optimizer, "_amp_scaling")
    module = module_of(net, (4, 3), bound={"inputs_need_grad": True})
    module.init_optimizer(optimizer=decorated)
    data = randn(4, 3)
    module.forward(mx.io.DataBatch([data]), is_train=True)
    module.backward([nd.ones((4, 2))])
    np.testing.assert_allclose(module.get_input_grads()[0].asnumpy(), np.full((4, 3), 2.0))
    module.update()
    wanted = 1 - 0.1 * 0.25 * data.asnumpy().sum(0)
    np.testing.assert_allclose(module.get_params()[0]["fc_weight"].asnumpy()[0], wanted, rtol=1e-5)


@pytest.mark.parametrize("late", [False, True])
def test_modules_bound_in_float32_get_the_gradients_of_plain_ones(late, monkeypatch):
    """Their losses carry no scale, so the gradients that the program gives must not either."""
    data = mx.sym.var("data")
    module = Module(mx.sym.Group([data * 2, mx.sym.MakeLoss(data * 3)]), label_names=None)
    optimizer = amp.decorate("sgd", 64.0)
    monkeypatch.setattr(module_api, "chose_float32", lambda: True)
    bind = Module.bind.__wrapped__ if late else Module.bind  # late: as before `decorate`
    bind(module, [("data", (4, 3))], inputs_need_grad=True)
    module.init_params()
    module.init_optimizer(optimizer=optimizer)
    monkeypatch.undo()
    module.bind([("data", (4, 3))], inputs_need_grad=True)  # ignored, with a warning
    module.forward(mx.io.DataBatch([randn(4, 3)]), is_train=True)
    module.backward([nd.ones((4, 3)), nd.ones((4, 3))])
    np.testing.assert_array_equal(module.get_input_grads()[0].asnumpy(), np.full((4, 3), 5))


def test_a_kvstore_that_updates_because_decorate_came_too_late():
    """Python looks `init_optimizer` up before its arguments, in which `decorate` patches it."""
    code = """if True:
        import mxamp as amp
        import mxnet as mx
        from models import bound_module
        module = bound_module()
        store = mx.kvstore.create("local")
        module.init_optimizer(store, amp.decorate(mx.optimizer.SGD()))
        module.forward_backward(mx.io.DataBatch([mx.nd.ones((4, 3))], [mx.nd.zeros(4)]))
        module.update()
    """
    result = run_python(code)
    assert "StateError: parameters are updated on the kvstore 'local'" in result.stderr


def test_a_decorated_module_with_its_own_init_optimizer_does_not_warn(caplog):
    amp.init("float16", ctx=mx.cpu())
    optimizer = amp.decorate("sgd")
    loss = mx.sym.MakeLoss(mx.sym.var("data") * mx.sym.var("weight"))
    module = SVRGModule(loss, label_names=None, update_freq=2)
    module.bind([("data", (4, 1))])
    module.init_params(mx.init.One())
    module.init_optimizer(optimizer=optimizer)
    assert "nothing scales this module's losses" not in caplog.text


def test_modules_where_auto_is_float32_update_as_plain_ones(on_machine):
    on_machine()
    amp.init("auto")
    optimizer = amp.decorate("sgd")
    module = bound()
    module.init_optimizer(optimizer=optimizer)
    module.forward_backward(mx.io.DataBatch([randn(4, 3)], [nd.zeros(4)]))
    module._exec_group.grad_arrays[0][0][:] = np.inf
    module.update()  # plain MXNet skips no update
    assert SCALE_INPUT not in module._exec_group.execs[0].arg_dict
    scaling = optimizer.scaling
    assert (scaling.loss_scale, scaling.steps, scaling.skips) == (1, 1, 0)


def test_buckets_share_the_scale():
    def generate(length):
        data = mx.sym.var("data")
        out = mx.sym.FullyConnected(data, num_hidden=4, flatten=False, name="fc")
        out = mx.sym.FullyConnected(mx.sym.sum(out, axis=1), num_hidden=2, name="out")
        return mx.sym.SoftmaxOutput(out, name="softmax"), ("data",), ("softmax_label",)

    amp.init("float16", ctx=mx.cpu())
    optimizer = amp.decorate("sgd", 2.0**24)
    module = mx.mod.BucketingModule(generate, default_bucket_key=5)
    module.bind([("data", (2, 5, 3))], [("softmax_label", (2,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer=optimizer, optimizer_params={"learning_rate": 0.1})
    for step in range(14):
        key = (5, 3)[step % 2]
        module.forward_backward(mx.io.DataBatch(
            [randn(2, key, 3)], [nd.zeros(2)], bucket_key=key,
            provide_data=[("data", (2, key, 3))], provide_label=[("softmax_label", (2,))],
        ))  # fmt: skip
        module.update()
    assert 0 < optimizer.scaling.skips < 14
    assert optimizer.scaling.steps + optimizer.scaling.skips == 14


@pytest.mark.parametrize("calls", range(4))
def test_a_module_trains_on_after_shutdown(calls):
    """Its graph keeps the input for the loss scale."""
    found, batch = [], mx.io.DataBatch([nd.ones((4, 3))], [nd.zeros(4)])
    for optimizer in (amp.decorate("sgd", 1024.0), "sgd"):
        module = bound()
        module.init_params(mx.init.One(), force_init=True)
        module.init_optimizer(optimizer=optimizer)
        for call in range(6):
            if call == calls:
                amp.shutdown()
            step = (("forward", batch, True), ("backward",), ("update",))[call % 3]
            getattr(module, step[0])(*step[1:])
        found.append(module.get_params()[0]["fc_weight"].asnumpy())
    np.testing.assert_allclose(*found, rtol=1e-5)
