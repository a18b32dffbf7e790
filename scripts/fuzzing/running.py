"""Run programs in plain MXNet and with mixed precision, and compare them. May crash."""

import os
import tempfile
import warnings
import zlib
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import mxamp as amp  # before mxnet: makes it importable on newer Python and NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from mxamp.backends.onednn.substitutions import PASSES

from .programs import Node, Program

Arrays = List[Tuple[str, Any]]

POLICIES = {name: amp.Policy.default(name, "cpu") for name in ("bfloat16", "float16")}
POLICIES["float32"] = POLICIES["bfloat16"].in_float32()

# ---------------------------------------------------------------------- a network


class Twice(mx.operator.CustomOp):
    """An operator in Python."""

    def forward(self, is_train, req, in_data, out_data, aux):  # type: ignore[no-untyped-def]
        """Write twice the input."""
        self.assign(out_data[0], req[0], in_data[0] * 2)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):  # type: ignore
        """Write the gradient."""
        self.assign(in_grad[0], req[0], out_grad[0] * 2)


class Loss(Twice):
    """An operator in Python that needs no gradient of its output."""

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):  # type: ignore
        """Write the gradient."""
        self.assign(in_grad[0], req[0], out_data[0] / 4)


@mx.operator.register("twice")
class TwiceProp(mx.operator.CustomOpProp):  # type: ignore[misc]
    """The properties of `Twice`."""

    def create_operator(self, ctx, shapes, dtypes):  # type: ignore[no-untyped-def]
        """Return the operator."""
        return Twice()


@mx.operator.register("loss")
class LossProp(TwiceProp):
    """The properties of `Loss`."""

    def __init__(self) -> None:
        super().__init__(need_top_grad=False)

    def create_operator(self, ctx, shapes, dtypes):  # type: ignore[no-untyped-def]
        """Return the operator."""
        return Loss()


def _value(ref: str, values: Dict[str, Any]) -> Any:
    """Return the value of a reference, such as v3[1], or of an expression."""
    return eval(ref, dict(values))  # noqa: S307


def evaluated(node: Node, k: int, F: Any, values: Dict[str, Any]) -> Any:
    """Return the value of node `k`: an array or a symbol, by the namespace `F`."""
    space = {"F": F, **values}
    if node.op.startswith("="):
        return _value(node.op[1:].format(*node.inputs), space)
    inputs = [_value(one.lstrip("=").format(*node.inputs), space) for one in node.inputs]
    attrs = {name: tuple(one) if isinstance(one, list) else one for name, one in node.attrs.items()}
    if node.op.startswith("@"):
        return (values.get(f"layer{k}") or _layer(node, k))(*inputs)
    if node.op in ("np.concatenate", "np.stack"):
        inputs = [inputs]
    return _value(f"F.{node.op}", space)(*inputs, **attrs)


def _layer(node: Node, k: int) -> Any:
    return getattr(gluon.rnn, node.op.rpartition(".")[2])(**node.attrs, prefix=f"layer{k}_")


class Noise:
    """Errors of the size of rounding, by which plain MXNet tells what rounding may change."""

    def __init__(self, multiple: float = 0, epsilon: float = 0, phase: float = 0) -> None:
        self.multiple, self.epsilon, self.phase = multiple, epsilon, phase

    def __call__(self, F: Any, value: Any) -> Any:
        """Return a value rounded, or with each element moved up or down."""
        if isinstance(value, (list, tuple)):
            return [self(F, one) for one in value]
        if self.multiple:
            large = value * self.multiple
            return large - (large - value)
        return value * (1 + self.epsilon * F.sign(F.sin(value * self.phase)))


class Net(gluon.HybridBlock):  # type: ignore[misc]
    """A program's network."""

    def __init__(self, program: Program, amp_on: bool, noise: Optional[Noise]) -> None:
        super().__init__(prefix="")
        self.program, self.noise = program, noise
        self.inside = bool(amp_on and program.inside)
        for name, shape in program.params.items():
            req = "null" if name.startswith("running") else "write"
            setattr(self, name, self.params.get(name, shape=tuple(shape), grad_req=req))
        for k, node in enumerate(program.nodes):
            if node.op.startswith("@"):
                setattr(self, f"layer{k}", _layer(node, k))

    def hybrid_forward(self, F: Any, data: Any, *label: Any, **params: Any) -> Any:
        """Return the program's heads."""
        numbers = [k for k, node in enumerate(self.program.nodes) if node.op.startswith("@")]
        layers = {f"layer{k}": getattr(self, f"layer{k}") for k in numbers}
        values = {"data": data, **dict(zip(["label"], label)), **params, **layers}
        with amp.autocast(enabled=False) if self.inside else nullcontext():
            for k, node in enumerate(self.program.nodes):
                value = evaluated(node, k, F, values)
                if self.noise and node.op != "one_hot":
                    value = self.noise(F.np if self.program.numpy else F, value)
                values[f"v{k}"] = value
        heads = [_value(head, values) for head in self.program.heads]
        return heads[0] if len(heads) == 1 else heads


