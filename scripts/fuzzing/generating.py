"""Random programs: operators with random attributes that fit the shapes, and random steps."""

import random
from contextlib import ExitStack
from typing import Any, Callable, Dict, List, Tuple

import mxamp  # noqa: F401  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np

from .programs import Node, Program, Ref, Step, pruned
from .running import evaluated

Shape = Tuple[int, ...]

WAYS = "block", "block", "block", "bind", "simple_bind", "module", "bucketing", "trainer"
#: Images, sequences, rows. Some are large enough for the substitutions of long sums and broadcasts.
SHAPES = (
    (2, 4, 6, 6), (2, 3, 8, 8), (2, 16, 6, 6), (4, 1, 8, 8), (2, 32, 4, 4), (2, 64, 5, 5),
    (6, 8), (8, 32), (64, 32), (8, 600), (2, 5, 16), (4, 6, 48), (8, 32, 16), (16, 64, 48),
)  # fmt: skip
LARGEST = 60_000  #: elements of a value
#: The changes of a block between two calls.
CHANGES = "shape mode set_data hybridize grad_req off policy cast export convert".split()
#: Operators with another name in `mx.np` and `mx.npx`; families in the middle have none there.
NUMPY = dict(pair.split(":") for pair in """
    Activation:npx.activation BatchNorm:npx.batch_norm Convolution:npx.convolution
    Deconvolution:npx.deconvolution Dropout:npx.dropout Embedding:npx.embedding
    FullyConnected:npx.fully_connected LayerNorm:npx.layer_norm LeakyReLU:npx.leaky_relu
    Pooling:npx.pooling abs:np.abs batch_dot:npx.batch_dot broadcast_add:np.add
    broadcast_maximum:np.maximum broadcast_mul:np.multiply broadcast_sub:np.subtract clip:np.clip
    concat:np.concatenate exp:np.exp expand_dims:np.expand_dims log_softmax:npx.log_softmax
    max:np.max mean:np.mean min:np.min negative:np.negative one_hot:npx.one_hot pick:npx.pick
    relu:npx.relu sigmoid:npx.sigmoid softmax:npx.softmax sqrt:np.sqrt square:np.square
    stack:np.stack sum:np.sum tanh:np.tanh transpose:np.transpose SliceChannel:np.split
""".split())  # fmt: skip
NUMPY_ATTRS = {"dim": "axis", "num_outputs": "indices_or_sections"}


class Builder:
    """A random network: its nodes, its parameters, and its values with their shapes."""

    def __init__(self, chance: random.Random, numpy: bool, shape: Shape) -> None:
        self.chance, self.numpy = chance, numpy
        self.nodes: List[Node] = []
        self.params: Dict[str, List[int]] = {}
        self.values: Dict[Ref, Shape] = {"data": shape}
        self._symbols = {"data": self._variable("data"), "label": self._variable("label")}
        self._known: Dict[str, Shape] = {"data": shape, "label": shape[:1]}

    def _variable(self, name: str) -> Any:
        variable = mx.sym.var(name)
        return variable.as_np_ndarray() if self.numpy else variable

    def pick(self, *options: Any) -> Any:
        """Return one of the options at random."""
        return self.chance.choice(options)

    def rarely(self, one_in: int = 6) -> bool:
        """Return True once in `one_in` calls, at random."""
        return self.chance.random() * one_in < 1

    def param(self, role: str, *shape: int) -> Ref:
        """Return the name of a parameter of a shape: a new one, or one of the same role."""
        fitting = [name for name, one in self.params.items() if one == list(shape)]
        same = [name for name in fitting if name.rstrip("0123456789") == role]
        # BatchNorm writes its gamma, with fix_gamma, and its statistics.
        if same and not role.startswith(("running", "fixed")) and self.rarely(3):
            return same[-1]
        name = f"{role}{len(self.nodes)}"
        self.params[name], self._known[name] = list(shape), shape
        self._symbols[name] = self._variable(name)
        return name

    def other(self, shape: Shape, fits: Callable[[Shape], bool]) -> Ref:
        """Return a value whose shape fits, at random; there is one of `shape`."""
        return self.pick(*(ref for ref, one in self.values.items() if one == shape or fits(one)))

    def add(self, op: str, *inputs: Ref, outputs: int = 1, **attrs: Any) -> None:
        """Add a node, if MXNet finds its output's shape and that is not too large."""
        if self.numpy and op in NUMPY:
            op = NUMPY[op]
            attrs = {NUMPY_ATTRS.get(key, key): one for key, one in attrs.items()}
        k, node = len(self.nodes), Node(op, list(inputs), attrs, outputs)
        try:
            symbol = evaluated(node, k, mx.sym, self._symbols)
            group = mx.sym.Group(list(symbol))
            known = {k: self._known[k] for k in group.list_arguments() if k in self._known}
            shapes = group.infer_shape_partial(**known)[1]
        except (mx.MXNetError, ValueError, TypeError, AssertionError):
            return
        sizes = [size for shape in shapes or [()] for size in shape]
        if shapes and min(sizes, default=1) > 0 and all(np.prod(one) <= LARGEST for one in shapes):
            self.nodes.append(node)
            self._symbols[f"v{k}"] = symbol
            refs = [f"v{k}"] if outputs == 1 else [f"v{k}[{i}]" for i in range(outputs)]
            self.values.update(zip(refs, shapes))


