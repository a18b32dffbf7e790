"""check_numerics names the cause: following its advice cures the program."""

import re

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import custom_operator, initialized, randn, sequential
from mxamp.debugging import check_numerics

STEPS = 8


class Net(nn.HybridBlock):
    """Three dense layers, with a function of hidden values before the second."""

    def __init__(self, between):
        super().__init__(prefix="net_")
        self.between = between
        with self.name_scope():
            self.first = nn.Dense(16, in_units=8)
            self.second = nn.Dense(16, in_units=16, activation="relu")
            self.last = nn.Dense(4, in_units=16)

    def hybrid_forward(self, F, x):
        return self.last(self.second(self.between(F, self.first(x))))


def relu(F, x):
    return F.relu(x)


def trained(dtype, hybridize, between=relu, rate=0.01, init=None, data=lambda x: x, layers=()):
    """Return the check of some steps, until its first finding."""
    mx.random.seed(2)
    net, loss = Net(between), gluon.loss.SoftmaxCrossEntropyLoss()
    initialized(net, hybridize, init=init or mx.init.Xavier())
    x, y = data(randn(STEPS, 32, 8)), nd.arange(32) % 4
    policy = amp.Policy.default(dtype).override(fp32_layers=layers)
    with amp.autocast(policy=policy, enabled=dtype != "float32"):
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})
        amp.init_trainer(trainer, amp.NoScaler())
        with check_numerics(on="collect") as check:
            for batch in x:
                with autograd.record(), amp.scale_loss(loss(net(batch), y).mean(), trainer) as one:
                    one.backward()
                trainer.step(1)
                if check:
                    break
    return check


def with_outlier(scale):
    def data(x):
        x[5, 3, 2] = scale
        return x

    return data


def shares(eps):
    def between(F, x):
        positive = F.relu(x - 100)
        return F.broadcast_div(positive, F.sum(positive, axis=1, keepdims=True) + eps)

    return between


def sums(scale):
    """Return products that sum to 70000 times `scale`."""
    return lambda F, x: F.dot(F.ones_like(x) * 625 * scale, F.ones((16, 16)) * 7) * 1e-6


def softmax(most):
    def between(F, x):
        weights = F.exp(F.clip(F.abs(x) * 1e4, 0, most))
        return F.broadcast_div(weights, F.sum(weights, axis=1, keepdims=True))

    return between


def norms(eps):
    if not eps:
        return lambda F, x: F.broadcast_add(x, F.norm(F.relu(x - 100), axis=1, keepdims=True))
    return lambda F, x: F.broadcast_add(x, F.sqrt(F.sum(F.relu(x - 100) ** 2, 1, True) + eps))


ALL, FLOAT16 = ["float32", "float16", "bfloat16"], ["float16"]


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("broken, cure, cured, dtypes", [
    ({"rate": 1000}, r"lower the learning rate: \S+ grew from \S+ in step 1 to ", {}, ALL),
    ({"rate": 30}, r"lower the learning rate: \S+ grew from ", {}, FLOAT16),
    ({"between": lambda F, x: F.log(F.relu(x) - 1 * (x < -1))}, "clip the input of log at 1e-4",
     {"between": lambda F, x: F.log(F.clip(x, 1e-4, 1e4))}, ALL),
    ({"between": lambda F, x: F.log(F.relu(x))}, r"write log\(x \+ 1e-4\)",
     {"between": lambda F, x: F.log(F.relu(x) + 1e-4)}, ALL),
    ({"between": lambda F, x: F.log(x)}, "clip the input of log at 1e-4",
     {"between": lambda F, x: F.log(F.clip(x, 1e-4, 1e4))}, ALL),
    # A value that becomes 0 in float16 alone.
    ({"between": lambda F, x: F.log(F.sigmoid(x * 0 - 20))}, r"write log\(x \+ 1e-4\)",
     {"between": lambda F, x: F.log(F.sigmoid(x * 0 - 20) + 1e-4)}, FLOAT16),
    ({"between": shares(0)}, r"write x / \(y \+ 1e-3\)", {"between": shares(1e-3)}, ALL),
    ({"between": lambda F, x: F.sqrt(F.relu(x))}, r"sqrt in .* at 0: write sqrt\(x \+ 1e-4\)",
     {"between": lambda F, x: F.sqrt(F.relu(x) + 1e-4)}, ALL),
    ({"between": lambda F, x: F.relu(x) ** 0.5}, r"no gradient at 0: write \(x \+ 1e-4\) \*\* y",
     {"between": lambda F, x: (F.relu(x) + 1e-4) ** 0.5}, ALL),
    ({"between": norms(0)}, r"write sqrt\(sum\(x \* x\) \+ 1e-4\)", {"between": norms(1e-4)}, ALL),
    ({"data": with_outlier(np.nan)}, "clean the data", {}, ALL),
    ({"data": lambda x: x * 1e30}, "scale the data down", {}, ALL),
    ({"data": with_outlier(1e30)}, "scale the data down", {}, ALL),
    ({"init": mx.init.Uniform(1e6)}, r"initialize \S+ smaller: it holds 9.*e\+05 in step 1",
     {}, ALL),
    ({"between": sums(1)}, r"keep \S+ in float32, or scale its input down",
     {"between": sums(0.1)}, FLOAT16),
    ({"between": softmax(100)}, "clip the input of exp at 10", {"between": softmax(10)}, ALL),
    ({"between": softmax(1000)}, "clip the input of exp at 10, or write log_softmax",
     {"between": lambda F, x: F.log_softmax(x * 0 + 1000)}, ALL),
])  # fmt: skip
def test_the_advice_cures_the_program(broken, cure, cured, dtypes, hybridize):
    for dtype in dtypes:
        first = trained(dtype, hybridize, **broken).first
        assert re.match(f".*{cure}", first.cure), first
        assert str(first).endswith(f"; {first.cure}")
        assert not trained(dtype, hybridize, **cured)
        if first.fp32_layers:
            assert first.cure.startswith("keep")
            assert not trained(dtype, hybridize, **broken, layers=first.fp32_layers)


