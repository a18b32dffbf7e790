"""Real models: converted graphs run, agree with float32, and hold no more casts than stock's.

By default a model of each family; `--all-models` takes all of MXNet's model zoo and of GluonCV's
classification, segmentation, detection and pose models that build without a download, an hour or
two. Each model runs in a process of its own: some of them, plain, end it.
"""

import importlib.util
import json

import pytest

from helpers import run_python
from mxamp.policy.policy import Policy

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
    "inception": (299, 299), "googlenet": (224, 224), "nasnet": (224, 224), "xception": (224, 224), "ssd_512_resnet18": (256, 256), "ssd_512": (512, 512), "ssd_300": (300, 300), "pose": (256, 192),
    "cifar": (32, 32), "residualattention": (224, 224), "fcn": (64, 64), "deeplab": (64, 64), "psp": (64, 64),
    "icnet": (480, 480), "danet": (128, 128), "fastscnn": (480, 480),
    "yolo3": (128, 128), "densenet": (224, 224), "squeezenet": (224, 224),
    "": (96, 96),
}  # fmt: skip

PROGRAM = r"""
import json, logging, sys, types, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import mxamp as amp
import mxnet as mx
from mxnet.contrib import amp as stock
from mxamp.graph.ir import Graph
from mxamp.framework.machine import BFLOAT16

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
    if any(kind in name for kind in ("fcn", "psp", "deeplab", "danet", "fastscnn")):
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
    count = lambda s: s.tojson(remove_amp_cast=False).count('"op": "amp_')
    try:
        theirs = count(stock.convert_symbol(symbol, target_dtype=dtype, data_names=["data"]))
    except Exception:
        theirs = None
    # With its own lists, so that what is compared is the rewrite. They go by name, and know some
    # operators by two names in two lists: those that this graph uses count.
    spelled = BFLOAT16 if dtype == "bfloat16" else dtype
    used = {node.op for node in Graph.from_symbol(symbol).nodes}
    names = lambda listed: [name for name in listed if name in used]
    native = amp.Policy.default(dtype, "gpu" if dtype == "float16" else "cpu").override(
        low=names(stock.list_lp16_ops(spelled)), fp32=names(stock.list_fp32_ops(spelled)),
        widest=names(stock.list_widest_type_cast(spelled)), replace_lists=True,
        conditional=[c for c in stock.list_conditional_fp32_ops(spelled) if c[0] in used],
    )
    result[dtype] = {
        "relative": max(e.relative for e in errors),
        "noise": max(e.relative for e in noise),
        "lost": lost,
        "ours": count(amp.convert_symbol(symbol, policy=native)),
        "stock": theirs,
        "casts_twice": count(amp.convert_model(*low, policy=policy)[0]) - count(low[0]),
    }
print(json.dumps(result))
"""


#: Of GluonCV's names, those of other kinds: two-stage detectors, video, tracking, depth, other
#: builds of the same graph, what plain MXNet 1.9.1 can't run; and SSD on MobileNet, whose BatchNorms
#: take no statistics here: random activations vanish on the way, and nothing is left to compare.
OTHER_KINDS = (
    "ssd_300_mobilenet", "ssd_512_mobilenet",
    "rcnn", "kinetics", "ucf101", "hmdb51", "sthsth", "i3d", "slowfast", "siamrpn", "monodepth", "int8",
    "custom", "_gn", "center_net", "hrnet", "custom", "resnetv1b_p", "doublehead", "r2plus1d", "c3d", "p3d",
)  # fmt: skip


def all_models():
    from mxnet.gluon.model_zoo import vision

    names = [
        f"mx:{name}"
        for name, made in vars(vision).items()
        if (callable(made) and name[0].islower() and name[-1].isdigit()) or name.endswith("_bn")
    ]
    names = [n for n in names if "get_" not in n]
    listing = """
        import numpy as np
        for missing, kind in (("float", float), ("int", int), ("bool", bool)):
            if missing not in vars(np):
                setattr(np, missing, kind)
        import mxamp
        from gluoncv import model_zoo
        print(*model_zoo.get_model_list())
    """
    done = run_python(listing)  # where there is no GluonCV it prints nothing
    return names + [
        f"cv:{n}" for n in done.stdout.split() if not any(kind in n for kind in OTHER_KINDS)
    ]


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-models")
        chosen = [*QUICK, *(pytest.param(name, marks=pytest.mark.proof) for name in LONG)]
        metafunc.parametrize("name", all_models() if every else chosen)


def can_run(name):
    return name.startswith("mx:") or importlib.util.find_spec("gluoncv") is not None


@pytest.mark.slow
def test_a_model_of_each_kind(name):
    if not can_run(name):
        pytest.skip("GluonCV is not installed")
    size = next(size for part, size in SIZES.items() if part in name)
    batch = 1 if "ssd" in name else 2
    given = f"NAME, SIZE, BATCH, UNIT = {name!r}, {size!r}, {batch}, {UNIT!r}\n"
    done = run_python(given + PROGRAM, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    for dtype, found in json.loads(done.stdout.splitlines()[-1]).items():
        assert 0 < found["relative"] < TOLERANCE * found["noise"], (dtype, found)
        assert found["lost"] == 0
        assert found["casts_twice"] == 0
        # Where bfloat16 kernels are missing, a product is cast down and up again.
        detours = dtype == "bfloat16" and Policy.default(dtype).rule("Convolution").missing
        if found["stock"] is not None and not detours:
            assert found["ours"] <= found["stock"], (dtype, found)
