"""Real models: converted graphs run, agree with float32, and hold no more casts than stock's.

Each model runs in a process of its own: some of them, plain, end it.
"""

import json

import pytest

from helpers import DTYPES, run_python

# Output error of a converted model, relative L2. At random weights: ResNet-like networks multiply
# one rounding (2^-11 and 2^-8) by some ten; deep ones without normalisation by more.
TOLERANCE = {"float16": 0.02, "bfloat16": 0.15}

CHOSEN = [
    "mx:resnet18_v1", "mx:resnet50_v2", "mx:vgg11_bn", "mx:squeezenet1_1", "mx:densenet121",
    "mx:mobilenet_v2_1_0", "mx:inception_v3", "mx:alexnet",
    "cv:resnest14", "cv:se_resnext50_32x4d", "cv:mobilenetv3_small", "cv:cifar_resnet20_v1",
    "cv:fcn_resnet50_voc", "cv:deeplab_resnet50_ade", "cv:psp_resnet50_citys",
    "cv:ssd_512_mobilenet1.0_voc", "cv:ssd_300_vgg16_atrous_voc", "cv:yolo3_mobilenet1.0_voc",
    "cv:yolo3_darknet53_coco", "cv:simple_pose_resnet18_v1b", "cv:mobile_pose_mobilenet1.0",
]  # fmt: skip

#: Heights and widths of inputs, by a part of the name; the first that fits.
SIZES = {
    "inception": (299, 299), "ssd_512": (512, 512), "ssd_300": (300, 300), "pose": (256, 192),
    "cifar": (32, 32), "fcn": (480, 480), "deeplab": (480, 480), "psp": (480, 480),
    "yolo3": (128, 128), "densenet": (224, 224), "squeezenet": (224, 224), "alexnet": (224, 224),
    "": (96, 96),
}  # fmt: skip

PROGRAM = r"""
import json, logging, sys, types, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import mxamp as amp
import mxnet as mx
from mxnet.contrib import amp as stock
from mxamp.graph import Graph
from mxamp.machine import BFLOAT16
from mxamp.operators import resolve

origin, name = NAME.split(":")
if origin == "mx":
    net = getattr(mx.gluon.model_zoo.vision, name)(classes=10)
else:
    from gluoncv import model_zoo
    try:
        net = model_zoo.get_model(name, pretrained=False, pretrained_base=False)
    except TypeError:
        net = model_zoo.get_model(name, pretrained=False)
size = SIZE
mx.random.seed(0)
net.initialize(mx.init.MSRAPrelu())
data = mx.nd.random.normal(shape=(2, 3) + size) * 0.5

# A first pass takes the statistics of its batch: activations are of a trained network's size then.
forward = mx.gluon.nn.BatchNorm.forward
def takes_statistics(self, x, *rest):
    self._kwargs["momentum"] = 0.0
    with mx.autograd.train_mode():
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
for dtype in DTYPES:
    policy = amp.Policy.default(dtype, "cpu")
    low, low_args, low_auxs = amp.convert_model(symbol, args, auxs, policy=policy)
    boxes = amp.compare_models((symbol, args, auxs), (low, low_args, low_auxs), {"data": data})
    low = amp.convert_model(whole, args, auxs, policy=policy)
    errors = amp.compare_models((whole, args, auxs), low, {"data": data})
    count = lambda s: s.tojson(remove_amp_cast=False).count('"op": "amp_')
    try:
        theirs = count(stock.convert_symbol(symbol, target_dtype=dtype, data_names=["data"]))
    except Exception:
        theirs = None
    # With its own lists, so that what is compared is the rewrite. They know some operators by two
    # names, in two lists.
    spelled = BFLOAT16 if dtype == "bfloat16" else dtype
    names = lambda listed: {resolve(n).name for n in listed if n not in ("CuDNNBatchNorm", "_TensorRT")}
    fp32 = names(stock.list_fp32_ops(spelled))
    native = amp.Policy.default(dtype, "gpu" if dtype == "float16" else "cpu").override(
        low=stock.list_lp16_ops(spelled), widest=names(stock.list_widest_type_cast(spelled)) - fp32,
        fp32=fp32, conditional=stock.list_conditional_fp32_ops(spelled), replace_lists=True,
    )
    result[dtype] = {
        "relative": max(e.relative for e in errors),
        "lost": sum(e.lost for e in (*errors, *boxes)),
        "ours": count(amp.convert_symbol(symbol, policy=native)),
        "stock": theirs,
        "casts_twice": count(amp.convert_symbol(low[0], policy=policy)) - count(low[0]),
    }
print(json.dumps(result))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_a_model_of_each_kind(name):
    if name.startswith("cv:"):
        pytest.importorskip("gluoncv")
    size = next(size for part, size in SIZES.items() if part in name)
    code = f"NAME, SIZE, DTYPES = {name!r}, {size!r}, {DTYPES!r}\n{PROGRAM}"
    done = run_python(code, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    for dtype, found in json.loads(done.stdout.splitlines()[-1]).items():
        assert 0 < found["relative"] < TOLERANCE[dtype], (dtype, found)
        assert found["lost"] == 0
        assert found["casts_twice"] == 0
        if found["stock"] is not None:
            assert found["ours"] <= found["stock"], (dtype, found)