# ---------------------------------------------------------------------- its use


class Use:
    """One execution of a program: its steps, each a method, and the arrays seen."""

    def __init__(self, program: Program, amp_on: bool, noise: Optional[Noise] = None) -> None:
        self.program, self.amp_on, self.noise = program, amp_on, noise
        self.nd = mx.np if program.numpy else mx.nd
        self.seen: Arrays = []
        self.net: Any = Net(program, amp_on, noise)
        self.label = program.reads_label

    def run(self) -> Arrays:
        """Return the named arrays of all steps."""
        if self.program.way in ("block", "trainer"):
            self.set_data(self.program.seed)
        steps = self.program.steps
        for policy, group in groupby(steps, lambda s: s.options.get("policy", self.program.policy)):
            with self.region(policy):
                for step in group:
                    options = {k: v for k, v in step.options.items() if k != "policy"}
                    if "shape" in options:
                        options["shape"] = tuple(options["shape"])
                    getattr(self, step.kind)(**options)
        if self.program.way in ("block", "trainer") and "convert()" not in self.program.features:
            params = self.net.collect_params()
            self.seen += [(f"parameter {k}", params[k].data().asnumpy()) for k in sorted(params)]
        return self.seen

    @contextmanager
    def region(self, policy: Optional[str]) -> Iterator[None]:
        """Context of mixed precision by a policy."""
        if not (self.amp_on and policy):
            yield
        elif self.program.front == "autocast":
            with amp.autocast(policy=POLICIES[policy]):
                yield
        else:
            amp.init(policy=POLICIES[policy], tuned=False)
            yield
            amp.shutdown()

    def array(self, name: str, shape: Sequence[int], seed: Optional[int] = None) -> Any:
        """Return values that depend on the name and the seed alone."""
        program = self.program
        seed = program.seed if seed is None else seed
        random = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))
        if name == "label":
            return self.nd.array(random.randint(0, 4, shape).astype("float32"))
        values = random.uniform(-1, 1, shape).astype("float32")
        if name.startswith(("gamma", "fixed_gamma", "running_var")):
            values = 1.5 + values
        if "weight" in name:
            values *= (3 / max(np.prod(shape[1:]), 1)) ** 0.5
        if name in program.special:
            values.flat[::7] = float(program.special[name])
        if self.noise and name != "head" and "running" not in name:
            values = self.noise(np, values)
        return self.nd.array(values)

    def inputs(self, shape: Tuple[int, ...]) -> Dict[str, Any]:
        """Return the network's inputs by name."""
        shapes = {"data": shape, **({"label": shape[:1]} if self.label else {})}
        return {name: self.array(name, one) for name, one in shapes.items()}

    def see(self, outs: Any, grads: Dict[str, Any], aux: Dict[str, Any]) -> None:
        """Keep outputs, gradients and running statistics."""
        mx.nd.waitall()  # MXNet may have an array of a graph's read while its gradient writes it
        groups = {"output": dict(enumerate(_listed(outs))), "gradient of": grads, "aux": aux}
        for name, arrays in groups.items():
            for k in sorted(arrays):
                if arrays[k] is not None and k != "label":
                    self.seen.append((f"{name} {k}", arrays[k].asnumpy()))

    # Steps of blocks.

    def set_data(self, seed: int) -> None:
        self.net.initialize()
        for name, param in self.net.collect_params().items():
            param.set_data(self.array(name, param.shape, seed))

    def hybridize(self, **flags: Any) -> None:
        self.net.hybridize(**flags)

    def grad_req(self, pattern: str, req: str) -> None:
        for name, param in self.net.collect_params(pattern).items():
            if "running" not in name:
                param.grad_req = req

    def cast(self) -> None:
        self.net.cast("float32")

    def export(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.net.export(f"{folder}/net")
            names = ["data", "label"] if self.label else ["data"]
            files = f"{folder}/net-symbol.json", names, f"{folder}/net-0000.params"
            self.net = gluon.SymbolBlock.imports(*files)

    def convert(self, shape: Tuple[int, ...], **options: Any) -> None:
        if self.amp_on:
            example, policy = list(self.inputs(shape).values()), POLICIES[self.program.policy]
            options = {"example_inputs": example if self.label else example[0], **options}
            self.net = amp.convert_hybrid_block(self.net, policy=policy, **options)

    def loss(self, shape: Tuple[int, ...]) -> Tuple[Any, Any, Any]:
        """Return outputs, a sum of them, and the inputs' gradients' places."""
        inputs = self.inputs(shape)
        inputs["data"].attach_grad()
        with autograd.record():
            outs = _listed(self.net(*inputs.values()))
            heads = [self.array("head", out.shape) for out in outs]
            loss = sum((out.astype("float32") * head).sum() for out, head in zip(outs, heads))
        return outs, loss, inputs["data"]

    def call(self, shape: Tuple[int, ...], train: bool) -> None:
        if not train:
            self.see(self.net(*self.inputs(shape).values()), {}, {})
            return
        outs, loss, data = self.loss(shape)
        loss.backward()
        params = self.net.collect_params()
        grads = {k: p.grad() for k, p in params.items() if p.grad_req != "null"}
        aux = {k: p.data() for k, p in params.items() if "running" in k}
        self.see(outs, {**grads, "data": data.grad}, aux)

    # Steps of trainers.

    def make_trainer(self, optimizer: str, decorated: bool) -> None:
        options = {"epsilon": 0.1} if optimizer == "adam" else {"momentum": 0.9}
        made = mx.optimizer.create(optimizer, learning_rate=0.05, **options)
        if decorated and self.amp_on:
            made = amp.decorate(made, init_loss_scaling=16.0)
        params = self.net.collect_params()
        self.trainer = gluon.Trainer(params, made, update_on_kvstore=False)
        self.scaled = self.amp_on and not decorated
        if self.scaled:
            amp.init_trainer(self.trainer, amp.LossScaler(init_scale=16))

    def init_trainer(self, shape: Tuple[int, ...], optimizer: str) -> None:
        self.make_trainer(optimizer, decorated=False)

    def decorate(self, shape: Tuple[int, ...], optimizer: str) -> None:
        self.make_trainer(optimizer, decorated=True)

    def train(self, shape: Tuple[int, ...], overflow: bool = False) -> None:
        _, loss, _ = self.loss(shape)
        with autograd.record():
            loss = loss * float("inf") if overflow else loss
            region = amp.scale_loss(loss, self.trainer) if self.scaled else nullcontext(loss)
            with region as scaled:
                scaled.backward()
        params = self.net.collect_params()
        grads = {k: p.grad() for k, p in params.items() if p.grad_req != "null"}
        if self.amp_on or all(np.isfinite(one.asnumpy()).all() for one in grads.values()):
            self.trainer.step(max(shape[0], 1))
        if self.program.steps[0].kind == "decorate":  # else they carry the scale, or did
            self.see([], grads, {})

    # Steps of executors and modules.

    def bind(self, shape: Tuple[int, ...], train: bool, convert: Any = None) -> None:
        names = ["data", "label"] if self.label else ["data"]
        sym = mx.sym.Group(_listed(self.net(*map(mx.sym.var, names))))
        shapes, _, aux_shapes = sym.infer_shape(**self.known(sym, shape))
        args = {k: self.array(k, one) for k, one in zip(sym.list_arguments(), shapes)}
        aux = {k: self.array(k, one) for k, one in zip(sym.list_auxiliary_states(), aux_shapes)}
        if convert is not None and self.amp_on:
            policy = POLICIES[self.program.policy]
            params = {k: v for k, v in args.items() if k not in names}
            sym, params, aux = amp.convert_model(sym, params, aux, policy=policy, **convert)
            args.update(params)
        way, req = self.program.way, "write" if train else "null"
        known = self.known(sym, shape)
        if way == "bind":
            grads = {k: mx.nd.zeros_like(v) for k, v in args.items()} if train else None
            self.exe = sym.bind(mx.cpu(), args, grads, req, aux)
        elif way == "simple_bind":
            self.exe = sym.simple_bind(mx.cpu(), req, **known)
            self.exe.copy_params_from({k: args[k] for k in self.exe.arg_dict}, aux)
        else:
            names = list(known)
            self.module = mx.mod.BucketingModule(lambda key: (sym, names, None), shape[0])
            if way == "module":
                self.module = mx.mod.Module(sym, names, None)
            self.module.bind(list(known.items()), for_training=train, inputs_need_grad=train)
            self.module.set_params({k: v for k, v in args.items() if k not in known}, aux)

    def known(self, sym: Any, shape: Tuple[int, ...]) -> Dict[str, Tuple[int, ...]]:
        """Return the shapes of a symbol's inputs."""
        known = {"data": shape, "label": shape[:1]}
        return {name: known[name] for name in sym.list_arguments() if name in known}

    def reshape(self, shape: Tuple[int, ...]) -> None:
        shapes = self.known(self.exe._symbol, shape)
        self.exe = self.exe.reshape(partial_shaping=True, allow_up_sizing=True, **shapes)

    def execute(self, shape: Tuple[int, ...], train: bool) -> None:
        if self.program.way in ("bind", "simple_bind"):
            exe = self.exe
            given = self.known(exe._symbol, shape)
            outs = exe.forward(train, **{k: self.array(k, one) for k, one in given.items()})
            backward = exe.backward
        else:
            given = self.known(self.module.symbol, shape)
            batch = mx.io.DataBatch([self.array(k, one) for k, one in given.items()])
            batch.provide_data, batch.provide_label = list(given.items()), None
            batch.bucket_key = shape[0]
            self.module.forward(batch, is_train=train)
            outs, backward = self.module.get_outputs(), self.module.backward
            exe = getattr(self.module, "_curr_module", self.module)._exec_group.execs[0]
        if train:
            backward([self.array("head", out.shape) for out in outs])
        self.see(outs, exe.grad_dict if train else {}, exe.aux_dict if train else {})


def _listed(outs: Any) -> List[Any]:
    return list(outs) if isinstance(outs, (list, tuple)) else [outs]


def executed(program: Program, amp_on: bool, noise: Optional[Noise] = None) -> Arrays:
    """Run a program; return its named arrays."""
    mx.random.seed(0)
    with ExitStack() as stack:
        # MXNet's counters of names start at zero for each program, as in a script.
        stack.enter_context(mx.name.NameManager())
        if program.numpy:
            mx.npx.set_np()
            stack.callback(mx.npx.reset_np)
        found = Use(program, amp_on, noise).run()
        mx.nd.waitall()
    return found


def eager(program: Program) -> Program:
    """Return a program that computes the same by eager calls, in the same order.

    MXNet's memory plans let some operators overwrite what their gradients read.
    """
    kept = [s for s in program.steps if s.kind not in ("hybridize", "export", "convert", "cast")]
    if program.way in ("block", "trainer"):
        return replace(program, steps=kept)
    steps = [replace(step, kind="call") for step in kept if step.kind == "execute"]
    return replace(program, way="block", steps=steps)


# ---------------------------------------------------------------------- the comparison

#: Relative size of the errors that stand for rounding, by policy.
EPSILON = {"float32": 2.0**-22, "bfloat16": 2.0**-9, "float16": 2.0**-11}
#: A float32 is rounded to the policy's bits by the difference of two of its multiples (Veltkamp).
ROUND = {"float32": 0.0, "bfloat16": 2.0**16 + 1, "float16": 2.0**13 + 1}
#: The relative L2 error that always passes.
ALLOWED = {"float32": 3e-5, "bfloat16": 4e-2, "float16": 1e-2}
#: The error may be this many times the error caused by noise.
MARGIN = {"float32": 30, "bfloat16": 6, "float16": 6}
#: Errors below this norm, relative to the largest, are ignored: sums cancel.
LEAST = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 2e-3}
#: Larger values, or their gradients, may overflow in float16.
LARGE = 100.0


