"""Casts of a weight that is used several times share memory, and never hold stale values."""

import threading

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import down, randn, same, values
from mxamp.framework import arrays
from mxamp.framework.arrays import leaf_casts

X = randn(4, 8)
NEW = randn(5, 8, seed=7)


def leaf(seed=1, grad_req="write"):
    weight = randn(5, 8, seed=seed)
    weight.attach_grad(grad_req=grad_req)
    return weight


def product(weight, x=X):
    return nd.FullyConnected(x, weight, num_hidden=5, no_bias=True)


def expected(weight):
    """The product with a weight that has never been cast."""
    with autograd.pause():
        return product(weight.copy())


def through_store(weight):
    store = mx.kv.create("local")
    store.init(0, NEW)
    store.pull(0, out=weight)


def in_thread(weight):
    thread = threading.Thread(target=lambda: weight.__setitem__(slice(None), NEW))
    thread.start()
    thread.join()


def by_memory(weight):
    arrays.flat_view(weight, "float32", write=True)[:] = NEW.asnumpy().ravel()


WRITES = {
    "numpy": lambda w: w.__setitem__(slice(None), NEW.asnumpy()),
    "array": lambda w: w.__setitem__(slice(None), NEW),
    "scalar": lambda w: w.__setitem__(slice(None), 0.3),
    "row": lambda w: w.__setitem__(2, 0.3),
    "element": lambda w: w.__setitem__((2, 3), 9),
    "view": lambda w: w[1:3].__setitem__(slice(None), 0.3),
    "reshape": lambda w: w.reshape((40,)).__setitem__(slice(0, 8), 0.3),
    "out": lambda w: nd.broadcast_add(NEW, NEW, out=w),
    "+=": lambda w: w.__iadd__(1),
    "*=": lambda w: w.__imul__(NEW),
    "copyto": lambda w: NEW.copyto(w),
    "random": lambda w: nd.random.normal(out=w),
    "sync": lambda w: w._sync_copyfrom(NEW.asnumpy()),
    "update": lambda w: nd.sgd_update(w, NEW, lr=0.5, out=w),
    "optimizer": lambda w: mx.optimizer.SGD(learning_rate=0.5).update(0, w, NEW, None),
    "store": through_store,
    "thread": in_thread,
    "memory": by_memory,
}


@pytest.mark.parametrize("way", WRITES)
def test_each_use_reads_current_values(way, dtype):
    weight = leaf()
    with amp.autocast(dtype):
        with autograd.record():
            before = product(weight)
            with autograd.pause():
                WRITES[way](weight)
            inside = product(weight)
            assert same(inside, expected(weight))
        assert same(product(weight), expected(weight))
        with autograd.record():
            assert same(product(weight), expected(weight))
    assert not same(inside, before) or way == "element"


@pytest.mark.parametrize("way", ["set_data", "initialize", "load", "step", "cast"])
def test_each_use_reads_current_values_of_parameters(way, dtype, tmp_path):
    net, other = nn.Dense(5, in_units=8), nn.Dense(5, in_units=8)
    for block in (net, other):
        block.initialize(mx.init.Normal())
    other.save_parameters(str(tmp_path / "other"))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
    ways = {
        "set_data": lambda: net.weight.set_data(NEW),
        "initialize": lambda: net.initialize(mx.init.Normal(), force_reinit=True),
        "load": lambda: net.load_parameters(str(tmp_path / "other")),
        "step": lambda: trainer.step(1),
        "cast": lambda: net.weight.cast("float32"),
    }
    with amp.autocast(dtype), autograd.record():
        before = net(X)
        if way == "step":
            before.sum().backward()
        with autograd.pause():
            ways[way]()
        after = net(X)
        with autograd.pause():
            right = nd.FullyConnected(X, net.weight.data().copy(), net.bias.data(), num_hidden=5)
    assert same(after, right)
    assert same(after, before) is (way == "cast")


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_gradients_of_many_uses_are_summed_in_float32(grad_req):
    batches = [randn(4, 8, seed=i) for i in range(40)]
    total, weight = np.zeros((5, 8)), leaf(grad_req=grad_req)
    with amp.autocast("bfloat16"):
        for batch in batches:
            alone = leaf()
            with autograd.record():
                product(alone, batch).astype("float32").sum().backward()
            total += alone.grad.asnumpy()
        with autograd.record():
            losses = [product(weight, batch).astype("float32").sum() for batch in batches]
        autograd.backward(losses)
    np.testing.assert_allclose(weight.grad.asnumpy(), total, rtol=1e-5, atol=1e-5)


def cast_address(weight):
    return arrays.address(arrays.cast(weight, "bfloat16"))


def test_casts_share_memory_until_the_scope_ends():
    weight, other = leaf(), leaf(seed=2)
    with amp.autocast("bfloat16"):
        for fails in (False, True):
            try:
                with autograd.record():
                    first = arrays.cast(weight, "bfloat16")
                    with autograd.pause(), autograd.record():
                        assert cast_address(weight) == arrays.address(first)
                    assert cast_address(weight) == arrays.address(first)
                    assert cast_address(other) != arrays.address(first)
                    assert len(leaf_casts._casts) == 2
                    if fails:
                        raise RuntimeError
            except RuntimeError:
                pass
            assert not leaf_casts._casts
            with autograd.record():
                assert cast_address(weight) != arrays.address(first)


