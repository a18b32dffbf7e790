"""Pieces of the scripts that programs are written as."""

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
    if name.startswith(("gamma", "fixed_gamma", "running_var")):
        values = 1.5 + values
    if "weight" in name:
        values *= (3 / max(np.prod(shape[1:]), 1)) ** 0.5
{special}{noise}    return {nd}.array(values)

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


class Loss(Twice):
    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_data[0] / 4)


@mx.operator.register("loss")
class LossProp(mx.operator.CustomOpProp):
    def __init__(self):
        super().__init__(need_top_grad=False)

    def create_operator(self, ctx, shapes, dtypes):
        return Loss()

"""
NOISY_ARRAY = """\
    if name != "head" and "running" not in name:
        values = noise(np, values)
"""
NOISE = '''
def noise(F, value):
    """Return a value with errors of rounding: rounded, or with each element moved up or down."""
    if ROUND:
        large = value * ROUND
        return large - (large - value)
    F = {nd} if F is not np else np
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
    params = net.collect_params()
    grads = {{k: p.grad() for k, p in params.items() if p.grad_req != "null"}}
    grads["data"] = data.grad
    mx.nd.waitall()  # MXNet may have an array of a graph's read while its gradient writes it
    aux = [(f"aux {{k}}", params[k].data().asnumpy()) for k in sorted(params) if "running" in k]
    return named("output", outs) + gradients(grads) + aux

'''
TRAIN = '''
def train(net, trainer, shape, overflow=False):
    """Make a step; return gradients where they are to be as in float32."""
    inputs = [array("data", shape){label}]
    with autograd.record():
        outs = listed(net(*inputs))
        loss = sum((out.astype("float32") * array("head", out.shape)).sum() for out in outs)
        loss = loss * (float("inf") if overflow else 1)
{backward}
    params = {{k: p for k, p in net.collect_params().items() if p.grad_req != "null"}}
    grads = [(f"gradient of {{k}}", params[k].grad().asnumpy()) for k in sorted(params)]
    if AMP or all(np.isfinite(grad).all() for _, grad in grads):
        trainer.step(max(shape[0], 1))
    return {grads}

'''
SCALED = """\
        with amp.scale_loss(loss, trainer) if AMP else contextlib.nullcontext(loss) as scaled:
            scaled.backward()"""
GRAD_REQ = """
def set_grad_req(net, pattern, req):
    for name, param in net.collect_params(pattern).items():
        if "running" not in name:
            param.grad_req = req

"""
REGION = '''
def region():
    """A region inside the network."""
    return amp.autocast({inside}) if AMP else contextlib.nullcontext()

'''
NUMPY = """

def run():
    mx.npx.set_np()
    try:
        return steps()
    finally:
        mx.npx.reset_np()
"""
LISTED = """
def listed(outs):
    return list(outs) if isinstance(outs, (list, tuple)) else [outs]


def gradients(grads):
    names = [k for k in sorted(grads) if grads[k] is not None and k != "label"]
    return [(f"gradient of {k}", grads[k].asnumpy()) for k in names]


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
        found += [(f"aux {k}", exe.aux_dict[k].asnumpy()) for k in sorted(exe.aux_dict)]
    return found


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
        exe = mod{current}._exec_group.execs[0]
        found += gradients(exe.grad_dict)
        found += [(f"aux {{k}}", exe.aux_dict[k].asnumpy()) for k in sorted(exe.aux_dict)]
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

#: The lines of a step, by its kind or by "way kind".
STEPS = {
    "call": "seen += call(net, {shape}, train={train})",
    "hybridize": "net.hybridize({flags})",
    "set_data": "fill(net, seed={seed})",
    "grad_req": 'set_grad_req(net, "{pattern}", "{req}")',
    "cast": 'net.cast("float32")',
    "export": """\
with tempfile.TemporaryDirectory() as folder:
    net.export(folder + "/net")
    files = folder + "/net-symbol.json", {names}, folder + "/net-0000.params"
    net = gluon.SymbolBlock.imports(*files)""",
    "convert": """\
if AMP:
    options = dict(policy=POLICIES["{main}"], example_inputs={example}{more})
    net = amp.convert_hybrid_block(net, **options)""",
    "init_trainer": """\
if AMP:
    amp.init_trainer(trainer, amp.LossScaler(init_scale=16))""",
    "decorate": "# the optimizer is decorated",
    "train": "seen += train(net, trainer, {shape}, overflow={overflow})",
    "bind bind": 'exe = sym.bind(mx.cpu(), args, {grads}, "{req}", aux)',
    "simple_bind bind": """\
exe = sym.simple_bind(mx.cpu(), "{req}", **inputs_of(sym, {shape}))
exe.copy_params_from({{k: args[k] for k in exe.arg_dict}}, aux)""",
    "module bind": """\
given = inputs_of(sym, {shape})
mod = mx.mod.Module(sym, list(given), None)
mod.bind(list(given.items()), for_training={train}, inputs_need_grad={train})
mod.set_params({{k: v for k, v in args.items() if k not in given}}, aux)""",
    "bucketing bind": """\
given = inputs_of(sym, {shape})
mod = mx.mod.BucketingModule(lambda key: (sym, list(given), None), {batch})
mod.bind(list(given.items()), for_training={train}, inputs_need_grad={train})
mod.set_params({{k: v for k, v in args.items() if k not in given}}, aux)""",
    "bind execute": "seen += execute(exe, {shape}, train={train})",
    "simple_bind execute": "seen += execute(exe, {shape}, train={train})",
    "module execute": "seen += execute_module(mod, {shape}, train={train})",
    "bucketing execute": "seen += execute_module(mod, {shape}, train={train})",
    "reshape": """\
allowed = dict(partial_shaping=True, allow_up_sizing=True)
exe = exe.reshape(**allowed, **inputs_of(sym, {shape}))""",
}
#: What comes before the first step, by way; the symbolic ways have one.
START = {
    "block": "net = Net()\nfill(net)",
    "trainer": """\
net = Net()
fill(net)
options = {{"epsilon": 0.1}} if "{optimizer}" == "adam" else {{"momentum": 0.9}}
optimizer = mx.optimizer.create("{optimizer}", learning_rate=0.05, **options)
{decorate}trainer = gluon.Trainer(net.collect_params(), optimizer, update_on_kvstore=False)""",
    "symbol": """\
sym = {symbol}
args, aux = arrays(sym, {shape})""",
}
DECORATE = "optimizer = amp.decorate(optimizer, init_loss_scaling=16.0) if AMP else optimizer\n"
CONVERT = """
if AMP:
    options = dict(policy=POLICIES["{main}"]{more})
    sym, args, aux = amp.convert_model(sym, args, aux, **options)"""
