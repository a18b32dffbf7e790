"""Float32 products by linalg.gemm2, which a policy for GPUs has on demand."""

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import randn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sides", [(False, False), (True, False), (False, True), (True, True)])
def test_products_and_gradients_are_those_of_float32(sides, device):
    a = randn(2, *((200, 7) if sides[0] else (7, 200))).as_in_context(device)
    b = randn(2, *((5, 200) if sides[1] else (200, 5)), seed=1).as_in_context(device)
    net = mx.gluon.nn.HybridLambda(
        lambda F, x, y: F.batch_dot(x, y, transpose_a=sides[0], transpose_b=sides[1])
    )
    net.hybridize()
    policy = amp.Policy.default("float16", "gpu").override(substitutions=["gemm2"])
    found = []
    for on in (False, True):
        a.attach_grad(), b.attach_grad()
        with mx.autograd.record(), amp.autocast(policy=policy, enabled=on):
            out = net(a, b)
        out.backward()
        found.append([one.asnumpy() for one in (out, a.grad, b.grad)])
    for mine, plain in zip(*found):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, plain, rtol=1e-4, atol=1e-4)
