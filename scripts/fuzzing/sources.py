"""A program as a Python script: what the worker runs, and what a report shows."""

import re
from typing import Any, Dict, List

from .programs import Node, Program, Step

__all__ = ["source"]

HEAD = '''\
import contextlib
import zlib
{imports}
import mxamp as amp
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

AMP = True
POLICIES = {{{policies}}}


def array(name, shape, seed={seed}):
    """Return values that depend on the name alone."""
    random = np.random.RandomState(zlib.crc32(f"{{seed}} {{name}}".encode()))
    if name == "label":
        return {nd}.array(random.randint(0, 4, shape).astype("float32"))
    values = random.uniform(-1, 1, shape).astype("float32")
    if name.startswith(("gamma", "running_var")):
        values = 1.5 + values
    if "weight" in name:
        values *= (3 / max(np.prod(shape[1:]), 1)) ** 0.5
{special}    return {nd}.array(values)

'''
AUTOCAST = '''
def on(policy):
    """Mixed precision for a region."""
    return amp.autocast(policy=POLICIES[policy]) if AMP and policy else contextlib.nullcontext()

'''
INIT = '''
@contextlib.contextmanager
def on(policy):
    """Mixed precision for the process."""
    if AMP and policy:
        amp.init(policy=POLICIES[policy], tuned=False)
    yield
    amp.shutdown()

'''
POLICIES = {
    "float32": 'amp.Policy.default("bfloat16", "cpu").in_float32()',
    "bfloat16": 'amp.Policy.default("bfloat16", "cpu")',
    "float16": 'amp.Policy.default("float16", "cpu")',
}
CUSTOM = """
class Twice(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * 2)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0] * 2)


@mx.operator.register("twice")
class TwiceProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Twice()

"""
NOISE = '''
def noise(F, value):
    """Return a value with errors of rounding: rounded, or with each element moved up or down."""
    if ROUND:
        large = value * ROUND
        return large - (large - value)
    F = {nd}
    return value * (1 + EPSILON * F.sign(F.sin(value * PHASE)))

'''
NET = """
class Net(gluon.HybridBlock):
    def __init__(self):
        super().__init__(prefix="")
{init}
    def hybrid_forward(self, F, data{names}):
{body}

"""
FILL = """
def fill(net, seed={seed}):
    net.initialize()
    for name, param in net.collect_params().items():
        param.set_data(array(name, param.shape, seed))

"""
CALL = '''
def call(net, shape, train, req="write"):
    """Return outputs and, in training, gradients."""
    data = array("data", shape)
    data.attach_grad()
    inputs = [data{label}]
    if not train:
        return named("output", net(*inputs))
    with autograd.record():
        outs = listed(net(*inputs))
        loss = sum((out.astype("float32") * array("head", out.shape)).sum() for out in outs)
    loss.backward()
    grads = {{k: p.grad() for k, p in net.collect_params().items() if p.grad_req != "null"}}
    return [*named("output", outs), *named("gradient of data", data.grad),
            *((f"gradient of {{k}}", grads[k].asnumpy()) for k in sorted(grads))]

'''
TRAIN = '''
def train(net, trainer, shape, overflow=False):
    """Make a step."""
    inputs = [array("data", shape){label}]
    with autograd.record():
        outs = listed(net(*inputs))
        loss = sum((out.astype("float32") * array("head", out.shape)).sum() for out in outs)
        loss = loss * (float("inf") if overflow else 1)
        with amp.scale_loss(loss, trainer) if AMP else contextlib.nullcontext(loss) as scaled:
            scaled.backward()
    grads = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
    if AMP or all(np.isfinite(grad.asnumpy()).all() for grad in grads):
        trainer.step(shape[0])
    return []

'''
LISTED = """
def listed(outs):
    return list(outs) if isinstance(outs, (list, tuple)) else [outs]


def named(name, arrays):
    return [(f"{name} {k}", one.asnumpy()) for k, one in enumerate(listed(arrays))]

"""
STATE = '''
def state(net):
    """Return the parameters and running statistics."""
    params = net.collect_params()
    return [(f"parameter {k}", params[k].data().asnumpy()) for k in sorted(params)]

'''
SHAPES = """
def gradients(grads):
    names = [k for k in sorted(grads) if grads[k] is not None and k != "label"]
    return [(f"gradient of {k}", grads[k].asnumpy()) for k in names]


def inputs_of(sym, shape):
    known = {"data": shape, "label": shape[:1]}
    return {name: known[name] for name in sym.list_arguments() if name in known}

"""
EXECUTE = '''
def execute(exe, shape, train):
    """Return outputs and, in training, gradients."""
    given = inputs_of(exe._symbol, shape)
    outs = exe.forward(is_train=train, **{name: array(name, one) for name, one in given.items()})
    found = named("output", outs)
    if train:
        exe.backward([array("head", out.shape) for out in outs])
        found += gradients(exe.grad_dict)
    return found + [(f"aux {k}", one.asnumpy()) for k, one in sorted(exe.aux_dict.items())]

'''
BIND = """
def arrays(sym, shape):
    shapes, _, aux = sym.infer_shape(**inputs_of(sym, shape))
    args = {k: array(k, one) for k, one in zip(sym.list_arguments(), shapes)}
    return args, {k: array(k, one) for k, one in zip(sym.list_auxiliary_states(), aux)}

"""
MODULE = '''
def execute_module(mod, shape, train):
    """Return outputs and, in training, gradients."""
    given = inputs_of(mod.symbol, shape)
    batch = mx.io.DataBatch([array(k, one) for k, one in given.items()])
    batch.provide_data = list(given.items()){bucket}
    mod.forward(batch, is_train=train)
    outs = mod.get_outputs()
    found = named("output", outs)
    if train:
        mod.backward([array("head", out.shape) for out in outs])
        found += gradients(mod{current}._exec_group.execs[0].grad_dict)
    return found

'''
TAIL = """

def error(one, other):
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{other.shape} {other.dtype}, not {one.shape} {one.dtype}"
    if not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return "other elements are finite"
    one, other = (np.nan_to_num(x.astype("float64")) for x in (one, other))
    return np.linalg.norm(one - other) / max(np.linalg.norm(one), 1e-30)


if __name__ == "__main__":
    AMP = False
    exact = run()
    AMP = True
    for (name, one), (_, other) in zip(exact, run()):
        print(name, error(one, other))
"""


