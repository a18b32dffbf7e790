"""check_numerics names the operator of a planted fault, forward and backward, in each way of running."""

import gc

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import backpropagate, initialized, leaf, randn, scaled_backward, sequential, untuned
from mxamp.debugging import NumericsError, check_numerics
from mxamp.patches.symbolic import scaled_executors
from nets import convolutional, made

DEPTH, FAULT = 10, 5


class Deep(nn.HybridBlock):
    """Ten dense layers, with a fault in the activations before one of them."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        with self.name_scope():
            for k in range(DEPTH):
                layer = nn.Dense(8, in_units=8, weight_initializer=mx.init.Orthogonal(1.0))
                self.register_child(layer, f"layer{k}")

    def hybrid_forward(self, F, x):
        for k, layer in enumerate(self._children.values()):
            x = F.tanh(layer(self.fault(F, x) if k == FAULT else x))
        return x


def deep(fault=lambda F, x: x):
    mx.random.seed(3)
    return initialized(Deep(fault))


def explode(F, x):
    return F.exp(x * 1000, name="explode") if F is mx.sym else F.exp(x * 1000)


def executor_of(net, shape):
    net.hybridize()
    net(nd.zeros(shape))
    symbol = net._cached_graph[1]
    with scaled_executors():
        executor = symbol.simple_bind(mx.cpu(), data=shape, grad_req="write")
    values = {name: param.data() for name, param in net.collect_params().items()}
    executor.copy_params_from(values, values, allow_extra_params=True)
    return executor


def prepared(net, way, x, train=False):
    """Return a call that runs a net in one of three ways; in training with a backward pass."""
    executor = executor_of(net, x.shape) if way == "symbol" else None
    loss = gluon.loss.L2Loss()
    for block in (net, loss):
        block.hybridize(way == "hybrid", static_alloc=True, static_shape=True)

    def run():
        if executor is not None:
            executor.copy_params_from({"data": x})
            outputs = executor.forward(is_train=train)
            if train:
                executor.backward([nd.ones(out.shape) for out in outputs])
        elif train:
            backpropagate(lambda: loss(net(x), x))
        else:
            net(x)

    return run


WAYS = ["eager", "hybrid", "symbol"]


def checked(act, **options):
    """Return the check of a call."""
    with check_numerics(on="collect", **options) as check:
        act()
    return check


def weight_of(net, layer):
    return next(iter(net.collect_params(f".*dense{layer}_weight").values()))


def bad_weight():
    net = deep()
    weight_of(net, 7).set_data(with_one(np.nan, weight_of(net, 7).data()))
    return net


def with_one(value, array):
    values = array.asnumpy()
    values[1, 2] = value
    return nd.array(values)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("train", [False, True])
def test_a_healthy_net_has_no_findings(way, train):
    check = checked(prepared(deep(), way, randn(4, 8), train))
    assert not check and check.first is None and str(check) == "no findings"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make, x, train, expected, tensor, values", [
    (lambda: deep(explode), randn(4, 8, scale=3), False, "nonfinite forward exp", "output", "Inf"),
    (bad_weight, randn(4, 8), False, "input forward FullyConnected", "dense7_weight", "1 NaN"),
    (deep, with_one(np.inf, randn(4, 8)), False, "input forward FullyConnected", "data", "1 Inf, from -"),
    # The derivative of sqrt at 0.
    (lambda: deep(lambda F, x: F.sqrt(F.zeros_like(x) * x) + x), randn(4, 8), True,
     "nonfinite backward sqrt", "gradient", ""),
])  # fmt: skip
def test_planted_faults_are_found(way, make, x, train, expected, tensor, values):
    net = make()
    (found,) = checked(prepared(net, way, x, train)).findings  # operators behind it are no culprits
    if found.phase == "backward" and way == "eager":
        # The parameter before the operator, which was read last of those that it spoils.
        expected, tensor = "nonfinite backward FullyConnected", "gradient of deep"
        assert "dense4" in found.tensor
    assert [found.kind, found.phase, found.operator] == expected.split()
    assert tensor in found.tensor and values in str(found.statistics)
    if found.operator == "exp":
        assert found.block == net.name if way == "eager" else found.node.endswith("explode")


@pytest.mark.parametrize("way", WAYS)
def test_each_pass_has_its_own_finding(way):
    x = randn(4, 8, scale=3)
    fails, runs = prepared(deep(explode), way, x), prepared(deep(), "eager", x, train=True)
    spoils = prepared(deep(lambda F, x: F.sqrt(F.zeros_like(x) * x) + x), way, x, train=True)
    assert len(checked(lambda: (fails(), fails()))) == 2
    assert len(checked(lambda: (spoils(), runs()))) == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype, kinds", [("float16", ["overflow"]), ("bfloat16", [])])
def test_an_overflow_in_low_precision(way, dtype, kinds):
    # 3e4 * 8 terms: beyond float16, but not beyond bfloat16.
    net = deep(lambda F, x: F.ones_like(x) * 3e4)
    weight_of(net, 5).set_data(nd.ones((8, 8)))
    with amp.autocast(policy=untuned(dtype)):
        check = checked(prepared(net, way, randn(64, 8)))
    assert [one.kind for one in check.findings] == kinds
    if kinds:
        assert check.first.statistics.dtype == "float16"
        assert "dense5" in (check.first.node if way == "symbol" else check.first.block)


def test_infinities_are_overflows_in_casts_and_low_precision():
    for act, kind, operator in (
        (lambda: nd.full((2,), 6e4, dtype="float16") * 2, "overflow", "_mul_scalar"),
        (lambda: nd.cast(nd.full((2,), 1e300, dtype="float64"), "float32"), "overflow", "Cast"),
        (lambda: nd.full((2,), 1e38) * 1e3, "nonfinite", "_mul_scalar"),
        (lambda: nd.full((2,), 1e38).__imul__(1e3), "nonfinite", "_mul_scalar"),  # in place
    ):
        first = checked(act).first
        assert (first.kind, first.operator) == (kind, operator)


@pytest.mark.parametrize("value, weight", [(1e5, 1.0), (5e4, 2.0), (1.0, 1e-6)])
def test_an_overflow_of_a_cast_names_the_layer_to_keep_in_float32(value, weight):
    layers = nn.Dense(2, in_units=1, use_bias=False), nn.HybridLambda("log", prefix="last_")
    net = sequential(*layers, init=mx.init.Constant(weight), hybridize=True)

    def checked_under(policy):
        with amp.autocast(policy=policy), autograd.record():
            return checked(lambda: net(nd.array([[value]])).backward())

    policy = amp.Policy.default("float16")
    first = checked_under(policy).first
    assert first.cure.startswith(f"keep {net[0].name}_fwd in float32, or scale ")
    assert not checked_under(policy.override(fp32_layers=first.fp32_layers))


def test_masks_are_no_fault_until_they_make_nan():
    def attention(allowed):
        scores = nd.dot(nd.ones((2, 4)), w)
        hidden = nd.full(scores.shape, -np.inf, dtype=scores.dtype)
        nd.softmax(nd.where(nd.array(allowed), scores, hidden))

    w = leaf(nd.ones((4, 4)))
    with amp.autocast("float16"), autograd.record():
        assert not checked(lambda: attention([[1, 1, 0, 0], [0, 0, 0, 1]]))
        check = checked(lambda: attention([[1, 1, 0, 0], [0, 0, 0, 0]]))
    assert check.first.operator == "softmax"


def test_infinities_that_an_argument_holds_are_no_fault():
    with check_numerics():
        nearest = nd.full((3,), np.inf)
        nd.minimum(nearest, nd.ones((3,))) + nd.array([0, -np.inf, 0])
    check = checked(lambda: nd.log(nd.zeros((2,))))
    assert (check.first.kind, check.first.statistics.inf) == ("nonfinite", 2)


def while_loop(F, x, most=3):
    step = lambda i, y: (y * 2, (i + 1, y))  # noqa: E731
    return F.contrib.while_loop(lambda i, y: i < 3, step, (F.zeros(1), x), max_iterations=most)[0]


CONTROL = [
    lambda F, x: F.contrib.foreach(lambda row, s: (row + s, row * s), x, F.sum(x, axis=0))[0],
    lambda F, x: F.contrib.cond(F.sum(x) < 1, lambda: x * 2, lambda: x * 3),
    while_loop,
]


def sparse(hybridize):
    net = initialized(nn.Embedding(10, 3, sparse_grad=True), hybridize, init=mx.init.One())
    backpropagate(lambda: net(nd.array([1, 2])).sum())
    return [net.weight.grad()]


def looping(function):
    def program(hybridize):
        net, x = nn.HybridLambda(function), leaf(nd.ones((3, 4)))
        net.hybridize(hybridize)
        backpropagate(lambda: net(x))
        return net(x), x.grad

    return program


def convolving(hybridize):
    net, data = made(convolutional)
    net.initialize(mx.init.One(), force_reinit=True)
    net(*data)
    params = [param for param in net.collect_params().values() if param.grad_req != "null"]
    params[1].grad_req = "add"
    net.hybridize(hybridize)
    for _ in range(2):
        backpropagate(lambda: (net(*data) ** 2).mean())
    return [param.grad() for param in params]


@pytest.mark.parametrize("program", [sparse, convolving, *map(looping, CONTROL)])
@pytest.mark.parametrize("hybridize", [False, True])
def test_checked_programs_compute_the_same(program, hybridize):
    plain = [array.asnumpy() for array in program(hybridize)]
    with check_numerics(on="collect"):
        found = [array.asnumpy() for array in program(hybridize)]
    assert all(np.array_equal(one, other) for one, other in zip(plain, found))


def test_an_output_of_which_an_operator_reads_the_shape_alone():
    def both(F, x):
        out = F.log(x)
        return out, F.zeros_like(out)

    net = initialized(nn.HybridLambda(both), hybridize=True)
    assert checked(lambda: net(nd.array([-1.0, 1.0]))).first.operator == "log"


def test_uninitialized_padding_of_loops_is_no_fault():
    for _ in range(20):
        freed = nd.full((2, 3, 4), np.nan)
        freed.wait_to_read()
        del freed
        assert not checked(lambda: while_loop(nd, nd.ones((3, 4)), most=5))


def test_a_backward_pass_after_the_check():
    net, x = deep(), nd.ones((2, 8))
    net.hybridize()
    with check_numerics(), autograd.record():
        loss = net(x).sum()
    gc.collect()
    loss.backward()
    assert np.isfinite(weight_of(net, 0).grad().asnumpy()).all()


def test_graphs_that_wait_for_their_backward_pass():
    x, y = leaf(nd.array([0.0])), leaf(nd.array([4.0]))
    with check_numerics(on="collect") as check:
        with autograd.record():
            a, b = x.sqrt(), y.sqrt()
        b.backward()
        a.backward()
    assert (check.first.phase, check.first.operator) == ("backward", "sqrt")


@pytest.mark.parametrize("way", WAYS)
def test_statistics_count_a_checked_graph_as_without_the_check(way):
    run = prepared(deep(), way, nd.ones((2, 8)))
    with amp.debugging.operator_stats() as plain:
        run()
    with check_numerics(), amp.debugging.operator_stats() as inner:
        run()
    with amp.debugging.operator_stats() as outer, check_numerics():
        run()
    assert str(inner) == str(outer) == str(plain)


def test_findings_are_raised_and_shown():
    net, x = deep(explode), randn(4, 8, scale=3)
    with pytest.raises(NumericsError, match=r"exp.*Inf") as error, check_numerics():
        net(x)
    assert error.value.finding.operator == "exp"
    with check_numerics(on="collect") as check:
        net(x)
    assert str(error.value) == str(check.first) == str(check)
    with pytest.raises(amp.ArgumentError, match="on must be 'raise' or 'collect', not 'log'"):
        check_numerics(on="log")


@pytest.mark.parametrize("way", ["eager", "hybrid"])
def test_skipped_operators_excuse_what_follows(way):
    check = checked(prepared(deep(explode), way, randn(4, 8, scale=3)), skip=["*exp*"])
    assert check.first.operator == "FullyConnected"
    assert not checked(prepared(bad_weight(), way, randn(4, 8), train=True), skip=["*dense7*"])


def trained_with_scale(steps, on="collect", hybridize=True, net=None, clips=False, **options):
    """Return the check of float16 steps at a loss scale that overflows at first."""
    net, options = net or deep(), {"init_scale": 2.0**20, **options}
    net.hybridize(hybridize)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
    amp.init_trainer(trainer, amp.LossScaler(**options))
    with amp.autocast("float16"), check_numerics(on=on) as check:
        for _ in range(steps):
            scaled_backward(lambda: net(randn(4, 8)).sum(), trainer)
            if clips:
                amp.unscale(trainer)
                gradients = [param.grad() for param in net.collect_params().values()]
                gluon.utils.clip_global_norm(gradients, 1.0)  # some are Inf: the step is skipped
            trainer.step(4)
    assert trainer.amp_skips > 0
    return check


def test_overflows_are_findings_unless_a_lower_loss_scale_cures_them():
    for hybridize in (False, True):
        assert not trained_with_scale(steps=14, on="raise", hybridize=hybridize)
        check = trained_with_scale(steps=1, hybridize=hybridize)
        assert (check.first.kind, check.first.phase, len(check)) == ("overflow", "backward", 1)
        with pytest.raises(NumericsError, match="overflows"):
            trained_with_scale(steps=1, on="raise", hybridize=hybridize)
        check = trained_with_scale(steps=3, min_scale=2.0**19, hybridize=hybridize)
        assert (check.first.kind, check.first.step) == ("overflow", 2)


def blocked_norms(F, x):
    """A norm that is 0, where its gradient is infinite and never used."""
    return F.broadcast_add(x, F.BlockGrad(F.norm(F.relu(x - 100), axis=1, keepdims=True)))


@pytest.mark.filterwarnings("ignore:nan or inf is detected")
def test_the_search_for_a_scale_is_no_finding_where_an_operator_has_no_gradient_at_0():
    net = deep(blocked_norms)
    assert not trained_with_scale(14, "raise", net=net, clips=True, init_scale=2.0**24)


def test_the_search_for_a_scale_of_a_module_is_no_finding():
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(symbol, name="softmax"))
    data = mx.io.NDArrayIter(randn(64, 8), nd.arange(64) % 4, 16)
    optimizer = amp.decorate("sgd", init_loss_scaling=2.0**22)
    with amp.autocast("float16"), check_numerics() as check:
        module.fit(data, optimizer=optimizer, num_epoch=4)
    assert not check