def serve(pipe: Any, planted: str = "") -> None:
    """Run each program that the pipe receives, and send its result back.

    "plain" says that plain MXNet has run it; "suspect" that it differs, before rounding errors are
    estimated. `planted`, such as "mean=sum", plants a defect for tests of the fuzzer: one
    substitution builds another's equivalent.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    warnings.simplefilter("ignore")
    if planted:
        name, other = planted.split("=")
        passes = PASSES.by_name
        wrong = passes[name]._replace(apply=passes[other].apply)
        PASSES.by_name = {**passes, name: wrong}
    pipe.send(("ready", ""))
    while True:
        try:
            program = Program.from_json(pipe.recv())
        except EOFError:
            return
        pipe.send(compared(pipe, program))


def compared(pipe: Any, program: Program) -> Tuple[str, str]:
    """Run a program in plain MXNet and with mxamp; return the kind and the text of the result."""
    try:
        plain = executed(program, amp_on=False)
    except Exception as error:
        return "invalid", _first_line(error)
    pipe.send(("plain", ""))
    try:
        found = executed(program, amp_on=True)
    except amp.AmpError as error:
        return "refused", _first_line(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {_first_line(error)}"
    finally:
        amp.shutdown()
    hybrid = [s.options.get("active", True) for s in program.steps if s.kind == "hybridize"]
    if program.way == "block" and (program.steps[0].kind != "hybridize" or not all(hybrid)):
        # Eager calls may return low precision.
        found = [(name, one.astype("float32", copy=False)) for name, one in found]
    suspects = _differing(plain, found, program)
    text = "; ".join(f"{name}: {text}" for name, text in suspects.items())
    if not suspects:
        return "equal", ""
    if not program.special:
        pipe.send(("suspect", f"{text}; rounding unknown"))
        suspects = _unexplained(plain, found, program, suspects)
    if not suspects:
        return "imprecise", ""
    return "different", "; ".join(f"{name}: {text}" for name, text in suspects.items())


def _first_line(error: BaseException) -> str:
    """Return the line of an error's message that names the error, or the first one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line or "Check failed" in line]
    return (said or lines or [type(error).__name__])[0][:300]