def source(program: Program, noisy: bool = False) -> str:
    """Return a script whose `run` returns named arrays: with mixed precision where `AMP` is true.

    With `noisy`, what it computes gets errors of the size of the global `EPSILON`, or is rounded by `ROUND`.
    """
    nd = "mx.np" if program.numpy else "mx.nd"
    steps = [step.options.get("policy", program.policy) for step in program.steps]
    names = sorted({program.policy, *(name for name in steps if name)})
    imports = "import tempfile\n" if any(s.kind == "export" for s in program.steps) else ""
    parts = [HEAD.format(
        nd=nd, seed=program.seed, imports=imports,
        policies=", ".join(f'"{name}": {POLICIES[name]}' for name in names),
        special="".join(_special(*item) for item in program.special.items()),
    )]  # fmt: skip
    parts.append(INIT if program.front == "init" else AUTOCAST)
    parts += [CUSTOM] if any(node.op == "Custom" for node in program.nodes) else []
    parts += [NOISE.format(nd="F.np" if program.numpy else "F")] if noisy else []
    parts += [_net(program, noisy), LISTED, *_helpers(program), _run(program), TAIL]
    return re.sub(r"\n{3,}(?=\S)", "\n\n\n", "".join(parts))


def _special(where: str, value: str) -> str:
    return f'    if name == "{where}":\n        values.flat[::7] = np.{value}\n'


def reads_label(program: Program) -> bool:
    """Return whether a program has integer labels as its second input."""
    return any("label" in text for node in program.nodes for text in [*node.inputs, node.op])