@pytest.mark.parametrize("grown, cure", [
    (1, "(keep .* in float32, or )?scale the loss down"),
    (10, "lower the learning rate: .*dense0_weight grew from 1 in step 1 to 10"),
])  # fmt: skip
@pytest.mark.parametrize("hybridize", [False, True])
def test_a_gradient_that_overflows(grown, cure, hybridize):
    layers = (nn.Dense(2, in_units=2, use_bias=False) for _ in range(2))
    net = sequential(*layers, hybridize=hybridize, init=mx.init.One())
    with amp.autocast("float16"), check_numerics(on="collect") as check:
        for factor in (1, grown):
            net[0].weight.set_data(net[0].weight.data() * factor)
            with autograd.record():
                loss = net(nd.ones((1, 2)) * 1e-3)
            loss.backward(nd.ones((1, 2)) * (1 if factor == 1 and grown > 1 else 6e4))
    assert re.match(cure, check.first.cure), check.first
    assert bool(check.first.fp32_layers) == (hybridize and grown == 1)


def trained_module(rate=0.01, init=None, spoiled=()):
    """Return the first finding of a module's training."""
    mx.random.seed(1)
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="first")
    symbol = mx.sym.FullyConnected(mx.sym.relu(symbol), num_hidden=4, name="last")
    module = mx.mod.Module(mx.sym.LinearRegressionOutput(symbol, name="softmax"))
    data = mx.io.NDArrayIter(randn(64, 8), randn(64, 4), 16, label_name="softmax_label")
    module.bind(data.provide_data, data.provide_label)
    module.init_params(init or mx.init.Xavier())
    module.set_params({name: nd.full((4, 16), np.nan) for name in spoiled}, {}, allow_missing=True)
    module.init_optimizer(optimizer_params={"learning_rate": rate})
    with check_numerics(on="collect") as check:
        for batch in data:
            module.forward_backward(batch)
            module.update()
    return check.first


@pytest.mark.parametrize("broken, cure", [
    ({"rate": 1000}, r"lower the learning rate: first_weight grew from \S+ in step 1 to "),
    ({"init": mx.init.Uniform(1e6)}, r"initialize first_weight smaller: it holds 9.*e\+05 in step 1"),
    ({"spoiled": ["last_weight"]}, "restore a checkpoint"),
])  # fmt: skip
def test_the_weights_of_a_module_are_a_cause_too(broken, cure):
    assert trained_module() is None
    first = trained_module(**broken)
    assert re.match(cure, first.cure), first


def test_a_loop_does_not_run_again():
    net = nn.HybridLambda(
        lambda F, x: F.contrib.foreach(lambda row, s: (row * 1e38 * s, s), x, F.ones((2,)) * 10)[0]
    )
    net.hybridize()
    with check_numerics(on="collect") as check:
        net(nd.ones((3, 2)))
    assert check.first.operator == "_foreach"
    assert check.first.cure.startswith("train some steps without mixed precision: if they fail too")


@custom_operator("causes_large")
class Large(mx.operator.CustomOp):
    runs = 0

    def forward(self, is_train, req, in_data, out_data, aux):
        Large.runs += 1
        self.assign(out_data[0], req[0], in_data[0] * np.inf)


def test_an_operator_that_runs_python_is_observed_and_does_not_run_again():
    with check_numerics(on="collect") as check:
        nd.Custom(nd.ones((2,)), op_type="causes_large").wait_to_read()
    assert Large.runs == 1 and check.first.operator in ("Custom", "_mul_scalar")
