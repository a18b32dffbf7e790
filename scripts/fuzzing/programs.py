"""A program as data: a network, and the steps in which it is used; and smaller programs."""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional

#: A value in a network: "data", "label", a parameter, "v3", or "v3[1]" for a second output.
Ref = str

_FUNCTION = re.compile(r"F\.([\w.]+)")
_NODE = re.compile(r"\bv(\d+)\b")


@dataclass
class Node:
    """A call of an operator; `op` may be a template ("={} + {}") or a layer ("@rnn.LSTM")."""

    op: str
    inputs: List[Ref]
    attrs: Dict[str, Any] = field(default_factory=dict)
    outputs: int = 1


@dataclass
class Step:
    """A step in the use of a network: a method of `running.Use`, and its arguments."""

    kind: str
    options: Dict[str, Any] = field(default_factory=dict)


@dataclass
class Program:
    """A network and its use."""

    way: str  #: "block", "trainer", "bind", "simple_bind", "module", "bucketing"
    policy: str  #: "float32" (with substitutions), "bfloat16", "float16"
    front: str  #: "autocast" or "init"
    numpy: bool
    params: Dict[str, List[int]]
    nodes: List[Node]
    heads: List[Ref]
    steps: List[Step]
    seed: int = 0
    #: values that are not finite: where "nan" or "inf" stands, by "data" or "head"
    special: Dict[str, str] = field(default_factory=dict)
    #: arguments of an `autocast` around the network's own code; None for no such region
    inside: Optional[str] = None

    @property
    def features(self) -> FrozenSet[str]:
        """Names of operators, steps and options, by which known differences are recognized."""
        ops = {name for node in self.nodes for name in _FUNCTION.findall(node.op) or [node.op]}
        acts = {str(node.attrs.get("act_type")) for node in self.nodes}
        steps = {f"{step.kind}()" for step in self.steps}
        more = {
            "not finite": self.special,
            "static_shape": any(step.options.get("static_shape") for step in self.steps),
            "inside": self.inside is not None,
            "fuse": "fuse" in self.to_json(),
        }
        return frozenset(
            {self.way, *ops, *acts, *steps, *(k for k, there in more.items() if there)}
        )

    @property
    def precision(self) -> str:
        """The lowest precision in which the program computes."""
        if self.inside == "enabled=False":
            return "float32"
        names = {self.policy, *(step.options.get("policy") for step in self.steps)}
        return next(name for name in ("bfloat16", "float16", "float32") if name in names)

    @property
    def reads_label(self) -> bool:
        """Whether the network has integer labels as its second input."""
        return any("label" in text for node in self.nodes for text in [*node.inputs, node.op])

    def to_json(self) -> str:
        """Return the program as a line of text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Program":
        """Return the program in the JSON of `to_json`."""
        data = json.loads(text)
        data["nodes"] = [Node(**node) for node in data["nodes"]]
        data["steps"] = [Step(**step) for step in data["steps"]]
        return cls(**data)


def pruned(program: Program) -> Program:
    """Return a program without the nodes and parameters that no head needs."""
    needed = {int(k) for head in program.heads for k in _NODE.findall(head)}
    for k in reversed(range(len(program.nodes))):
        if k in needed:
            needed |= {int(i) for ref in program.nodes[k].inputs for i in _NODE.findall(ref)}
    numbers = {str(old): str(new) for new, old in enumerate(sorted(needed))}

    def renamed(refs: List[Ref]) -> List[Ref]:
        return [_NODE.sub(lambda found: f"v{numbers[found[1]]}", ref) for ref in refs]

    kept = [program.nodes[k] for k in sorted(needed)]
    nodes = [replace(node, inputs=renamed(node.inputs)) for node in kept]
    used = {ref for node in nodes for ref in node.inputs}
    params = {name: shape for name, shape in program.params.items() if name in used}
    heads = list(dict.fromkeys(renamed(program.heads)))
    return replace(program, nodes=nodes, params=params, heads=heads)


# ---------------------------------------------------------------------- smaller programs

#: Steps that later steps need, and attributes that a node may lack.
_NEEDED = ("init_trainer", "decorate", "bind")
_OPTIONAL = ("pad", "stride", "dilate", "num_layers", "use_global_stats", "fix_gamma")
_SIMPLEST = {"special": {}, "inside": None, "front": "autocast", "policy": "float32"}


def shrunk(program: Program, fails: Callable[[Program], bool], trials: int) -> Program:
    """Return a smaller program for which `fails` is true, found in at most `trials` trials."""
    tried = {program.to_json()}
    while True:
        for smaller in _simpler(program):
            key = smaller.to_json()
            if key in tried or not smaller.nodes:
                continue
            if len(tried) > trials:
                return program
            tried.add(key)
            if fails(smaller):
                program = smaller
                break
        else:
            return program


def _simpler(program: Program) -> Iterator[Program]:
    """Yield variants of a program that are one change smaller or simpler."""
    steps, nodes, heads = program.steps, program.nodes, program.heads
    for k, node in enumerate(nodes[:-1]):
        yield pruned(replace(program, heads=[f"v{k}" if node.outputs == 1 else f"v{k}[0]"]))
    for k in reversed(range(len(steps))):
        if steps[k].kind not in _NEEDED and len(steps) > 1:
            yield replace(program, steps=[*steps[:k], *steps[k + 1 :]])
    for k in range(len(heads) if len(heads) > 1 else 0):
        yield pruned(replace(program, heads=[*heads[:k], *heads[k + 1 :]]))
    for k in reversed(range(len(nodes))):
        yield from _without_node(program, k)
    for name, value in _SIMPLEST.items():
        yield replace(program, **{name: value})
    if program.way in ("bucketing", "module", "simple_bind"):
        yield replace(program, way="bind")
    for k, step in enumerate(steps):
        for name in step.options:
            if name not in ("shape", "train", "optimizer", "seed", "pattern", "req", "overflow"):
                options = {key: one for key, one in step.options.items() if key != name}
                changed = replace(step, options=options)
                yield replace(program, steps=[*steps[:k], changed, *steps[k + 1 :]])
    for k, node in enumerate(nodes):
        for name in set(node.attrs) & set(_OPTIONAL):
            attrs = {key: value for key, value in node.attrs.items() if key != name}
            yield replace(program, nodes=[*nodes[:k], replace(node, attrs=attrs), *nodes[k + 1 :]])


def _without_node(program: Program, k: int) -> Iterator[Program]:
    """Yield programs without node `k`: its consumers read one of its inputs instead."""
    mine = re.compile(rf"\bv{k}\b(\[\d+\])?")
    for ref in program.nodes[k].inputs:
        if not re.fullmatch(r"v\d+(\[\d+\])?|data", ref):
            continue
        inputs = [[mine.sub(ref, one) for one in node.inputs] for node in program.nodes]
        nodes = [replace(node, inputs=own) for node, own in zip(program.nodes, inputs)]
        heads = [mine.sub(ref, head) for head in program.heads]
        if "data" not in heads:
            yield pruned(replace(program, nodes=nodes, heads=heads))