def _net(program: Program, noisy: bool) -> str:
    used = {name for node in program.nodes for name in node.inputs}
    params = {name: shape for name, shape in program.params.items() if name in used}
    init, body = [], []
    for name, shape in params.items():
        frozen = ', grad_req="null"' if name.startswith("running") else ""
        init.append(f'self.{name} = self.params.get("{name}", shape={tuple(shape)}{frozen})')
    for k, node in enumerate(program.nodes):
        if node.op.startswith("@"):
            layer = f'gluon.{node.op[1:]}({_attrs(node)}, prefix="layer{k}_")'
            init.append(f"self.layer{k} = {layer}")
    if noisy:
        floats = ["data", *(name for name in params if not name.startswith("running"))]
        body += [f"{name} = noise(F, {name})" for name in floats]
    for k, node in enumerate(program.nodes):
        text = _expression(node, k)
        if noisy and node.op != "one_hot":
            text = f"noise(F, {text})" if node.outputs == 1 else f"[noise(F, v) for v in {text}]"
        body.append(f"v{k} = {text}")
    body.append(f"return {', '.join(program.heads)}")
    label = ", label" if reads_label(program) else ""
    return NET.format(
        init="".join(f"        {line}\n" for line in init),
        names=label + "".join(f", {name}" for name in params),
        body="\n".join(f"        {line}" for line in body),
    )


def _attrs(node: Node) -> str:
    def shown(value: Any) -> str:
        return repr(tuple(value) if isinstance(value, list) else value)

    return ", ".join(f"{name}={shown(value)}" for name, value in node.attrs.items())


def _expression(node: Node, k: int) -> str:
    if node.op.startswith("="):
        return node.op[1:].format(*node.inputs)
    inputs = [one[1:].format(*node.inputs) if one[0] == "=" else one for one in node.inputs]
    if node.op.startswith("@"):
        return f"self.layer{k}({', '.join(inputs)})"
    if node.op in ("np.concatenate", "np.stack"):
        inputs = [f"[{', '.join(inputs)}]"]
    return f"F.{node.op}({', '.join([*inputs, _attrs(node)]).rstrip(', ')})"


def _helpers(program: Program) -> List[str]:
    label = ', array("label", shape[:1])' if reads_label(program) else ""
    fill = FILL.format(seed=program.seed)
    if program.way == "block":
        return [fill, CALL.format(label=label), STATE]
    if program.way == "trainer":
        return [fill, TRAIN.format(label=label), STATE]
    parts = [SHAPES, BIND]
    if program.way in ("module", "bucketing"):
        bucketing = program.way == "bucketing"
        bucket = "\n    batch.bucket_key, batch.provide_label = shape[0], None" if bucketing else ""
        current = "._curr_module" if bucketing else ""
        return [*parts, MODULE.format(bucket=bucket, current=current)]
    return [*parts, EXECUTE]


def _run(program: Program) -> str:
    """Return the function `run`: the steps, those of one policy in one region."""
    lines = [*_START[program.way](program)]
    lines = [line.format(**_words(program)) for line in lines]
    region, inside = "", False
    for step in program.steps:
        policy = step.options.get("policy", program.policy)
        entered = f'with on("{policy}"):' if policy else ""
        if entered != region:
            lines += [entered] if entered else []
            region, inside = entered, bool(entered)
        texts = _step(step, program)
        lines += [f"    {text}" if inside else text for text in texts]
    # Conversion casts parameters.
    if program.way in ("block", "trainer") and not any(s.kind == "convert" for s in program.steps):
        lines.append("seen += state(net)")
    lines.append("return seen")
    text = "\n".join(f"    {line}" for line in lines)
    wrapped = f"\ndef run():\n    seen = []\n{text}\n"
    if program.numpy:
        wrapped = wrapped.replace("def run()", "def steps()")
        wrapped += "\n\ndef run():\n    mx.npx.set_np()\n    try:\n        return steps()\n"
        wrapped += "    finally:\n        mx.npx.reset_np()\n"
    return wrapped


def _words(program: Program) -> Dict[str, Any]:
    shape = next((s.options["shape"] for s in program.steps if "shape" in s.options), ())
    return {"policy": program.policy, "shape": tuple(shape)}


def _symbol(program: Program) -> List[str]:
    label = ', mx.sym.var("label")' if reads_label(program) else ""
    made = f'Net()(mx.sym.var("data"){label})'
    sym = f"sym = mx.sym.Group({made})" if len(program.heads) > 1 else f"sym = {made}"
    lines = [sym, "args, aux = arrays(sym, {shape})"]
    options = program.steps[0].options.get("convert")
    if options is not None:
        words = "".join(f", {k}={v!r}" for k, v in options.items())
        lines += [
            "if AMP:",
            '    policy = POLICIES["{policy}"]',
            f"    sym, args, aux = amp.convert_model(sym, args, aux, policy=policy{words})",
        ]
    return lines