def test_nothing_is_kept_in_scopes_that_began_without_mixed_precision():
    weight = leaf()
    with autograd.record():
        with amp.autocast("bfloat16"):
            product(weight), product(weight)
            with autograd.record():
                product(weight)
            assert not leaf_casts._casts
    assert not leaf_casts._casts


def test_a_graph_keeps_its_casts_when_a_later_scope_casts_new_values():
    weight, x, again = leaf(), X.copy(), X.copy()
    x.attach_grad(), again.attach_grad()
    with amp.autocast("bfloat16"):
        with autograd.record():
            first = product(weight, x).sum()
        with autograd.record():
            product(weight, again).sum().backward()
        weight[:] = NEW
        with autograd.record():
            product(weight)
        first.backward()
    assert same(x.grad, again.grad)


def test_uses_after_a_backward_pass_in_the_same_scope_have_gradients():
    weight = leaf()
    with amp.autocast("bfloat16"), autograd.record():
        product(weight).sum().backward()
        once = weight.grad.asnumpy()
        weight.grad[:] = 0
        product(weight).sum().backward()
    assert same(weight.grad, once) and abs(once).max() > 0


@pytest.mark.parametrize("grad_req", ["write", "add", "null"])
def test_gradients_follow_a_new_request(grad_req):
    weight, x = leaf(), X.copy()
    x.attach_grad()
    with amp.autocast("bfloat16"), autograd.record():
        product(weight, x)
        old = weight.grad
        with autograd.pause():
            weight.attach_grad(grad_req=grad_req)
        loss = product(weight, x).sum()
    loss.backward()
    assert not old.asnumpy().any()
    assert x.grad.asnumpy().any()
    if grad_req != "null":
        assert weight.grad.asnumpy().any()


@pytest.mark.parametrize("modes", [(False, False), (True, False), (False, True)])
def test_recorded_inference_leaves_shared_memory_alone(modes):
    data, weight = randn(2, 16, 8, 8), randn(16, 16, 3, 3, seed=1)
    weight.attach_grad()
    attrs = {"kernel": (3, 3), "num_filter": 16, "no_bias": True}
    with amp.autocast("bfloat16"):
        right = nd.Convolution(data, weight.copy(), **attrs)
        dense = product(leaf())
        wide = leaf()
        with autograd.record(train_mode=False):
            product(wide)
            assert not leaf_casts._casts
        with autograd.record():
            for train_mode in (*modes, *modes):
                with autograd.train_mode() if train_mode else autograd.predict_mode():
                    assert same(nd.Convolution(data, weight, **attrs), right)
                    assert same(product(wide), dense)


def test_regions_of_other_dtypes_have_casts_of_their_own():
    weight = leaf()
    with amp.autocast("bfloat16"), autograd.record():
        product(weight)
        with amp.autocast("float16"):
            assert same(product(weight), expected(weight))
        with amp.autocast(enabled=False):
            assert same(product(weight), expected(weight))
        assert same(product(weight), expected(weight))


@pytest.mark.parametrize("hybridized", [False, True])
def test_blocks_that_share_a_weight(hybridized):
    first = nn.Dense(8, in_units=8)
    second = nn.Dense(8, in_units=8, params=first.params)
    first.initialize(mx.init.Normal())
    second.hybridize(hybridized)
    with amp.autocast("bfloat16"):
        alone = []
        for block in (first, second):
            with autograd.record():
                block(X).astype("float32").sum().backward()
            alone.append(first.weight.grad().asnumpy())
        with autograd.record():
            losses = [block(X).astype("float32").sum() for block in (first, second, first)]
        autograd.backward(losses)
    total = alone[0] * 2 + alone[1]
    np.testing.assert_allclose(first.weight.grad().asnumpy(), total, rtol=1e-5)


def test_threads_and_devices_have_casts_of_their_own():
    weights = [leaf(), leaf().as_in_context(mx.cpu(1))]
    weights[1].attach_grad()
    found = {}

    def work():
        with amp.autocast("bfloat16"), autograd.record():
            found["thread"] = values(product(weights[0]))
            found["kept"] = len(leaf_casts._casts)

    with amp.autocast("bfloat16"), autograd.record():
        mine = product(weights[0])
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        theirs = product(weights[1], X.as_in_context(mx.cpu(1)))
        assert len(leaf_casts._casts) == 2
    assert found["kept"] == 1
    assert same(mine, found["thread"]) and same(mine, theirs.as_in_context(mx.cpu()))


def test_bfloat16_leaves_are_cast_up_alone():
    weight = down(randn(5, 8), "bfloat16")
    weight.attach_grad()
    with amp.autocast("bfloat16"), autograd.record():
        nd.softmax(weight), nd.softmax(weight)[:, 0].sum().backward()
    assert abs(values(weight.grad)).max() > 0