#: Families: functions that add a node reading a value, by rank of the value, as often as drawn.
FAMILIES: Dict[int, List[Tuple[Callable[[Builder, Ref, Shape], None], bool]]] = {}


def family(*ranks: int, numpy: bool = True, weight: int = 2) -> Callable[[Any], Any]:
    """Register a family for values of these ranks, by default all."""

    def register(function: Any) -> Any:
        for rank in ranks or (1, 2, 3, 4, 5):
            FAMILIES.setdefault(rank, []).extend([(function, numpy)] * weight)
        return function

    return register


@family(3, 4, weight=8)
def convolution(g: Builder, x: Ref, shape: Shape) -> None:
    rank, channels = len(shape) - 2, shape[1]
    kernel, groups = g.pick(1, 3, 2), g.pick(1, 1, 1, channels, 2, 4)
    filters = groups * g.pick(1, 2, 3, 4, 8) if groups > 1 else g.pick(4, 16, 8, 3, 1, 24, 32)
    choices = {"stride": (1, 2), "pad": (0, 1), "dilate": (1, 2)}
    more = {name: (g.pick(*sizes),) * rank for name, sizes in choices.items() if g.rarely(2)}
    bias = [] if g.rarely(2) else [g.param("bias", filters)]
    weight = g.param("weight", filters, channels // groups, *[kernel] * rank)
    more.update(num_filter=filters, num_group=groups, no_bias=not bias)
    g.add("Convolution", x, weight, *bias, kernel=(kernel,) * rank, **more)


@family(4)
def deconvolution(g: Builder, x: Ref, shape: Shape) -> None:
    kernel, stride, filters = g.pick(2, 3), g.pick(1, 2), g.pick(4, 16, 3)
    weight = g.param("deconv_weight", shape[1], filters, kernel, kernel)
    sizes = {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "num_filter": filters}
    g.add("Deconvolution", x, weight, g.param("bias", filters), **sizes, no_bias=False)


@family(2, 3, 4, weight=5)
def dense(g: Builder, x: Ref, shape: Shape) -> None:
    flatten, units = g.rarely(2), g.pick(4, 8, 16, 3, 1, 32, 64)
    width = int(np.prod(shape[1:])) if flatten else shape[-1]
    bias = [] if g.rarely(2) else [g.param("bias", units)]
    options = {"num_hidden": units, "flatten": flatten, "no_bias": not bias}
    g.add("FullyConnected", x, g.param("weight", units, width), *bias, **options)


@family(2, 4, weight=5)
def batch_norm(g: Builder, x: Ref, shape: Shape) -> None:
    names = ("fixed_gamma", "beta", "running_mean", "running_var")
    more = {"use_global_stats": True} if g.rarely() else {}
    params = [g.param(role, shape[1]) for role in names]
    g.add("BatchNorm", x, *params, fix_gamma=g.rarely(2), **more)


@family(2, 3, 4)
def normalization(g: Builder, x: Ref, shape: Shape) -> None:
    op = g.pick("LayerNorm", "LayerNorm", "InstanceNorm", "L2Normalization", "GroupNorm")
    if op == "L2Normalization":
        g.add(op, x, mode=g.pick("instance", "channel", "spatial"))
    else:
        size = {"LayerNorm": shape[-1], "InstanceNorm": shape[1], "GroupNorm": 1}[op]
        more = {"num_groups": 1} if op == "GroupNorm" else {}
        g.add(op, x, g.param("gamma", size), g.param("beta", size), **more)


@family(weight=8)
def activation(g: Builder, x: Ref, shape: Shape) -> None:
    op = g.pick("relu", "sigmoid", "tanh", "Activation", "clip", "LeakyReLU", "prelu")
    if op == "Activation":
        g.add(op, x, act_type=g.pick("relu", "sigmoid", "tanh", "softrelu", "softsign"))
    elif op == "clip":
        low, high = g.pick((0, 6), (0, 6), (-1, 1), (0, 1))
        g.add(op, x, a_min=low, a_max=high)
    elif op == "LeakyReLU":
        g.add(op, x, act_type=g.pick("leaky", "leaky", "elu", "selu", "gelu"))
    elif op == "prelu":
        g.add("LeakyReLU", x, g.param("slope", g.pick(1, *shape[1:2])), act_type=op)
    else:
        g.add(op, x)


@family(3, 4, weight=3)
def pooling(g: Builder, x: Ref, shape: Shape) -> None:
    kind, rank = g.pick("avg", "max", "sum"), len(shape) - 2
    if g.rarely(2):
        g.add("Pooling", x, pool_type=kind, global_pool=True, kernel=(1,) * rank)
        return
    more = {"count_include_pad": False} if g.rarely(3) and kind == "avg" else {}
    choices = {"kernel": (2, 3), "stride": (2, 1), "pad": (0, 1)}
    more.update({name: (g.pick(*sizes),) * rank for name, sizes in choices.items()})
    g.add("Pooling", x, pool_type=kind, **more)


@family(4, numpy=False)
def image_size(g: Builder, x: Ref, shape: Shape) -> None:
    g.pick(
        lambda: g.add("contrib.AdaptiveAvgPooling2D", x, output_size=g.pick(1, 2)),
        lambda: g.add("UpSampling", x, scale=2, sample_type="nearest"),
        lambda: g.add("pad", x, mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 1, 1)),
    )()


