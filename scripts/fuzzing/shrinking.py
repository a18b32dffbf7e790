"""Shrink failing programs."""

import re
from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, Optional

from .programs import Node, Program, Ref, Step, pruned

__all__ = ["shrunk"]

#: Attributes to drop; a program that needs one becomes invalid and is ignored.
_OPTIONAL = ("pad", "stride", "dilate", "num_layers", "use_global_stats", "fix_gamma")


def shrunk(program: Program, fails: Callable[[Program], bool], trials: int) -> Program:
    """Return a smaller program for which `fails` is true, found in at most `trials` trials."""
    tried = {program.to_json()}
    progress = True
    while progress:
        progress = False
        for smaller in simpler(program):
            key = smaller.to_json()
            if key in tried or not smaller.nodes:
                continue
            if len(tried) > trials:
                return program
            tried.add(key)
            if fails(smaller):
                program, progress = smaller, True
                break
    return program


def simpler(program: Program) -> Iterator[Program]:
    """Yield variants of a program that are one change smaller or simpler."""
    for k in range(len(program.nodes) - 1):
        head = f"v{k}" if program.nodes[k].outputs == 1 else f"v{k}[0]"
        yield pruned(replace(program, heads=[head]))
    for k in reversed(range(len(program.steps))):
        if program.steps[k].kind not in _NEEDED and len(program.steps) > 1:
            yield replace(program, steps=[*program.steps[:k], *program.steps[k + 1 :]])
    for k in range(len(program.heads)):
        if len(program.heads) > 1:
            yield pruned(replace(program, heads=[*program.heads[:k], *program.heads[k + 1 :]]))
    for k in reversed(range(len(program.nodes))):
        yield from _without_node(program, k)
    for name, value in _SIMPLEST.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})
    if program.way in ("bucketing", "module", "simple_bind"):
        for way in ("module", "bind"):
            yield replace(program, way=way)
    yield from _simpler_parts(program)


#: Steps that later steps need.
_NEEDED = ("init_trainer", "decorate", "bind")
_SIMPLEST: Dict[str, Any] = {
    "special": {}, "inside": None, "front": "autocast", "policy": "float32",
}  # fmt: skip


def _simpler_parts(program: Program) -> Iterator[Program]:
    """Yield programs with one option of a step or one attribute of a node less."""
    for k, step in enumerate(program.steps):
        for simple in _simpler_steps(step):
            yield replace(program, steps=[*program.steps[:k], simple, *program.steps[k + 1 :]])
    for k, node in enumerate(program.nodes):
        for name in set(node.attrs) & set(_OPTIONAL):
            attrs = {key: value for key, value in node.attrs.items() if key != name}
            yield _with_node(program, k, replace(node, attrs=attrs))


def _simpler_steps(step: Step) -> Iterator[Step]:
    """Yield variants of a step with one option less, or with it off."""
    for name, value in step.options.items():
        if value is True:
            yield replace(step, options={**step.options, name: False})
        if name in ("static_alloc", "static_shape", "policy", "active", "convert"):
            rest = {key: one for key, one in step.options.items() if key != name}
            yield replace(step, options=rest)


def _with_node(program: Program, k: int, node: Node) -> Program:
    """Return a program with another node number `k`."""
    return replace(program, nodes=[*program.nodes[:k], node, *program.nodes[k + 1 :]])


def _without_node(program: Program, k: int) -> Iterator[Program]:
    """Yield programs without node `k`: its consumers read one of its inputs instead."""
    mine = re.compile(rf"\bv{k}\b(\[\d+\])?")
    for ref in program.nodes[k].inputs:
        if not re.fullmatch(r"v\d+(\[\d+\])?|data", ref):
            continue

        def rewired(one: Ref, by: Optional[Ref] = ref) -> Ref:
            return mine.sub(str(by), one)

        nodes = [
            replace(node, inputs=[rewired(one) for one in node.inputs]) for node in program.nodes
        ]
        heads = [rewired(head) for head in program.heads]
        if "data" not in heads:
            yield pruned(replace(program, nodes=nodes, heads=heads))
