"""docs/api.md and the docstrings behind it: every public name, with an example that runs."""

import functools
import inspect
import re
import shutil
import textwrap

import pytest

import mxamp as amp
from helpers import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()


def listed():
    """Yield the names of the page with what they stand for; classes with their own methods."""
    for name in re.findall(r"^::: mxamp\.(\S+)$", PAGE, re.M):
        found = functools.reduce(getattr, name.split("."), amp)
        yield name, found
        if inspect.isclass(found) and not issubclass(found, (Exception, tuple)):
            methods = ((key, getattr(found, key)) for key in vars(found) if key[0] != "_")
            yield from ((f"{name}.{key}", one) for key, one in methods if inspect.getdoc(one))


PUBLIC = {name: found for name, found in listed() if name != "bfloat16"}
DOCS = {name: inspect.getdoc(found) for name, found in PUBLIC.items()}
NAMES = [name for name in re.findall(r"^::: mxamp\.(\S+)$", PAGE, re.M) if name in DOCS]
BLOCKS = [
    pytest.param(name, textwrap.dedent(block), id=f"{name}-{number}")
    for name, text in DOCS.items()
    for number, block in enumerate(re.findall(r"::\n\n((?: {4}.*\n|\n)+)", f"{text}\n"))
]

#: The program around each example: the names that examples use without defining them.
PROGRAM = """
from pathlib import Path

import mxamp as amp
import mxnet as mx
from mxnet import autograd, gluon

net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(64, activation="relu", in_units=16), gluon.nn.Dense(2, in_units=64))
net.initialize()
net.hybridize()
data, label = mx.nd.ones((32, 16)), mx.nd.ones((32,))
batches = [(data, label)] * 2
batch_size = len(data)
loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(net.collect_params(), "sgd")
net(data)
net.export("resnet")
"""
FORWARD = """
with autograd.record():
    loss = loss_function(net(data), label)
"""
SCALING = "amp.init_trainer(trainer, amp.LossScaler())" + FORWARD
FUNCTIONS = """
import types

my_layers = types.ModuleType("my_layers")
my_layers.attention = lambda query, key, value: mx.nd.dot(query * key, value, transpose_b=True)
my_layers.focal_loss = lambda prediction, label: (prediction - label) ** 2
my_layers.mix = lambda a, b: a + b
query = key = value = prediction = label = a = b = data
"""
MODULE = """
def symbol_of(length):
    hidden = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, flatten=False, name="fc")
    hidden = mx.sym.mean(hidden, axis=1)
    return mx.sym.SoftmaxOutput(hidden, name="softmax"), ("data",), ("softmax_label",)

module = mx.mod.BucketingModule(symbol_of, default_bucket_key=4)
module.bind([("data", (2, 4, 3))], [("softmax_label", (2,))])
module.init_params()
"""
FIT = """
hidden = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2)
module = mx.mod.Module(mx.sym.SoftmaxOutput(hidden, name="softmax"))
iterator = mx.io.NDArrayIter(data, label, batch_size)
"""
#: What else has run before an example, by the example's name.
BEFORE = {
    "unscale": SCALING,
    "clip_grad_global_norm": SCALING,
    "GradScaler.unscale_": "scaler = amp.GradScaler()" + FORWARD,
    "convert_bucketing_module": MODULE,
    "export_onnx": "larger_data = mx.nd.ones((64, 16))\n",
    "tune": "data1 = data2 = data\n",
    "float_function": "target = mx.nd.ones((32, 2))\n",
    "register_half_function": FUNCTIONS,
    "register_float_function": FUNCTIONS,
    "register_promote_function": FUNCTIONS,
    "decorate": FIT,
    # Values that float16 can't hold: the conversion fails.
    "CheckError": 'net[1].weight.set_data(net[1].weight.data() * 1e7); net.export("resnet")\n',
}
#: The packages that an example needs.
PACKAGES = {"export_onnx": ["onnx", "onnxruntime"]}


@pytest.mark.parametrize(("name", "code"), BLOCKS)
def test_an_example_runs(name, code, tmp_path, monkeypatch):
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    code = re.sub(r'budget="\d+s"', 'budget="1s"', code)
    if shutil.which("dot") is None:
        code = code.replace(".svg", ".dot")  # Graphviz writes all other formats
    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAM + BEFORE.get(name, "") + code, name, "exec"), {})  # noqa: S102


def test_every_function_and_class_has_an_example():
    assert [name for name in NAMES if not re.search(r"^>>> |::\n\n {4}", DOCS[name], re.M)] == []


def test_the_page_names_every_public_name():
    assert set(amp.__all__) - {"debugging", "__version__"} <= {*NAMES, "bfloat16"}
