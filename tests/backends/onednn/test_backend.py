"""Quirks of oneDNN's kernels in cached ops."""

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import rnn

import mxamp as amp
from helpers import randn, values
from mxamp.patches import cached_op

RECURRENT = {
    "two layers": (lambda: rnn.LSTM(40, num_layers=2, input_size=24), False),
    "two directions": (lambda: rnn.GRU(40, bidirectional=True, input_size=24), False),
    "dropout": (lambda: rnn.LSTM(40, dropout=0.5, input_size=24), False),
    "plain": (lambda: rnn.LSTM(40, input_size=24), True),
}


@pytest.mark.parametrize("way", ["autocast", "converted"])
@pytest.mark.parametrize("kind_of_rnn", RECURRENT)
@pytest.mark.backend
def test_recurrent_layers_do_not_run_on_memory_that_was_never_written(
    dtype, way, kind_of_rnn, monkeypatch
):
    """With static_shape MXNet doesn't tell RNN whether gradients are wanted: it is up to chance."""
    make, static = RECURRENT[kind_of_rnn]
    given = {}
    init = cached_op.CachedOp.__init__

    def recorded(op, symbol, flags=()):
        given[op] = dict(flags)
        init(op, symbol, flags)

    monkeypatch.setattr(cached_op.CachedOp, "__init__", recorded)
    net, data = make(), randn(7, 3, 24)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    expected = values(net(data))
    if way == "converted":
        net = amp.convert_hybrid_block(net, dtype)
    net.hybridize(static_alloc=True, static_shape=True)
    with amp.autocast(dtype, enabled=way == "autocast"):
        for _ in range(3):
            np.testing.assert_allclose(values(net(data)), expected, atol=0.02)
    (made,) = net._cached_op.variants.made.values()
    (ours,) = [given[op.run] for op in made.ops.values()]
    assert ours["static_alloc"]
    assert ours.get("static_shape", False) == static
