"""Graphs made to mislead a pass, ways to run them, and the comparison with MXNet's eager calls.

A pass is given by a pattern: a function that puts operators behind an input which the pass changes.
`SURROUNDINGS` build graphs around the pattern, `WAYS` run a graph for a sequence of shapes, and
`eager` is the oracle: plain MXNet in float32, operator by operator.
"""

import json
import warnings
from contextlib import nullcontext
from typing import NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

import mxamp as amp
from helpers import casting_small_layers, values
from mxamp.framework.arrays import as_list, invoke
from mxamp.framework.operators import resolve
from mxamp.graph.ir import Graph

S = mx.sym
BFLOAT16 = casting_small_layers()
#: Every pass that does not need a lowered operator, and float32 throughout: the sharpest oracle.
FLOAT32 = BFLOAT16.override(low=[], replace_lists=True)


class Pattern(NamedTuple):
    """Operators that a pass changes, and where it does."""

    build: object  #: (data, parameter by name) to a symbol, or several
    shape: tuple  #: of the data
    policy: object = FLOAT32
    modes: tuple = ("training", "inference")
    keeps_shape: bool = True  #: the first output has the shape of the data
    spreads: bool = False  #: values that are not finite may reach elements that MXNet keeps finite
    hides_nan: bool = False  #: NaN becomes a number, as in the operator that stands in
    plain: object = None  #: what the eager oracle builds, where MXNet's own gradient is wrong
    tolerance: float = 2e-5  #: relative, for a whole tensor


class Run(NamedTuple):
    """What is run: one step for each shape, with these requests for gradients."""

    symbol: object
    plain: object  #: the symbol of the oracle
    shapes: list  #: of the data, one after another
    policy: object = None
    training: bool = False
    grad_req: object = "write"
    poison: float = 0.0  #: put into one element of the data
    head_poison: float = 0.0  #: and of the first head gradient


def parameters():
    """Return a function that makes each variable once, by its name."""
    made = {}
    return lambda name, **more: made.setdefault(name, S.var(name, **more))


def first(outputs):
    return outputs[0] if isinstance(outputs, (list, tuple)) else outputs


def product(data, name, axes, param):
    """A product that keeps the shape: neighbours that have layouts of their own."""
    weight = param(f"{name}_weight")
    if axes == 4:
        bias = param(f"{name}_bias")
        options = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 16}
        return S.Convolution(data, weight, bias, name=name, **options)
    options = {"no_bias": True, "flatten": False, "num_hidden": 16}
    return S.FullyConnected(data, weight, name=name, **options)


def surroundings(pattern, plain=False):
    """Return graphs around a pattern, by name; those of the oracle if they are to be `plain`."""
    param, data = parameters(), S.var("data")

    def build(x):
        return ((plain and pattern.plain) or pattern.build)(x, param)

    def every(x):
        outputs = build(x)
        return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]

    wave = S.sin(data)
    made = []

    def one():
        made.extend([] if made else [first(build(wave))])
        return made[0]

    found = {
        "alone": lambda: S.Group(every(S.sin(data))),
        "of the input": lambda: S.Group(every(data)),
        "a head that is read": lambda: S.Group([one(), S.sin(one())]),
        "read twice": lambda: S.elemwise_add(one(), S.sin(one())),
        "of a split's second output": lambda: S.Group(
            every(S.split(S.concat(S.sin(data), data, dim=0), num_outputs=2, axis=0)[1])
        ),
        "its input is a head": lambda: S.Group([*every(wave), wave]),
        "shared parameters": lambda: S.elemwise_add(
            first(build(S.sin(data))), first(build(S.cos(data)))
        ),
    }  # fmt: skip
    axes, channels = len(pattern.shape), pattern.shape[-1 if len(pattern.shape) < 4 else 1]
    if pattern.keeps_shape and channels == 16:
        found["between products"] = lambda: product(
            first(build(product(data, "before", axes, param))), "behind", axes, param
        )
        before = product(wave, "before", axes, param)
        found["a product and this are heads"] = lambda: S.Group([before, *every(before)])
        found["twice"] = lambda: first(build(S.sin(first(build(S.sin(data))))))
    return found


# ---------------------------------------------------------------------- values


def arrays_of(run, shape, seed=0):
    """Return the arguments and auxiliary states of a run: the same but for the data's shape."""
    shapes, _, states = run.symbol.infer_shape(data=shape)
    args, aux = {}, {}
    for names, sizes, into in (
        (run.symbol.list_arguments(), shapes, args),
        (run.symbol.list_auxiliary_states(), states, aux),
    ):
        for name, size in zip(names, sizes):
            random = np.random.RandomState(sum(map(ord, name)) + seed)
            value = random.uniform(0.5, 1.5, size) if into is aux else random.randn(*size) * 0.5
            into[name] = nd.array(value)
    if run.poison:
        data = args["data"].asnumpy()
        data[middle(data)] = run.poison
        args["data"] = nd.array(data)
    return args, aux


