"""Hybridized blocks follow the policy, bit for bit like eager calls."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn

import mxamp as amp
from helpers import (
    as_float32,
    backpropagate,
    initialized,
    kind,
    leaf,
    randn,
    same,
    sequential,
    untuned,
    values,
)
from mxamp.graph.ir import Graph
from mxamp.patches import cached_op
from nets import NETS, Control, made, separable

X = nd.ones((2, 4))


def run(net, data):
    """Return outputs, loss and gradients of one training pass."""
    params = [p for p in net.collect_params().values() if p.grad_req != "null"]
    with autograd.record():
        out = net(*data)
        loss = (out.astype("float32") ** 2).mean()
    loss.backward()
    return values(out), values(loss), [values(p.grad()) for p in params]


@pytest.mark.parametrize("make", NETS)
def test_eager_and_hybridized_agree_bit_for_bit(on, make):
    eager, _ = made(make)
    hybrid, data = made(make)
    for mine, theirs in zip(eager.collect_params().values(), hybrid.collect_params().values()):
        theirs.set_data(mine.data())
    hybrid.hybridize(static_alloc=True)
    out, loss, grads = run(eager, data)
    hybrid_out, hybrid_loss, hybrid_grads = run(hybrid, data)
    assert hybrid_out.dtype == np.float32
    assert same(as_float32(out), hybrid_out)
    assert same(loss, hybrid_loss)
    # Where one float32 tensor is cast for several readers, the graph casts it once and sums its
    # gradients in half precision; eager calls cast it each time.
    largest = max(abs(grad).max() for grad in grads)
    for mine, theirs in zip(grads, hybrid_grads):
        assert abs(mine - theirs).max() / largest < (2**-9 if on.dtype == "float16" else 2**-6)


def test_a_net_computes_what_hand_written_casts_compute():
    def by_hand(F, x, w, v):
        def product(a, b):
            a, b = (F.amp_cast(F.amp_cast(t, dtype="float16"), dtype="float32") for t in (a, b))
            out = F.FullyConnected(a, b, num_hidden=4, no_bias=True)
            return F.amp_cast(out, dtype="float16")

        hidden = F.Activation(product(x, w), act_type="relu")
        return F.softmax(F.amp_cast(product(hidden, v), dtype="float32"))

    def plain(F, x, w, v):
        hidden = F.FullyConnected(x, w, num_hidden=4, no_bias=True)
        hidden = F.Activation(hidden, act_type="relu")
        return F.softmax(F.FullyConnected(hidden, v, num_hidden=4, no_bias=True))

    def grads(net):
        arrays = [leaf(randn(*shape, seed=n)) for n, shape in enumerate([(3, 4), (4, 4), (4, 4)])]
        with autograd.record():
            out = net(*arrays)
            (out**2).sum().backward()
        return [out, *(array.grad for array in arrays)]

    expected = grads(nn.HybridLambda(by_hand))
    with amp.autocast("float16"):
        eager = grads(nn.HybridLambda(plain))
        hybridized = grads(initialized(nn.HybridLambda(plain), hybridize=True))
    for mine, theirs, wanted in zip(eager, hybridized, expected):
        assert same(mine, wanted)
        assert same(theirs, wanted)


@pytest.mark.backend
def test_policies_share_a_block(dtype):
    net, _ = made(separable)
    data = [randn(32, 4, 8, 8)]
    net.hybridize(static_alloc=True, static_shape=True)
    plain = net(*data).asnumpy()
    with amp.autocast(policy=untuned(dtype)):
        low = net(*data).asnumpy()
        with amp.autocast(enabled=False):
            assert same(net(*data), plain)
        with amp.autocast(policy=untuned("float16" if dtype == "bfloat16" else "bfloat16")):
            other = net(*data).asnumpy()
        assert same(net(*data), low)
    assert same(net(*data), plain)
    assert not same(low, plain)
    assert not same(low, other)


def test_only_a_call_like_the_last_takes_its_graph_unchecked():
    net, found, half = initialized(nn.Dense(3, in_units=4), True), [], X.astype("float16")
    for i, data in enumerate((X, X, X, half, half, half[:1])):
        if i == 2:
            net.weight._data = [net.weight.data().copy()]
        with amp.autocast("bfloat16"):
            net(data)
        found.append([*net._cached_op._last.values()])
    assert {*map(len, found)} == {1}
    kept = [now[0] is before[0] for before, now in zip(found, found[1:])]
    assert kept == [True, False, False, True, False]


def test_lstm_layer(on):
    layer = initialized(rnn.LSTM(6, num_layers=2, bidirectional=True, input_size=5))
    x = randn(3, 2, 5)
    with autograd.record():
        eager = layer(x)
    layer.hybridize()
    states = layer.begin_state(batch_size=2)
    with autograd.record():
        out, new_states = layer(x, states)
    out.backward()
    assert len(new_states) == 2
    assert same(as_float32(values(eager)), values(out))
    assert abs(layer.l0_i2h_weight.grad().asnumpy()).max() > 0


@pytest.mark.parametrize("operator", ["while_loop", "cond"])
def test_bodies_with_broken_gradients_are_left_alone_in_training(on, operator):
    net = initialized(Control(operator))
    x = randn(3, 2, 4)
    with amp.autocast(enabled=False):
        plain = net(x)
    net.hybridize()
    with autograd.record():
        recorded = net(x)
    assert same(recorded, plain)
    assert not same(net(x), plain)


def test_nested_inputs_outputs_and_none(on):
    def forward(F, x, pair, extra=None):
        hidden = F.dot(x + pair[0], x, transpose_b=True)
        return hidden, [hidden + pair[1], F.softmax(hidden)]

    net = initialized(nn.HybridLambda(forward), hybridize=True)
    first, (second, third) = net(randn(2, 4), [randn(2, 4), randn(2, 2)], None)
    assert {kind(t) for t in (first, second, third)} == {"float32"}


def test_arguments_of_another_structure_are_refused(on):
    net, x = nn.HybridLambda(lambda F, x, others: F.add_n(x, *others)), randn(2, 2)
    net.hybridize()
    assert (values(net(x, [])) == values(x)).all()
    with pytest.raises(ValueError, match="argument structure"):
        net(x, x)


def test_blocks_cast_by_the_user_keep_their_dtype():
    net = initialized(nn.Dense(4, in_units=4))
    net.cast("float16")
    net.hybridize()
    with amp.autocast("float16"):
        assert kind(net(randn(2, 4).astype("float16"))) == "float16"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_block_that_a_backend_has_fused_says_that_it_stays_in_float32(caplog):
    x = randn(4, 8)
    net = sequential(gluon.nn.Dense(4, in_units=8, activation="relu"))
    amp.init("bfloat16", ctx=mx.cpu())
    net.optimize_for(x, backend="MKLDNN")
    for _ in range(3):
        net(x).wait_to_read()
    assert caplog.text.count("optimize_for") == 1
    net.hybridize()
    net(x).wait_to_read()
    assert caplog.text.count("optimize_for") == 1


@pytest.mark.backend
def test_data_of_many_shapes_share_one_graph_at_last():
    """Each graph of a block with static_alloc holds memory: sequences may have any length."""
    most = cached_op._MOST

    net = nn.HybridLambda(lambda F, x: F.sum(x, axis=1))
    net.hybridize(static_alloc=True)
    with amp.autocast(policy=amp.Policy.default("bfloat16").in_float32()):
        for steps in (*range(40, 50 + most), 40, 41, 49 + most):
            x = randn(3, steps, 64)
            expected = values(x).sum(axis=1)
            np.testing.assert_allclose(values(net(x)), expected, rtol=1e-4, atol=1e-4)
        select = net._cached_op.select
        ran = [select([randn(3, steps, 64)]).symbol for steps in range(40, 50 + most)]
    assert len({id(symbol) for symbol in ran}) == most + 1


def test_policies_and_sequence_lengths_that_come_and_go_leave_no_graphs_behind():
    net = initialized(nn.Dense(3, flatten=False, in_units=4), hybridize=True)
    policy = amp.Policy.default("bfloat16")
    for i in range(40):
        with amp.autocast(policy=policy.override(fp32_layers=[f"layer{i}"])):
            net(X)
    with amp.autocast(policy=policy):
        for steps in range(1, 600):
            net._cached_op.select((randn(2, steps, 4), net.weight.data(), net.bias.data()))
    made = net._cached_op.variants.made
    assert len(made) == 32 and [*made][-1] is policy
    assert len(made[policy].ops) <= 3
    (known,) = made[policy].choices.values()
    assert len({id(choices) for choices in known.values()}) <= 3


@pytest.mark.backend
def test_the_casts_of_a_shape_do_not_depend_on_earlier_shapes():
    """Many shapes have equal graphs: each is chosen by its own shape, and found again."""

    def select(net, steps):
        return net._cached_op.select((randn(2, steps, 16), net.weight.data(), net.bias.data()))

    nets = [nn.Dense(32, flatten=False, in_units=16) for _ in range(2)]
    with amp.autocast("bfloat16"):
        for net in nets:
            initialized(net, hybridize=True)
            net(randn(2, 200, 16))
        before = select(nets[0], 200)
        for steps in range(1, 100):
            select(nets[0], steps)
        assert select(nets[0], 200) is before
        late, alone = (Graph.from_symbol(select(net, 101).symbol) for net in nets)
        assert [node.op for node in late.nodes] == [node.op for node in alone.nodes]


def test_gradients_that_gluon_has_replaced_between_plain_calls_are_written_to():
    net, sums = initialized(nn.Dense(3, in_units=4), init=mx.init.One()), []
    net.hybridize(static_alloc=True, static_shape=True)
    for grad_req, mixed in (("add", True), ("write", False), ("add", True), ("add", True)):
        net.weight.grad_req = grad_req
        with amp.autocast("bfloat16", enabled=mixed):
            backpropagate(lambda: net(X))
        sums.append(float(net.weight.grad().sum().asscalar()))
    assert sums == [24, 24, 24, 48]


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", NETS)
def test_no_variable_of_a_graph_for_gpus_has_control_dependencies(make, training):
    """MXNet's pointwise fusion, which only GPUs have, ends the process at one."""
    net, data = made(make)
    net.hybridize()
    with amp.autocast(policy=amp.Policy.default("float16", "gpu")), autograd.record(training):
        cached_op.install_policy_op(net, data)
        places = net._cached_op_args
        args = [data[i] if is_data else i.data() for is_data, i in places]
        symbol = net._cached_op.select(args).symbol
    text = symbol.tojson(remove_amp_cast=False)
    assert "amp_cast" in text
    assert "control_deps" not in text
