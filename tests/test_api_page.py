"""docs/api.md and the docstrings behind it: every public name, with an example that runs."""

import inspect
import re
import runpy
import shutil
import textwrap

import pytest

import mxamp as amp
from helpers import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "api_page"))
PAGE = (ROOT / "docs" / "api.md").read_text()
NAMES = [name for _, _, listed in SCRIPT["SECTIONS"] for name in listed.split()]
PUBLIC = {name: SCRIPT["_resolve"](name) for name in NAMES if name not in SCRIPT["VALUES"]}
DOCS = {name: inspect.getdoc(found) for name, found in PUBLIC.items()}
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


def has_example(name):
    """Whether a docstring has code; a method's code may be in the docstring of its class."""
    owner, _, method = name.rpartition(".")
    own = re.search(r"^>>> |::\n\n {4}", DOCS[name], re.M)
    return own or re.search(rf"^( {{4}}|>>> ).*\.{method}\(", DOCS.get(owner, ""), re.M)


def test_every_name_has_an_example():
    assert [name for name in DOCS if not has_example(name)] == []


def parameters(name):
    """The names that a call takes, or that a result has."""
    found = PUBLIC[name]
    if name in SCRIPT["RETURNED"]:
        return getattr(found, "_fields", None) or getattr(found, "__dataclass_fields__", ())
    own_init = inspect.isfunction(getattr(found, "__init__", None))
    if not callable(found) or (inspect.isclass(found) and not own_init):
        return ()
    return set(inspect.signature(found).parameters) - {"self"}


def described(name):
    """The text that describes a name's parameters: with that of the function it refers to."""
    other = re.search(r"other parameters are those of `(\w+)`", DOCS[name])
    return DOCS[name] + (described(other[1]) if other else "")


def is_described(parameter, text):
    """Whether a section has a line for the parameter, or a sentence names it in backticks."""
    line = rf"^(\w+, )*\**{parameter}(, \w+)*( : |$)"
    return re.search(rf"{line}|`[^`\n]*\b{parameter}\b[^`\n]*`", text, re.M)


def test_every_parameter_is_described():
    missing = [
        (name, parameter)
        for name in DOCS
        for parameter in parameters(name)
        if parameter[0] != "_" and not is_described(parameter, described(name))
    ]
    assert missing == []


def test_it_agrees_with_the_help():
    assert SCRIPT["page"]() == PAGE, "write it anew: scripts/api_page"


def test_it_has_every_public_name_once():
    assert sorted(name for name in NAMES if "." not in name) == sorted(
        {*amp.__all__} - {"__version__"}
    )
    assert {f"debugging.{name}" for name in amp.debugging.__all__} < set(NAMES)
    assert len(NAMES) == len(set(NAMES))
    assert all(name.split(".")[0] in amp.__all__ for name in NAMES)


def test_every_name_has_one_line():
    rows = re.findall(r"^\| `(.+)` \| (.+) \|$", PAGE, re.M)
    assert all(len(summary) < 110 for _, summary in rows)