def middle(array):
    """Return the position of an element within borders, where convolutions pad nothing."""
    return tuple(length // 2 for length in array.shape)


def head_gradients(run, outputs):
    grads = [np.random.RandomState(7 + k).randn(*out.shape) for k, out in enumerate(outputs)]
    if run.head_poison:
        grads[0][middle(grads[0])] = run.head_poison
    return [nd.array(grad) for grad in grads]


def requests(run):
    names = run.symbol.list_arguments()
    return dict.fromkeys(names, run.grad_req) if isinstance(run.grad_req, str) else {
        name: run.grad_req.get(name, "write") for name in names
    }  # fmt: skip


def rounds(run):
    """Two backward passes where gradients are added up."""
    return 2 if run.training and "add" in requests(run).values() else 1


def interpret(graph, inputs):
    """Return the outputs of a graph for inputs by name, run operator by operator."""
    found = {}
    for i, node in enumerate(graph.nodes):
        if node.is_variable:
            found[i, 0] = inputs[node.name]
            continue
        attrs = {name: text for name, text in node.attrs.items() if name[:2] != "__"}
        read = [found[entry] for entry in node.inputs]
        handle = resolve(node.op).handle
        made = invoke(handle, read, list(attrs), list(attrs.values()), None, False, True)
        found.update({(i, k): array for k, array in enumerate(as_list(made))})
    return [found[head] for head in graph.heads]


def recorded(run, call):
    """Return the outputs of a call, after its backward passes in training."""
    for _ in range(rounds(run)):
        with autograd.record() if run.training else nullcontext():
            outputs = as_list(call())
        if run.training:
            autograd.backward(outputs, head_gradients(run, outputs))
    return outputs


def eager(run):
    """Return what plain MXNet computes, operator by operator: a dict of arrays for each shape."""
    graph = Graph.from_symbol(run.plain)
    results = []
    for shape in run.shapes:
        args, aux = arrays_of(run, shape)
        wanted = requests(run)
        for name, array in args.items():
            if run.training and wanted[name] != "null":
                array.attach_grad(wanted[name])
        outputs = recorded(run, lambda inputs={**args, **aux}: interpret(graph, inputs))
        grads = {n: a.grad for n, a in args.items() if run.training and a.grad is not None}
        results.append(collected(outputs, grads, aux if run.training else {}))
    return results


def collected(outputs, grads, aux):
    found = {f"output {k}": values(out) for k, out in enumerate(outputs)}
    found.update({f"gradient of {name}": values(grad) for name, grad in grads.items()})
    found.update({f"state {name}": values(array) for name, array in aux.items()})
    return {name: array.astype("float64") for name, array in found.items()}


# ---------------------------------------------------------------------- ways to run


def hybridized(run):
    args, aux = arrays_of(run, run.shapes[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dtypes follow from the values that are set
        block = gluon.SymbolBlock(run.symbol, [S.var("data")])
    given, wanted = {**args, **aux}, requests(run)
    params = {param.name: param for param in block.collect_params().values()}
    for name, param in params.items():
        param.shape = given[name].shape
        param.initialize(mx.init.Zero())
        if name in wanted:
            param.grad_req = wanted[name]
    block.hybridize()
    results = []
    for shape in run.shapes:
        args, aux = arrays_of(run, shape)
        for name, param in params.items():
            param.set_data({**args, **aux}[name])
            if name in wanted and wanted[name] != "null":
                param.zero_grad()
        data = args["data"]
        if run.training and wanted["data"] != "null":
            data.attach_grad(wanted["data"])
        with amp.autocast(policy=run.policy):
            outputs = recorded(run, lambda data=data: block(data))
        grads = {}
        if run.training:
            grads = {n: p.grad() for n, p in params.items() if wanted.get(n, "null") != "null"}
            grads.update({"data": data.grad} if wanted["data"] != "null" else {})
        held = {name: params[name].data() for name in aux}
        results.append(collected(outputs, grads, held if run.training else {}))
    return results


def executor(run):
    results, bound = [], None
    for shape in run.shapes:
        args, aux = arrays_of(run, shape)
        with amp.autocast(policy=run.policy):
            if bound is None:
                bound = bound_to_arrays(run, args, aux)
            else:
                bound = bound.reshape(allow_up_sizing=True, data=shape)
        bound.copy_params_from(args, aux)
        for grad in bound.grad_arrays or ():
            if grad is not None:
                grad[:] = 0
        for _ in range(rounds(run)):
            outputs = bound.forward(is_train=run.training)
            if run.training:
                bound.backward(head_gradients(run, outputs))
        grads = gradients_of(run, bound)
        results.append(collected(outputs, grads, bound.aux_dict if run.training else {}))
    return results


def gradients_of(run, bound):
    """Return an executor's gradients by name: it has none at all in inference."""
    named = zip(run.symbol.list_arguments(), bound.grad_arrays or ())
    return {name: grad for name, grad in named if grad is not None}


def bound_to_arrays(run, args, aux):
    wanted = requests(run) if run.training else "null"
    grads = None
    if run.training:
        grads = {n: nd.zeros(a.shape) for n, a in args.items() if wanted[n] != "null"}
    return run.symbol.bind(mx.cpu(), dict(args), grads, wanted, dict(aux))


def module(run):
    args, aux = arrays_of(run, run.shapes[0])
    made = mx.mod.Module(run.symbol, ["data"], None)
    results = []
    with amp.autocast(policy=run.policy):
        grad_req = run.grad_req if isinstance(run.grad_req, str) else "write"
        data = [("data", run.shapes[0])]
        made.bind(data, None, run.training, inputs_need_grad=run.training, grad_req=grad_req)
    made.init_params(arg_params={n: a for n, a in args.items() if n != "data"}, aux_params=aux)
    for shape in run.shapes:
        args, aux = arrays_of(run, shape)
        made.set_params({n: a for n, a in args.items() if n != "data"}, aux)
        with amp.autocast(policy=run.policy):
            made.forward(mx.io.DataBatch([args["data"]]), is_train=run.training)
            outputs = made.get_outputs()
            if run.training:
                made.backward(head_gradients(run, outputs))
        [bound] = made._exec_group.execs
        grads = gradients_of(run, bound)
        results.append(collected(outputs, grads, bound.aux_dict if run.training else {}))
    return results


def converted(run, **options):
    """Convert, save, load in plain MXNet, and bind there."""
    results = []
    held, aux = arrays_of(run, run.shapes[0])
    del held["data"]
    symbol, new, states = amp.convert_model(
        run.symbol, held, aux, policy=run.policy, cast_optional_params=True, **options
    )
    symbol = S.load_json(json.dumps(json.loads(symbol.tojson())))
    for shape in run.shapes:
        data, _ = arrays_of(run, shape)
        bound = symbol.bind(mx.cpu(), {**new, "data": data["data"]}, aux_states=states)
        results.append(collected(bound.forward(), {}, {}))
    return results


def fused(run):
    return converted(run, fuse=True)


WAYS = {way.__name__: way for way in (hybridized, executor, module)}


# ---------------------------------------------------------------------- the comparison


def compared(way, run, pattern):
    """Return in words where a way of running differs from eager calls."""
    mine, theirs = way(run), eager(run)
    # A mask of 0 times infinity is as good as the infinity.
    spreads = pattern.spreads or bool(run.poison)
    if run.poison:
        for results in (*mine, *theirs):
            if "gradient of data" in results:
                # Of what is not finite itself, any gradient will do.
                gradient = results["gradient of data"]
                gradient[middle(gradient)] = 0
    return differences(mine, theirs, pattern.tolerance, spreads)


def differences(mine, theirs, tolerance, spreads):
    found = []
    for k, (one, other) in enumerate(zip(mine, theirs)):
        for name in other:
            if name not in one:
                found.append(f"step {k}, {name}: missing")
            elif one[name].shape != other[name].shape:
                found.append(f"step {k}, {name}: {one[name].shape} for {other[name].shape}")
            else:
                text = difference(one[name], other[name], tolerance, spreads)
                found += [f"step {k}, {name}: {text}"] if text else []
    return found


def difference(mine, theirs, tolerance, spreads):
    finite = np.isfinite(theirs)
    if spreads:
        if np.isfinite(mine)[~finite].any():
            return "finite where MXNet's is not"
        finite &= np.isfinite(mine)
    elif (np.isfinite(mine) != finite).any():
        count = int((np.isfinite(mine) != finite).sum())
        return f"not finite in other places: {count} of {mine.size}"
    error = np.linalg.norm(mine[finite] - theirs[finite])
    size = np.linalg.norm(theirs[finite])
    return f"error {error:.2g} of {size:.2g}" if error > tolerance * size + 1e-6 else ""
