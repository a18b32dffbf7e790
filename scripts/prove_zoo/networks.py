"""Networks built without downloads: GluonCV's, smaller ones of GluonNLP, and NumPy-style ones."""

import sys
from contextlib import suppress
from typing import Any, Callable, Dict, List, Sequence, Tuple

import mxnet as mx
from mxnet import nd, npx
from mxnet.gluon import HybridBlock, nn

from zoo import Case, Shape

#: Returns a language model's inputs.
Example = Callable[[], Tuple[Any, ...]]
#: A placeholder path for constructors that require weights.
_NO_FILE = "no download"
#: Proposals of an R-CNN: 300 take minutes on a CPU.
_PROPOSALS = 32
#: Attributes that hold the number of proposals.
_LIMITS = ("_rpn_test_post_nms", "_test_post_nms", "_rcnn_max_dets")
#: R-CNNs with a feature pyramid use ROIPooling. For ROIAlign, GluonCV gives boxes of other levels
#: the batch index -1, and MXNet's CPU kernel reads memory before the array: outputs change from run
#: to run, and become infinite.
_POOLED = "pool"
#: A Faster R-CNN with a small base, which is trained: GluonCV's settings, but fewer boxes.
SMALL_RCNN = "faster_rcnn_fpn_resnet18_v1b"
_CUSTOM_RCNN = {
    "base_network_name": "resnet18_v1b", "short": 800, "max_size": 1333, "min_stage": 2,
    "max_stage": 6, "nms_thresh": 0.5, "nms_topk": -1, "post_nms": -1, "roi_mode": _POOLED,
    "roi_size": (7, 7), "strides": (4, 8, 16, 32, 64), "clip": 4.14, "rpn_channel": 256,
    "base_size": 16, "scales": (2, 4, 8, 16, 32), "ratios": (0.5, 1, 2), "alloc_size": (384, 384),
    "rpn_nms_thresh": 0.7, "rpn_train_pre_nms": 256, "rpn_train_post_nms": 64,
    "rpn_test_pre_nms": 256, "rpn_test_post_nms": _PROPOSALS, "rpn_min_size": 1,
    "per_device_batch_size": 1, "num_sample": 32, "pos_iou_thresh": 0.5, "pos_ratio": 0.25,
}  # fmt: skip
_CLASSES = ("apple", "orange", "pear", "quince", "plum")


