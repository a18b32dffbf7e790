"""Real models: converted graphs run, and agree with float32.

Each model runs in a process of its own: some of them, plain, end it.
"""

import importlib.util
import json

import pytest

from helpers import run_python

# One rounding, relatively.
UNIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}

# At random weights deep networks are chaotic: they multiply one rounding by some ten or a hundred.
# So the error is measured against that of the float32 network with each weight disturbed by one
# rounding (a normal error of that size).
TOLERANCE = 1.0

QUICK = [
    "mx:resnet18_v1", "mx:squeezenet1_1", "mx:mobilenet_v2_1_0", "cv:resnest14",
    "cv:mobilenetv3_small", "cv:cifar_resnet20_v1", "cv:mobile_pose_mobilenet1.0",
]  # fmt: skip
LONG = [
    "mx:resnet50_v2", "mx:vgg11_bn", "mx:densenet121", "mx:inception_v3", "mx:alexnet",
    "cv:se_resnext50_32x4d", "cv:fcn_resnet50_voc", "cv:deeplab_resnet50_ade",
    "cv:psp_resnet50_ade", "cv:ssd_512_resnet18_v1_voc", "cv:ssd_300_vgg16_atrous_voc",
    "cv:yolo3_mobilenet1.0_voc", "cv:yolo3_darknet53_coco", "cv:simple_pose_resnet18_v1b",
]  # fmt: skip

#: Heights and widths of inputs, by a part of the name; the first that fits.
SIZES = {
    "inception": (299, 299), "ssd_512_resnet18": (256, 256), "ssd_300": (300, 300), "pose": (256, 192),
    "cifar": (32, 32), "fcn": (64, 64), "deeplab": (64, 64), "psp": (64, 64), "yolo3": (128, 128),
    "densenet": (224, 224), "squeezenet": (224, 224), "": (96, 96),
}  # fmt: skip

PROGRAM = r"""
import json, logging, sys, types, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import mxamp as amp
import mxnet as mx
from mxamp.graph.ir import Graph

origin, name = NAME.split(":")
if origin == "mx":
    net = getattr(mx.gluon.model_zoo.vision, name)(classes=10)
else:
    import numpy as np
    for missing, kind in (("float", float), ("int", int), ("bool", bool)):
        if missing not in vars(np):
            setattr(np, missing, kind)  # GluonCV 0.10 is from before NumPy 1.24
    from gluoncv import model_zoo
    options = {"pretrained": False, "pretrained_base": False}
    if any(kind in name for kind in ("fcn", "psp", "deeplab")):
        options["crop_size"] = SIZE[0]
    try:
        net = model_zoo.get_model(name, **options)
    except (TypeError, Warning):  # some take no pretrained_base
        net = model_zoo.get_model(name, pretrained=False)
size = SIZE
mx.random.seed(0)
for name, param in net.collect_params().items():
    # GluonCV asks for Xavier in the BatchNorms of SSD, which knows no vectors.
    if name.endswith(("gamma", "_var")):
        param.init = mx.init.One()
    elif name.endswith(("beta", "_mean")):
        param.init = mx.init.Zero()
net.initialize(mx.init.MSRAPrelu())
data = mx.nd.random.normal(shape=(BATCH, 3) + size) * 0.5

# A first pass takes the size of each activation, as training would: without it float16 vanishes in
# deep networks. The mean stays: random networks of centred activations are chaotic.
forward = mx.gluon.nn.BatchNorm.forward
def takes_statistics(self, x, *rest):
    forward(self, x, *rest)
    axes = tuple(i for i in range(x.ndim) if i != 1)
    self.running_var.set_data((x**2).mean(axis=axes) + 1e-3)
    return forward(self, x, *rest)
mx.gluon.nn.BatchNorm.forward = takes_statistics
net(data)
mx.nd.waitall()
mx.gluon.nn.BatchNorm.forward = forward
net.hybridize()
with mx.autograd.predict_mode():
    net(data)
mx.nd.waitall()
inputs, symbol = net._cached_graph
arrays = {p.name: p.data() for p in net.collect_params().values()}
args = {n: arrays[n] for n in symbol.list_arguments() if n in arrays}
auxs = {n: arrays[n] for n in symbol.list_auxiliary_states()}

def selects(node):
    return "nms" in node.op or node.op in ("topk", "argmax")

def before_selection(symbol):
    # Which boxes are kept, and in which order, turns on the last bit: compare what goes in there.
    graph = Graph.from_symbol(symbol)
    heads = [node.inputs[0] for node in graph.nodes if selects(node)][:1]
    return Graph(graph.nodes, heads, graph.attrs).to_symbol() if heads else symbol

result = {}
whole = before_selection(symbol)
scored = [(symbol, args, auxs)] if whole is symbol else [(symbol, args, auxs), (whole, args, auxs)]
for dtype in UNIT:
    policy = amp.Policy.default(dtype, "cpu")
    lost = 0
    for model in scored:
        low = amp.convert_model(*model, policy=policy)
        errors = amp.compare_models(model, low, {"data": data})
        lost += sum(e.lost for e in errors)
    noisy = {k: v * mx.nd.random.normal(1, UNIT[dtype], v.shape) for k, v in args.items()}
    noise = amp.compare_models((whole, args, auxs), (whole, noisy, auxs), {"data": data})
    result[dtype] = {
        "relative": max(e.relative for e in errors),
        "noise": max(e.relative for e in noise),
        "lost": lost,
    }
print(json.dumps(result))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.proof) for name in LONG)]
)
def test_a_model_of_each_kind(name):
    if name.startswith("cv:") and importlib.util.find_spec("gluoncv") is None:
        pytest.skip("GluonCV is not installed")
    size = next(size for part, size in SIZES.items() if part in name)
    batch = 1 if "ssd" in name else 2
    given = f"NAME, SIZE, BATCH, UNIT = {name!r}, {size!r}, {batch}, {UNIT!r}\n"
    done = run_python(given + PROGRAM, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    for dtype, found in json.loads(done.stdout.splitlines()[-1]).items():
        assert 0 < found["relative"] < TOLERANCE * found["noise"], (dtype, found)
        assert found["lost"] == 0