@family(weight=4)
def reduction(g: Builder, x: Ref, shape: Shape) -> None:
    op = g.pick("sum", "mean", "sum", "mean", "max", "min")
    axis = g.pick(1, -1, (1,), (-1,), (0,), (2, 3), (1, 2), (0, 1), (0, 2, 3), (1, 2, 3), ())
    if axis != () or op in ("sum", "mean"):
        g.add(op, x, axis=axis, keepdims=g.rarely(2))


@family()
def unary(g: Builder, x: Ref, shape: Shape) -> None:
    # A root of what may be negative is NaN, which is no test of anything.
    made = g.nodes[int(x[1:])].op if x[1:].isdigit() else ""
    roots = ["sqrt"] * 3 if made.rpartition(".")[2] in ("relu", "clip", "sigmoid", "square") else []
    g.add(g.pick("square", "abs", "negative", "exp", *roots), x)
    g.add(g.pick("softmax", "log_softmax"), x, axis=g.pick(-1, 0)) if g.rarely(3) else None


@family(weight=1)
def template(g: Builder, x: Ref, shape: Shape) -> None:
    g.add("=" + g.pick("{} * 0.5", "{} + 1", "1 - {}", "{} / 2", "{} ** 2", "{} * 3"), x)


@family(weight=4)
def elementwise(g: Builder, x: Ref, shape: Shape) -> None:
    ops = ["=({} + {})", "broadcast_add", "broadcast_mul", "broadcast_sub", "broadcast_maximum"]
    ops += [] if g.numpy else ["elemwise_add", "elemwise_mul"]
    g.add(g.pick(*ops), x, g.other(shape, lambda one: False))


@family(2, 3, 4)
def broadcasting(g: Builder, x: Ref, shape: Shape) -> None:
    sizes, axis = [1] * len(shape), g.pick(1, -1)
    sizes[axis] = shape[axis]
    y = (
        g.other(shape, lambda one: len(one) == len(shape))
        if g.rarely(2)
        else g.param("beta", *sizes)
    )
    op = g.pick("broadcast_add", "broadcast_mul", "broadcast_sub", "broadcast_maximum")
    g.add(op, *g.pick((x, y), (y, x)))


@family(2, 3, 4)
def split(g: Builder, x: Ref, shape: Shape) -> None:
    parts = g.pick(2, 3, 4)
    g.add("SliceChannel", x, outputs=parts, axis=g.pick(1, len(shape) - 1), num_outputs=parts)


@family(2, 3, 4)
def concatenation(g: Builder, x: Ref, shape: Shape) -> None:
    if g.rarely(3):
        g.add("stack", x, g.other(shape, lambda one: False), axis=1)
    else:
        y = g.other(shape, lambda one: (one[:1], one[2:]) == (shape[:1], shape[2:]))
        g.add("concat", x, y, dim=1)