def _differing(plain: Arrays, found: Arrays, program: Program) -> Dict[str, str]:
    """Return a description of each array whose values, shape or dtype differ, by name."""
    allowed, least = ALLOWED[program.precision], LEAST[program.precision]
    if [name for name, _ in plain] != [name for name, _ in found]:
        return {"arrays": f"{[n for n, _ in found]}, not {[n for n, _ in plain]}"[:300]}
    suspects: Dict[str, str] = {}
    for k, ((name, one), (_, other)) in enumerate(zip(plain, found)):
        text = ""
        if one.shape != other.shape or one.dtype != other.dtype:
            text = f"{other.shape} {other.dtype}, not {one.shape} {one.dtype}"
        elif not np.array_equal(np.isfinite(one), np.isfinite(other)):
            count = int((np.isfinite(one) != np.isfinite(other)).sum())
            text = f"{count} of {one.size} elements are finite in one alone"
        elif not program.special and _norm(one, other) > allowed * _norm(one) + least:
            text = f"relative error {_norm(one, other) / max(_norm(one), 1e-30):.2g}"
        if text:
            suspects[f"{k} {name}"] = text
    return suspects


def _unexplained(
    plain: Arrays, found: Arrays, program: Program, suspects: Dict[str, str]
) -> Dict[str, str]:
    """Return the suspects whose errors are larger than rounding errors in plain MXNet."""
    policy = program.precision
    epsilon, multiple, calls = EPSILON[policy], ROUND[policy], eager(program)
    noises = [Noise(epsilon=epsilon, phase=phase) for phase in (1e3, 7e3)]
    noises += [Noise(multiple=multiple)] if multiple else []
    # Larger noise provokes rare events, such as a different greatest element.
    larger = [Noise(epsilon=4 * epsilon, phase=phase) for phase in (1e3, 7e3, 3e4, 5e4)]
    try:
        exact = executed(calls, False, Noise())
        usual, most = ([executed(calls, False, one) for one in some] for some in (noises, larger))
    except Exception:  # without rounding errors to compare with, every difference counts
        return suspects
    if policy == "float16" and any(one.size and not np.abs(one).max() < LARGE for _, one in plain):
        return {}
    largest = max([1.0, *(_norm(one) for _, one in exact)]) if policy != "float32" else 1.0
    left = {}
    for k, ((name, one), (_, other)) in enumerate(zip(plain, found)):
        text = suspects.get(f"{k} {name}")
        if text is None:
            continue
        # Plain MXNet's graphs are sometimes wrong where its eager calls are right. A difference
        # counts only if both agree.
        counts, right = True, exact[k][1]
        if "finite" in text:
            mask = np.isfinite(one)
            counts = all(np.array_equal(mask, np.isfinite(some[k][1])) for some in usual)
        elif "relative" in text:
            errors = [max(_norm(right, some[k][1]) for some in group) for group in (usual, most)]
            limit = max(MARGIN[policy] * errors[0], 1.5 * errors[1]) + LEAST[policy] * largest
            counts = _norm(one, other) > limit >= _norm(one, right)
        if counts:
            left[f"{k} {name}"] = text
    return left


def _norm(one: Any, other: Any = 0.0) -> float:
    """Return the L2 norm of `one - other`, without elements that are not finite."""
    with np.errstate(invalid="ignore"):
        difference = np.asarray(one, "float64") - np.asarray(other, "float64")
    return float(np.linalg.norm(difference[np.isfinite(difference)]))
