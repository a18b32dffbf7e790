"""row_sparse weights: their gradients stay row_sparse, and rows that no batch touched stay put."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import backpropagate, initialized
from models import module_of
from mxamp.framework.arrays import invoke
from mxamp.framework.operators import handle_of, with_trait

ROWS, TOUCHED = 6, [1, 3]
CSR = nd.array([[0, 1, 0, 2, 0, 0], [0, 0, 0, 3, 0, 0]]).tostype("csr")
INDEX = nd.array(TOUCHED)


@pytest.fixture(params=["float32", "float16", "bfloat16", "float16 embeddings"])
def on(request):
    """Mixed precision, also with embeddings among the operators in half precision; or none."""
    dtype, *more = request.param.split()
    if dtype == "float32":
        return
    policy = amp.Policy.default(dtype, "cpu")
    amp.init(policy=policy.override(low=["Embedding", "dot"]) if more else policy)


def product(kind):
    """Return a symbol of a row_sparse weight, and what it reads."""
    data, weight = mx.sym.var("data"), mx.sym.var("weight", stype="row_sparse", shape=(ROWS, 2))
    if kind == "embedding":
        out = mx.sym.Embedding(data, weight, input_dim=ROWS, output_dim=2, sparse_grad=True)
        return out, INDEX
    return mx.sym.sparse.dot(mx.sym.var("data", stype="csr"), weight), CSR


def check(gradient):
    assert gradient.stype == "row_sparse"
    assert gradient.indices.asnumpy().tolist() == TOUCHED
    assert gradient.dtype == np.float32


@pytest.mark.parametrize("hybrid", [False, True])
def test_embeddings_of_blocks(on, hybrid):
    net = initialized(nn.Embedding(ROWS, 2, sparse_grad=True), hybridize=hybrid)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1, "wd": 0.1})
    before = net.weight.data().asnumpy()
    for _ in range(3):
        assert backpropagate(lambda: net(INDEX)).dtype == np.float32
        check(net.weight.grad())
        trainer.step(1)
    moved = np.abs(net.weight.data().asnumpy() - before).sum(1)
    assert np.flatnonzero(moved).tolist() == TOUCHED


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["dot", "embedding"])
def test_modules_leave_other_rows_alone(on, kind, optimizer):
    symbol, data = product(kind)
    module = module_of(mx.sym.make_loss(symbol, name="loss"), data.shape)
    settings = {"learning_rate": 0.1, "wd": 0.1}
    module.init_optimizer(optimizer=amp.decorate(optimizer), optimizer_params=settings)
    for _ in range(2):
        module.forward_backward(mx.io.DataBatch([data]))
        check(module._exec_group.execs[0].grad_dict["weight"])
        module.update()
    weight = module.get_params()[0]["weight"].asnumpy()
    assert np.flatnonzero((weight != 1).any(axis=1)).tolist() == TOUCHED


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_converted_symbols_cast_no_sparse_weight(dtype):
    symbol, _ = product("dot")
    low, _, _ = amp.convert_model(symbol, {"weight": nd.ones((ROWS, 2))}, {}, dtype)
    assert "amp_cast" not in low.tojson()


@pytest.mark.parametrize("stype", ["csr", "row_sparse"])
def test_operators_that_keep_arrays_sparse(stype):
    array = nd.array(np.eye(4)).tostype(stype)
    for operator in with_trait("keeps_sparse"):
        count = 2 if operator.startswith("elemwise") else 1
        names, values = (["scalar"], ["2"]) if operator.endswith("scalar") else ([], [])
        out = invoke(handle_of(operator), [array] * count, names, values, None, False, False)
        assert out.stype == stype, operator


def test_products_of_arrays_that_operators_keep_sparse_are_not_cast():
    """A cast has no sparse kernel: MXNet would make the whole array dense."""
    data = mx.sym.var("data", stype="csr")
    data = mx.sym.elemwise_add(mx.sym.square(data), data * 2)
    low = amp.convert_symbol(mx.sym.dot(data, mx.sym.var("weight")), "float16")
    assert "amp_cast" not in low.tojson()