def _prevent_downloads() -> None:
    """Patch GluonCV and `Block.load_parameters` to initialize at random instead of downloading."""

    def get_model_file(*_: Any, **__: Any) -> str:
        return _NO_FILE

    for name, module in list(sys.modules.items()):
        if name.startswith("gluoncv") and "get_model_file" in vars(module):
            module.get_model_file = get_model_file  # type: ignore[attr-defined]
    load = mx.gluon.Block.load_parameters

    def load_parameters(self: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        if filename == _NO_FILE:
            self.initialize(force_reinit=True)
        else:
            load(self, filename, *args, **kwargs)

    mx.gluon.Block.load_parameters = load_parameters


def _options(case: Case, shapes: Sequence[Shape]) -> List[Dict[str, Any]]:
    """Return keyword arguments of a model's constructor to try in turn: not all take all."""
    options: Dict[str, Any] = {"pretrained": False, "pretrained_base": False}
    more: Dict[str, Any] = {}
    if case.family == "segmentation":
        more["crop_size"] = shapes[0][-1]
    if "_custom" in case.name and case.family != "action":
        more["classes"] = _CLASSES
    if case.name.endswith("_custom") and case.family == "action":
        more["use_kinetics_pretrain"] = False  # weights that would be copied from a download
    if case.name.startswith("custom_"):
        return [{"pretrained_base": False, "classes": _CLASSES}]
    alone = {"pretrained": False}
    return [{**options, **more}, options, {**alone, **more}, alone]


def build(case: Case, shapes: Sequence[Shape]) -> Any:
    """Return the network of a case, not initialized."""
    if case.name.startswith("np:"):
        npx.set_np()
        mx.random.seed(0)
        return NUMPY_NETWORKS[case.name[len("np:") :]]()
    if case.name.startswith("nlp:"):
        mx.random.seed(0)
        net, net.example = LANGUAGE_MODELS[case.name[len("nlp:") :]]()
        return net
    from gluoncv import model_zoo

    _prevent_downloads()
    if case.name == SMALL_RCNN:
        from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import custom_faster_rcnn_fpn

        return custom_faster_rcnn_fpn(_CLASSES, pretrained_base=False, **_CUSTOM_RCNN)
    failure = None
    for options in _options(case, shapes):
        try:
            net = model_zoo.get_model(case.name, **options)
            break
        except (TypeError, ValueError, Warning) as error:  # an option that it does not take
            failure = failure or error
    else:
        raise failure or RuntimeError(case.name)
    _limit_proposals(net)
    if "_fpn_" in case.name:
        net._roi_mode = _POOLED
    return net


def _limit_proposals(net: Any) -> None:
    """Lower the number of proposals of an R-CNN."""
    for block in [net, *net._children.values()]:
        for name in _LIMITS:
            if hasattr(block, name):
                setattr(block, name, _PROPOSALS)


def initialize(net: Any) -> None:
    """Initialize all parameters of a network, weights by He's scheme for ReLUs."""
    for name, param in net.collect_params().items():
        if name.endswith(("gamma", "_var")):
            param.init = mx.init.One()
        elif name.endswith(("beta", "_mean", "bias")):
            param.init = mx.init.Zero()
        elif name.endswith("weight"):
            # Detectors' own initializers start near zero, which leaves nothing to compare.
            param.init = None
    net.initialize(mx.init.MSRAPrelu(slope=0.0), force_reinit=True)


def inputs_of(shapes: Sequence[Shape]) -> Tuple[Any, ...]:
    """Return a random image for each shape, smooth as photographs are."""
    import numpy as np

    random = np.random.RandomState(0)
    made = []
    for shape in shapes:
        value = random.normal(size=shape)
        for axis in (-1, -2):
            for _ in range(2):
                value = value + np.roll(value, 1, axis)
        made.append(mx.nd.array((value / value.std()).astype("float32")))
    return tuple(made)


# ---------------------------------------------------------------------- NumPy-style


class Network(HybridBlock):
    """A network with example inputs."""

    shape: Tuple[int, ...] = (2, 8, 16)

    def example(self) -> Tuple[Any, ...]:
        """Return random inputs of the shape `shape`."""
        npx.random.seed(0)
        return (mx.np.random.normal(size=self.shape).astype("float32"),)


class Mlp(Network):
    """A gated multilayer perceptron with its own normalization."""

    shape = (4, 64)

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.wide, self.out = nn.Dense(256), nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        a, b = F.np.split(self.wide(x), 2, axis=-1)
        h = a * F.npx.sigmoid(b)
        h = (h - F.np.mean(h, axis=-1, keepdims=True)) / F.np.sqrt(
            F.np.var(h, axis=-1, keepdims=True) + 1e-5
        )
        return self.out(h)


class Attention(Network):
    """Self-attention by `einsum` and `matmul`, with a mask."""

    shape = (2, 12, 32)

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.project = nn.Dense(96, flatten=False)
            self.norm = nn.LayerNorm()
            self.out = nn.Dense(10, flatten=False)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        q, k, v = F.np.split(self.project(x), 3, axis=-1)
        scores = F.np.matmul(q, F.np.swapaxes(k, 1, 2)) / 32**0.5
        weights = F.npx.softmax(scores, axis=-1)
        return self.out(self.norm(x + F.np.einsum("bij,bjd->bid", weights, v)))


class Convolutions(Network):
    """Convolutions with BatchNorm, pooling and a residual sum."""

    shape = (2, 3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.first = nn.HybridSequential()
            self.first.add(nn.Conv2D(16, 3, 1, 1), nn.BatchNorm(), nn.Activation("relu"))
            self.second = nn.HybridSequential()
            self.second.add(nn.Conv2D(16, 3, 1, 1), nn.BatchNorm())
            self.pool, self.out = nn.GlobalAvgPool2D(), nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        h = self.first(x)
        return self.out(self.pool(F.npx.relu(h + self.second(h))))


class Mixture(Network):
    """Experts that are weighed by a gate, stacked and summed."""

    shape = (8, 32)

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.gate = nn.Dense(4)
            self.experts = nn.HybridSequential()
            for _ in range(4):
                self.experts.add(nn.Dense(16))

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        weights = F.np.expand_dims(F.npx.softmax(self.gate(x)), -1)
        outputs = F.np.stack([expert(x) for expert in self.experts._children.values()], axis=1)
        return F.np.sum(weights * F.np.tanh(outputs), axis=1)


NUMPY_NETWORKS: Dict[str, Callable[[], Network]] = {
    "mlp": Mlp, "attention": Attention, "convolutions": Convolutions, "mixture": Mixture,
}  # fmt: skip


# ---------------------------------------------------------------------- GluonNLP

_WORDS, _LENGTH, _ROWS, _UNITS = 1000, 24, 2, 64


def _random_words(shape: Tuple[int, ...]) -> Any:
    """Return random indices of words."""
    return nd.random.randint(0, _WORDS, shape=shape).astype("float32")


def bert() -> Tuple[Any, Example]:
    """Return BERT with its pooler and both of its classifiers' inputs."""
    from gluonnlp.model.bert import BERTEncoder, BERTModel

    encoder = BERTEncoder(
        units=_UNITS, hidden_size=4 * _UNITS, num_layers=2, num_heads=4, max_length=_LENGTH
    )
    net = BERTModel(
        encoder, vocab_size=_WORDS, token_type_vocab_size=2, units=_UNITS, embed_size=_UNITS,
        use_decoder=False, use_classifier=True,
    )  # fmt: skip
    lengths = nd.array([_LENGTH, _LENGTH - 5])
    return net, lambda: (_random_words((_ROWS, _LENGTH)), nd.zeros((_ROWS, _LENGTH)), lengths)


def transformer() -> Tuple[Any, Example]:
    """Return the encoder of the translation model."""
    from gluonnlp.model.transformer import TransformerEncoder

    net = TransformerEncoder(
        num_layers=2, units=_UNITS, hidden_size=4 * _UNITS, max_length=_LENGTH, num_heads=4
    )
    lengths = nd.array([_LENGTH, _LENGTH - 5])
    return net, lambda: (nd.random.normal(shape=(_ROWS, _LENGTH, _UNITS)), None, lengths)


def language_model() -> Tuple[Any, Example]:
    """Return the LSTM language model."""
    from gluonnlp.model.language_model import StandardRNN

    net = StandardRNN("lstm", _WORDS, _UNITS, _UNITS, 2, dropout=0.2, tie_weights=False)

    def example() -> Tuple[Any, ...]:
        return _random_words((_LENGTH, _ROWS)), net.begin_state(batch_size=_ROWS, func=nd.zeros)

    return net, example


LANGUAGE_MODELS: Dict[str, Callable[[], Tuple[Any, Example]]] = {
    "bert": bert, "transformer": transformer, "language_model": language_model,
}  # fmt: skip


def names() -> List[str]:
    """Return the names of the models of all installed packages."""
    found = [f"np:{name}" for name in NUMPY_NETWORKS]
    with suppress(ImportError):
        from gluoncv import model_zoo

        found = [*model_zoo.get_model_list(), *found]
    with suppress(ImportError):
        import gluonnlp  # noqa: F401

        found += [f"nlp:{name}" for name in LANGUAGE_MODELS]
    return found
