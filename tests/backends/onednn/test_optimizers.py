"""The SGD step in NumPy: bit for bit MXNet's."""

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mxnet import nd

import mxamp as amp
from helpers import same, values
from mxamp.backends.onednn import optimizers as updates

B = amp.Policy.default("bfloat16")
PLAIN = B.override(substitutions=[name for name in B.substitutions if name != "sgd"])
# MXNet refuses numbers that float32 can't hold.
FLOATS = st.one_of(st.just(0.0), st.floats(1e-9, 1))


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def any_size(monkeypatch):
    """NumPy for arrays of any size."""
    monkeypatch.setattr(updates, "_LEAST", 0)


@pytest.fixture
def counted(monkeypatch):
    """The arrays that were updated in NumPy."""
    calls, original = [], updates._sgd
    monkeypatch.setattr(updates, "_sgd", lambda *a: (calls.append(a[2]), original(*a)))
    return calls


def arrays(seed, odd):
    random = np.random.RandomState(seed)
    for size in (1, 7, 40000):
        array = random.randn(size) * 10 ** random.uniform(-6, 3, size)
        array[:: random.randint(3, 9)] = odd
        yield nd.array(array.astype("float32"))


def stepped(options, seed, odd, policy):
    """Weights, states and the number of updates after some steps."""
    optimizer = mx.optimizer.create("sgd", **options)
    updater = mx.optimizer.get_updater(optimizer)
    weights = list(arrays(seed, -0.0))
    with amp.autocast(policy=policy):
        for step in range(3):
            updater(list(range(len(weights))), list(arrays(seed + 1 + step, odd)), weights)
    states = [updater.states[i] for i in range(len(weights)) if updater.states[i] is not None]
    return [values(a) for a in (*weights, *states)], optimizer.num_update


@pytest.mark.usefixtures("any_size")
@pytest.mark.slow
@given(
    rate=FLOATS, decay=st.one_of(st.just(0.0), FLOATS), rescale=FLOATS,
    momentum=st.one_of(st.just(0.0), FLOATS), clip=st.one_of(st.none(), st.floats(1e-3, 10)),
    odd=st.sampled_from([0.0, -0.0, 1e30, np.inf, np.nan, 1e-40]), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=25)
def test_bit_for_bit_as_mxnet(rate, decay, rescale, momentum, clip, odd, seed):
    options = {
        "learning_rate": rate, "wd": decay, "rescale_grad": rescale, "clip_gradient": clip,
        "momentum": momentum,
    }  # fmt: skip
    plain, count = stepped(options, seed, odd, PLAIN)
    found, same_count = stepped(options, seed, odd, B)
    assert count == same_count
    assert all(same(mine, theirs) for mine, theirs in zip(found, plain))


class Mine(mx.optimizer.SGD):
    pass


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("optimizer, policy, options, used", [
    (mx.optimizer.SGD, B, {}, True),
    (mx.optimizer.SGD, B.untuned(), {}, False),
    (mx.optimizer.SGD, amp.Policy.default("float16", "cpu"), {}, False),
    (lambda: mx.optimizer.SGD(multi_precision=True), B, {"dtype": "float16"}, False),
    (mx.optimizer.SGD, B, {"stype": "row_sparse"}, False),
    (mx.optimizer.SGD, B, {"cores": "16"}, False),
    (Mine, B, {}, False),
])  # fmt: skip
def test_when_numpy_updates(optimizer, policy, options, used, counted, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", options.get("cores", "1"))
    updater = mx.optimizer.get_updater(optimizer())
    weight, grad = (nd.ones((3, 2), dtype=options.get("dtype", "float32")) for _ in range(2))
    with amp.autocast(policy=policy):
        updater(0, weight.tostype(options.get("stype", "default")), grad)
    assert bool(counted) == used


def test_small_arrays_are_updated_by_mxnet(counted):
    weights = [nd.ones((size,)) for size in (64, 2**21, 2**21 - 1)]
    optimizer = mx.optimizer.SGD(learning_rate=0.5)
    with amp.autocast("bfloat16"):
        gradients = [nd.ones((weight.size,)) for weight in weights]
        mx.optimizer.get_updater(optimizer)([0, 1, 2], gradients, weights)
    assert [weight.size for weight in counted] == [2**21] and optimizer.num_update == 1
    assert all((weight.asnumpy() == 0.5).all() for weight in weights)
