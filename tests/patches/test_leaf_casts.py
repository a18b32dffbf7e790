"""Casts of a weight that is used several times share memory, and never hold stale values."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

import mxamp as amp
from helpers import parallel, randn, same, untuned
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


def in_thread(weight):
    with parallel(lambda: weight.__setitem__(slice(None), NEW)):
        pass


WRITES = {
    "array": lambda w: w.__setitem__(slice(None), NEW),
    "view": lambda w: w[1:3].__setitem__(slice(None), 0.3),
    "out": lambda w: nd.broadcast_add(NEW, NEW, out=w),
    "+=": lambda w: w.__iadd__(1),
    "optimizer": lambda w: mx.optimizer.SGD(learning_rate=0.5).update(0, w, NEW, None),
    "thread": in_thread,
}


@pytest.mark.parametrize("way", WRITES)
def test_each_use_reads_current_values(way, dtype):
    weight = leaf()
    with amp.autocast(policy=untuned(dtype)):
        with autograd.record():
            before = product(weight)
            with autograd.pause():
                WRITES[way](weight)
            inside = product(weight)
            assert same(inside, expected(weight))
        assert same(product(weight), expected(weight))
        with autograd.record():
            assert same(product(weight), expected(weight))
    assert not same(inside, before)


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_gradients_of_many_uses_are_summed_in_float32(grad_req):
    batches = [randn(4, 8, seed=i) for i in range(40)]
    total, weight = np.zeros((5, 8)), leaf(grad_req=grad_req)
    with amp.autocast(policy=untuned("bfloat16")):
        for batch in batches:
            alone = leaf()
            with autograd.record():
                product(alone, batch).astype("float32").sum().backward()
            total += alone.grad.asnumpy()
        with autograd.record():
            losses = [product(weight, batch).astype("float32").sum() for batch in batches]
        autograd.backward(losses)
    np.testing.assert_allclose(weight.grad.asnumpy(), total, rtol=1e-5, atol=1e-5)


def test_a_graph_keeps_its_casts_when_a_later_scope_casts_new_values():
    weight, x, again = leaf(), X.copy(), X.copy()
    x.attach_grad(), again.attach_grad()
    with amp.autocast(policy=untuned("bfloat16")):
        with autograd.record():
            first = product(weight, x).sum()
        with autograd.record():
            product(weight, again).sum().backward()
        weight[:] = NEW
        with autograd.record():
            product(weight)
        first.backward()
    assert same(x.grad, again.grad)


@pytest.mark.parametrize("modes", [(False, False), (True, False), (False, True)])
def test_recorded_inference_leaves_shared_memory_alone(modes):
    data, weight = randn(2, 16, 8, 8), randn(16, 16, 3, 3, seed=1)
    weight.attach_grad()
    attrs = {"kernel": (3, 3), "num_filter": 16, "no_bias": True}
    with amp.autocast(policy=untuned("bfloat16")):
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
            assert bool(leaf_casts._casts) == any(modes)


def test_a_scope_that_never_began_keeps_nothing():
    """Ctrl-C inside `record()`, before the block under it."""
    weight, scope = leaf(), autograd.record()
    leaf_casts.begin(autograd.record())
    leaf_casts.begin(scope)
    with autograd.record():
        leaf_casts.keep(weight, "float16", weight)
        assert leaf_casts._casts
    leaf_casts.end(scope)
    assert not leaf_casts._casts