def _block(program: Program) -> List[str]:
    return ["net = Net()", "fill(net)"]


def _trainer(program: Program) -> List[str]:
    options = program.steps[0].options
    return [
        "net = Net()", "fill(net)",
        f"trainer = gluon.Trainer(net.collect_params(), {options['optimizer']!r},",
        "                        {{'learning_rate': 0.05}}, update_on_kvstore=False)",
    ]  # fmt: skip


def _executor(program: Program) -> List[str]:
    return _symbol(program)


_START = {
    "block": _block, "trainer": _trainer, "bind": _executor, "simple_bind": _executor,
    "module": _executor, "bucketing": _executor,
}  # fmt: skip


def _step(step: Step, program: Program) -> List[str]:
    """Return the lines of a step."""
    options = dict(step.options)
    shape = tuple(options.get("shape", ()))
    train = options.get("train", False)
    if step.kind == "call":
        return [f"seen += call(net, {shape}, train={train})"]
    if step.kind == "hybridize":
        more = ", ".join(f"{k}={v}" for k, v in options.items() if k not in ("policy", "shape"))
        return [f"net.hybridize({more})"]
    if step.kind == "set_data":
        return [f"fill(net, seed={options['seed']})"]
    if step.kind == "grad_req":
        return ["for name, param in net.collect_params({!r}).items():".format(options["pattern"]),
                "    if 'running' not in name:",
                f"        param.grad_req = {options['req']!r}"]  # fmt: skip
    if step.kind == "cast":
        return ['net.cast("float32")']
    if step.kind == "export":
        names = ["data", "label"] if reads_label(program) else ["data"]
        return ["with tempfile.TemporaryDirectory() as folder:",
                '    net.export(folder + "/net")',
                f'    net = gluon.SymbolBlock.imports(folder + "/net-symbol.json", {names},'
                ' folder + "/net-0000.params")']  # fmt: skip
    if step.kind == "convert":
        skipped = ("policy", "shape")
        words = "".join(f", {k}={v!r}" for k, v in options.items() if k not in skipped)
        given = "array('data', %s)" % (shape,)
        if reads_label(program):
            given = f"[{given}, array('label', {shape[:1]})]"
        return ["if AMP:", f"    net = amp.convert_hybrid_block(net, policy=POLICIES"
                f"[{program.policy!r}], example_inputs={given}{words})"]  # fmt: skip
    if step.kind == "init_trainer":
        return ["if AMP:", "    amp.init_trainer(trainer, amp.LossScaler(init_scale=16))"]
    if step.kind == "train":
        return [f"seen += train(net, trainer, {shape}, overflow={options['overflow']})"]
    return _symbolic_step(step.kind, shape, train, program)


def _symbolic_step(kind: str, shape: Any, train: bool, program: Program) -> List[str]:
    if kind == "bind":
        req = "write" if train else "null"
        if program.way == "simple_bind":
            return [f'exe = sym.simple_bind(mx.cpu(), "{req}", **inputs_of(sym, {shape}))',
                    "exe.copy_params_from({k: v for k, v in args.items() if k in exe.arg_dict}, aux)"]  # fmt: skip
        if program.way == "bind":
            grads = "{k: mx.nd.zeros_like(v) for k, v in args.items()}" if train else "None"
            return [f'exe = sym.bind(mx.cpu(), args, {grads}, "{req}", aux)']
        made = "mx.mod.Module(sym, list(given), None)"
        if program.way == "bucketing":
            made = f"mx.mod.BucketingModule(lambda key: (sym, list(given), None), {shape[0]})"
        return [f"given = inputs_of(sym, {shape})", f"mod = {made}",
                f"mod.bind(list(given.items()), for_training={train}, inputs_need_grad={train})",
                "mod.set_params({k: v for k, v in args.items() if k not in given}, aux)"]  # fmt: skip
    if kind == "execute":
        if program.way in ("module", "bucketing"):
            return [f"seen += execute_module(mod, {shape}, train={train})"]
        return [f"seen += execute(exe, {shape}, train={train})"]
    if kind == "reshape":
        return [
            f"exe = exe.reshape(partial_shaping=True, allow_up_sizing=True, **inputs_of(sym, {shape}))"
        ]
    raise ValueError(kind)
