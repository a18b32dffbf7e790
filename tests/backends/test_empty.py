"""The core without a backend: it computes what policies say, no faster and no slower."""

import mxnet as mx
import pytest

import mxamp as amp
from helpers import ROOT, python
from mxamp import backends
from mxamp.graph.ir import Graph, Usage

CORE = ("framework", "policy", "graph", "patches", "scaling", "convert", "frontends")


@pytest.mark.proof
def test_the_tests_of_the_core_pass_with_the_empty_backend():
    folders = [str(ROOT / "tests" / name) for name in CORE]
    options = ["-q", "-n2", "--empty-backend", "-p", "no:cacheprovider"]
    chosen = "not (slow or proof)"
    done = python("-m", "pytest", *options, "-m", chosen, *folders, timeout=None)
    assert done.returncode == 0, done.stdout[-5000:]


def test_the_empty_backend_has_no_quirks():
    empty, policy = backends.Backend(), amp.Policy.default("float16", "gpu")
    graph = Graph([], [])
    assert empty.choose(graph, policy, Usage()) == backends.NONE
    assert empty.with_choices(graph, backends.NONE, False) is graph
    assert empty.said("why") == "why"
    assert empty.fast_dtype() == "float32" and not empty.steps("Convolution")
    with pytest.raises(amp.ArgumentError, match="oneDNN has fused"):
        empty.fuse(graph, {}, policy)


@pytest.mark.parametrize("device, name", [("cpu", "oneDNN"), ("gpu", "CUDA")])
def test_reasons_begin_with_the_backend_that_gave_them(device, name):
    data, product = mx.sym.var("data"), mx.sym.batch_dot if device == "gpu" else mx.sym.dot
    net = product(data, data, name="product")
    plan = amp.explain(net, policy=amp.Policy.default("float16", device))
    assert f"{name}: " in plan["product"].reason
