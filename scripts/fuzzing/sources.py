"""Render a program as a Python script, for the worker and for reports."""

import re
from dataclasses import replace
from typing import Any, Dict, List

from . import templates
from .programs import Node, Program, Step

__all__ = ["source"]


def source(program: Program, noisy: bool = False) -> str:
    """Return a script whose `run` returns named arrays: with mixed precision where `AMP` is true.

    With `noisy`, values get errors of the size of the global `EPSILON`, or are rounded by `ROUND`.
    """
    keeps = program.way in ("block", "trainer") and "convert()" not in program.features
    program = _eager(program) if noisy else program
    nd = "mx.np" if program.numpy else "mx.nd"
    steps = [step.options.get("policy", program.policy) for step in program.steps]
    names = sorted({program.policy, *(name for name in steps if name)})
    imports = "import tempfile\n" if any(s.kind == "export" for s in program.steps) else ""
    parts = [templates.HEAD.format(
        nd=nd, seed=program.seed, imports=imports,
        policies=", ".join(f'"{name}": {templates.POLICIES[name]}' for name in names),
        noise=templates.NOISY_ARRAY if noisy else "",
        special="".join(_special(*item) for item in program.special.items()),
    )]  # fmt: skip
    parts.append(templates.INIT if program.front == "init" else templates.AUTOCAST)
    parts += [templates.CUSTOM] if any(node.op == "Custom" for node in program.nodes) else []
    parts += [templates.NOISE.format(nd="F.np" if program.numpy else "F")] if noisy else []
    if program.inside is not None:
        parts.append(templates.REGION.format(inside=program.inside))
    if any(step.kind == "grad_req" for step in program.steps):
        parts.append(templates.GRAD_REQ)
    parts += [
        _net(program, noisy),
        templates.LISTED,
        *_helpers(program),
        _run(program, keeps),
        templates.TAIL,
    ]
    return re.sub(r"\n{3,}(?=\S)", "\n\n\n", "".join(parts))


def _special(array: str, value: str) -> str:
    """Return lines that put "nan" or "inf" into some elements of the array of a name."""
    return f'    if name == "{array}":\n        values.flat[::7] = np.{value}\n'


def reads_label(program: Program) -> bool:
    """Return whether a program's network has integer labels as its second input."""
    return any("label" in text for node in program.nodes for text in [*node.inputs, node.op])


def _net(program: Program, noisy: bool) -> str:
    """Return the class `Net`, a HybridBlock."""
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
    for k, node in enumerate(program.nodes):
        text = _expression(node, k)
        if noisy and node.op != "one_hot":
            text = f"noise(F, {text})" if node.outputs == 1 else f"[noise(F, v) for v in {text}]"
        body.append(f"v{k} = {text}")
    if program.inside is not None:
        body = ["with region():", *(f"    {line}" for line in body)]
    body.append(f"return {', '.join(program.heads)}")
    label = ", label" if reads_label(program) else ""
    return templates.NET.format(
        init="".join(f"        {line}\n" for line in init),
        names=label + "".join(f", {name}" for name in params),
        body="\n".join(f"        {line}" for line in body),
    )


def _attrs(node: Node) -> str:
    """Return a node's attributes as keyword arguments."""

    def shown(value: Any) -> str:
        return repr(tuple(value) if isinstance(value, list) else value)

    return ", ".join(f"{name}={shown(value)}" for name, value in node.attrs.items())


def _expression(node: Node, k: int) -> str:
    """Return the Python expression of node `k`."""
    if node.op.startswith("="):
        return node.op[1:].format(*node.inputs)
    inputs = [one[1:].format(*node.inputs) if one[0] == "=" else one for one in node.inputs]
    if node.op.startswith("@"):
        return f"self.layer{k}({', '.join(inputs)})"
    if node.op in ("np.concatenate", "np.stack"):
        inputs = [f"[{', '.join(inputs)}]"]
    return f"F.{node.op}({', '.join([*inputs, _attrs(node)]).rstrip(', ')})"