@family(2, 3, 4, weight=1)
def reshaping(g: Builder, x: Ref, shape: Shape) -> None:
    last = len(shape) - 1
    kinds = [("transpose", {"axes": (0, *range(2, last + 1), 1)}), ("expand_dims", {"axis": 1})]
    if g.numpy:
        kinds += [("np.swapaxes", {"axis1": 1, "axis2": last})]
        kinds += [("npx.reshape", {"newshape": (-2, -1)})]
    else:
        kinds += [("Flatten", {}), ("reshape", {"shape": (0, -1)})]
    op, attrs = g.pick(*kinds)
    g.add(op, x, **attrs)


@family(2, 3, 4, numpy=False)
def slicing(g: Builder, x: Ref, shape: Shape) -> None:
    axis, begin = g.pick(1, len(shape) - 1), g.pick(0, 1)
    g.add("slice_axis", x, axis=axis, begin=begin, end=begin + shape[axis] // 2)


@family(weight=1)
def identity(g: Builder, x: Ref, shape: Shape) -> None:
    op = "Dropout" if g.numpy else g.pick("Dropout", "identity", "BlockGrad")
    g.add(op, x, **({"p": 0} if op == "Dropout" else {}))


@family(2, 3)
def indexing(g: Builder, x: Ref, shape: Shape) -> None:
    sizes = {"input_dim": 4, "output_dim": g.pick(8, 16)}
    kinds = [
        lambda: g.add("Embedding", "label", g.param("weight", *sizes.values()), **sizes),
        lambda: g.add("one_hot", "label", depth=4),
    ]
    if shape[1] >= 4:
        kinds += [lambda: g.add("pick", x, "label", axis=1)] if len(shape) == 2 else []
        kinds += [] if g.numpy else [lambda: g.add("take", x, "label", axis=1)]
    g.pick(*kinds)()


@family(3, weight=3)
def batched_product(g: Builder, x: Ref, shape: Shape) -> None:
    g.add("batch_dot", x, g.other(shape, lambda one: len(one) == 3), transpose_b=True)


@family(2, numpy=False)
def dot(g: Builder, x: Ref, shape: Shape) -> None:
    g.add("dot", x, g.param("weight", g.pick(4, 16), shape[1]), transpose_b=True)


@family(3, numpy=False, weight=4)
def sequence(g: Builder, x: Ref, shape: Shape) -> None:
    if g.rarely(3):
        g.add(LOOP, x, g.param("weight", shape[2], shape[2]))
    else:
        more = {"num_layers": 2} if g.rarely(3) else {}
        op = f"@rnn.{g.pick('LSTM', 'GRU', 'RNN')}"
        more.update(hidden_size=g.pick(8, 16), input_size=shape[2], bidirectional=g.rarely(2))
        g.add(op, x, **more)


LOOP = (
    "=F.contrib.foreach(lambda a, s: (F.tanh(F.FullyConnected(a, {1}, num_hidden=1, no_bias=True) "
    "+ s), a), {0}, F.zeros_like(F.squeeze(F.slice_axis({0}, axis=0, begin=0, end=1), axis=0)))[0]"
)


@family(numpy=False, weight=1)
def operators_in_python(g: Builder, x: Ref, shape: Shape) -> None:
    g.add("Custom", x, op_type=g.pick("twice", "loss"))


@family(2, numpy=False, weight=1)
def output(g: Builder, x: Ref, shape: Shape) -> None:
    wide = f"=F.broadcast_like(F.expand_dims(label, 1), {x})"
    op = g.pick("LinearRegressionOutput", "MAERegressionOutput", "SoftmaxOutput")
    g.add(op, x, "label" if op == "SoftmaxOutput" else wide)


# ---------------------------------------------------------------------- programs


def random_program(number: int) -> Program:
    """Return a random program; the same one for the same number."""
    chance = random.Random(number)
    way = chance.choice(WAYS)
    policy = chance.choice(("float32", "float32", "bfloat16", "float16"))
    numpy = way in ("block", "trainer") and chance.random() < 0.25
    shape = chance.choice(SHAPES)
    with ExitStack() as stack:
        if numpy:
            stack.enter_context(mx.util.np_shape(True))
            stack.enter_context(mx.util.np_array(True))
        g = Builder(chance, numpy, shape)
        wanted = chance.randint(1, 9)
        for _ in range(3 * wanted):
            ref = g.pick(*[list(g.values)[-1]] * 2, *list(g.values)[-5:])
            families = FAMILIES.get(len(g.values[ref]), ())
            fitting = [one for one, there in families if there or not numpy]
            if len(g.nodes) < wanted and fitting:
                g.pick(*fitting)(g, ref, g.values[ref])
    *older, last = list(g.values)
    heads = [last] + [ref for ref in older[1:] if g.rarely(8)]
    special: Dict[str, str] = {}
    if policy == "float32" and way != "trainer" and g.rarely(12):
        special = {g.pick("data", "head"): g.pick("nan", "inf")}
    steps = {"block": _block, "trainer": _trainer}.get(way, _executor)(g, shape, policy)
    if way in ("module", "bucketing"):
        steps = [step for step in steps if step.kind != "reshape"]
    inside = "enabled=False" if policy != "float32" and g.rarely(12) else None
    front = g.pick("autocast", "autocast", "init")
    network = g.params, g.nodes, heads
    return pruned(Program(way, policy, front, numpy, *network, steps, 0, special, inside))


def _other_shape(g: Builder, shape: Shape) -> Shape:
    """Return a shape with another batch size or larger images, or the same one."""
    larger = (*shape[:2], *(size + g.pick(1, 4) for size in shape[2:]))
    empty = (0, *shape[1:]) if g.rarely(3) else shape
    return g.pick(shape, (g.pick(1, 3, 7), *shape[1:]), larger, empty)


def _converting(g: Builder, policy: str) -> Dict[str, Any]:
    """Return random options of a conversion."""
    fuse = {} if policy == "float16" or g.numpy else {"fuse": True}
    return g.pick({}, {"cast_optional_params": True}, fuse)


def _block(g: Builder, shape: Shape, policy: str) -> List[Step]:
    """Return random calls of a block, with changes of it between them."""
    train, converted, steps = g.rarely(2), False, []
    if not g.rarely(5):
        flags = {"static_alloc": True}
        steps = [Step("hybridize", g.pick({}, flags, {**flags, "static_shape": True}))]
    hybrid = bool(steps)
    patterns = ".*", ".*weight.*", ".*bias.*|.*beta.*"
    reqs = [{"pattern": one, "req": req} for req in ("null", "add", "write") for one in patterns]
    changes = {"set_data": [{"seed": 1}, {"seed": 2}], "cast": [{}], "grad_req": reqs}
    steps.append(Step("call", {"shape": shape, "train": train}))
    while g.rarely(2) and len(steps) < 7:
        now: Dict[str, Any] = {"shape": shape, "train": train}
        kind = g.pick(*CHANGES)
        if kind == "shape":
            now["shape"] = _other_shape(g, shape)
        elif kind == "hybridize":
            steps.append(Step(kind, {"static_alloc": g.rarely(2), "active": not g.rarely(3)}))
        elif converted:
            pass
        elif kind == "mode":
            now["train"] = g.rarely(2)
        elif kind in changes:
            steps.append(Step(kind, g.pick(*changes[kind])))
        elif kind == "export" and hybrid:
            steps += [Step(kind, {"policy": None}), Step("hybridize")]
        elif kind == "convert" and hybrid and policy != "float16":
            options = _converting(g, policy)
            steps.append(Step(kind, {"shape": shape, "policy": None, **options}))
            now["train"] = train = train and not options
            converted = True
        elif kind == "policy" and policy != "float32":
            now["policy"] = g.pick("float32", "bfloat16", "float16")
        if kind == "off" or converted:
            now["policy"] = None
        steps.append(Step("call", now))
    return steps


def _trainer(g: Builder, shape: Shape, policy: str) -> List[Step]:
    """Return one to three random steps of a trainer."""
    kind = g.pick("init_trainer", "decorate")
    steps = [Step(kind, {"shape": shape, "optimizer": g.pick("sgd", "adam")})]
    if g.rarely(2):
        steps.append(Step("hybridize", {"static_alloc": g.rarely(2)}))
    for _ in range(g.pick(1, 2, 3)):
        now = _other_shape(g, shape) if g.rarely(4) else shape
        steps.append(Step("train", {"shape": now, "overflow": g.rarely(5)}))
        if g.rarely(5):
            req = {"pattern": ".*weight.*", "req": g.pick("write", "null")}
            steps.append(Step("grad_req", req))
    return steps


def _executor(g: Builder, shape: Shape, policy: str) -> List[Step]:
    """Return random runs of an executor, of a converted symbol at times, and reshapes."""
    train, converted = g.rarely(2), g.rarely(3)
    bound: Dict[str, Any] = {"policy": None} if converted else {}
    options = _converting(g, policy) if converted else {}
    train = train and not options
    first = {"shape": shape, "train": train, **bound}
    steps = [Step("bind", {**first, "convert": options} if converted else first)]
    steps.append(Step("execute", first))
    for _ in range(g.pick(0, 0, 1, 2)):
        now = _other_shape(g, shape)
        steps.append(Step("reshape", {"shape": now, **bound}))
        steps.append(Step("execute", {"shape": now, "train": train, **bound}))
    return steps
