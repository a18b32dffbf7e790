"""Gradients that are zero by definition: programs that run without mixed precision run with it."""

from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import check_python, leaf

#: Each line is a whole loss; L is a dense layer, in low precision.
LOSSES = Path(__file__).with_name("zero_gradients.txt").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_process_lives(dtype):
    # In another process: where it fails, no exception comes.
    check_python(f"""
        import mxamp as amp
        import mxnet as mx
        import numpy as np

        mx.npx.set_np()
        amp.init(policy=amp.Policy.default({dtype!r}, "cpu").untuned())
        x, z, w = arrays = [mx.np.ones((4, 4)) for _ in range(3)]
        mx.autograd.mark_variables(arrays, [mx.np.zeros((4, 4)) for _ in arrays])

        def L(a):
            return mx.npx.fully_connected(a, w, num_hidden=4, no_bias=True)

        for text in {LOSSES!r}:
            print(text, flush=True)
            with mx.autograd.record():
                loss = eval(text)
            loss.backward()
            mx.nd.waitall()
            assert all(np.isfinite(array.grad.asnumpy()).all() for array in arrays)
    """)


@pytest.mark.parametrize("subscripts", ["ii->i", "ii", "ii,i->i"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_gradient_beside_a_diagonal_is_zero(dtype, subscripts):
    mx.npx.set_np()
    others = [mx.np.ones(8)] if "," in subscripts else []
    amp.init(dtype, ctx=mx.cpu())
    for _ in range(5):
        w = leaf(mx.np.ones((8, 8)))
        for _ in range(2):
            # What is freed here is what an array that nobody writes to would hold.
            freed = [mx.np.full((8, 8), 1e25) for _ in range(100)]
            mx.nd.waitall()
            del freed
            with mx.autograd.record():
                loss = mx.np.einsum(subscripts, w, *others).sum()
        loss.backward()
        assert (w.grad.asnumpy() == np.eye(8)).all()