def _helpers(program: Program) -> List[str]:
    """Return the functions that the steps of a program call."""
    label = ', array("label", shape[:1])' if reads_label(program) else ""
    fill = templates.FILL.format(seed=program.seed)
    if program.way == "block":
        return [fill, templates.CALL.format(label=label), templates.STATE]
    if program.way == "trainer":
        decorated = program.steps[0].kind == "decorate"
        words = {"label": label, "backward": "    loss.backward()", "grads": "grads"}
        if not decorated:
            words.update(backward=templates.SCALED, grads="[]")
        return [fill, templates.TRAIN.format(**words), templates.STATE]
    parts = [templates.SHAPES, templates.BIND]
    if program.way in ("module", "bucketing"):
        bucketing = program.way == "bucketing"
        bucket = "\n    batch.bucket_key, batch.provide_label = shape[0], None" if bucketing else ""
        current = "._curr_module" if bucketing else ""
        return [*parts, templates.MODULE.format(bucket=bucket, current=current)]
    return [*parts, templates.EXECUTE]


def _eager(program: Program) -> Program:
    """Return a program that computes the same by eager calls, in the same order.

    MXNet's memory plans let some operators overwrite what their gradients read.
    """
    kept = [s for s in program.steps if s.kind not in ("hybridize", "export", "convert", "cast")]
    if program.way in ("block", "trainer"):
        return replace(program, steps=kept)
    steps = [replace(step, kind="call") for step in kept if step.kind == "execute"]
    return replace(program, way="block", steps=steps)


def _run(program: Program, keeps_params: bool) -> str:
    """Return the function `run`: the steps, those of one policy in one region."""
    lines = _start(program).split("\n")
    region = ""
    for step in program.steps:
        policy = step.options.get("policy", program.policy)
        entered = f'with on("{policy}"):' if policy else ""
        lines += [entered] if entered not in ("", region) else []
        region = entered
        lines += [f"    {line}" if region else line for line in _step(step, program).split("\n")]
    if keeps_params:
        lines.append("seen += state(net)")
    text = "\n".join(f"    {line}" for line in ["seen = []", *lines, "return seen"])
    if not program.numpy:
        return f"\ndef run():\n{text}\n"
    return f"\ndef steps():\n{text}\n{templates.NUMPY}"


def _start(program: Program) -> str:
    """Return the lines that make the net, trainer or symbol before the first step."""
    label = ', mx.sym.var("label")' if reads_label(program) else ""
    made = f'Net()(mx.sym.var("data"){label})'
    shape = next((s.options["shape"] for s in program.steps if "shape" in s.options), ())
    first = program.steps[0] if program.steps else Step("nothing")
    words = {
        "shape": tuple(shape), "main": program.policy,
        "optimizer": first.options.get("optimizer", "sgd"),
        "symbol": f"mx.sym.Group({made})" if len(program.heads) > 1 else made,
        "decorate": templates.DECORATE if first.kind == "decorate" else "",
    }  # fmt: skip
    text = templates.START.get(program.way, templates.START["symbol"])
    if first.options.get("convert") is not None:
        text += templates.CONVERT
        words["more"] = "".join(f", {k}={v!r}" for k, v in first.options["convert"].items())
    return text.format(**words)


def _step(step: Step, program: Program) -> str:
    """Return the lines of a step."""
    options = dict(step.options)
    shape = tuple(options.pop("shape", ()))
    train, label = options.get("train", False), reads_label(program)
    example = f"array('data', {shape})"
    flags = ", ".join(f"{k}={v}" for k, v in options.items() if k not in ("policy", "train"))
    words: Dict[str, Any] = {
        "shape": shape, "batch": shape[0] if shape else 0, "train": train, "main": program.policy,
        "req": "write" if train else "null", "flags": flags, "more": f", {flags}" if flags else "",
        "grads": "{k: mx.nd.zeros_like(v) for k, v in args.items()}" if train else "None",
        "names": ["data", "label"] if label else ["data"],
        "example": f"[{example}, array('label', {shape[:1]})]" if label else example,
    }  # fmt: skip
    text = templates.STEPS.get(step.kind) or templates.STEPS[f"{program.way} {step.kind}"]
    return text.format(**{**words, **options})
