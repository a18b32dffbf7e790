"""A program as data: a network, and the steps in which it is used."""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Dict, FrozenSet, List, Optional

__all__ = ["Node", "Program", "Ref", "Step", "pruned"]

#: A value in a network: "data", "label", a parameter, "v3", or "v3[1]" for a second output.
Ref = str


@dataclass
class Node:
    """A call of an operator; `op` may be a template ("={} + {}") or a layer ("@rnn.LSTM")."""

    op: str
    inputs: List[Ref]
    attrs: Dict[str, Any] = field(default_factory=dict)
    outputs: int = 1


@dataclass
class Step:
    """A step in the use of a network: a call, or an event between calls."""

    kind: str
    options: Dict[str, Any] = field(default_factory=dict)


@dataclass
class Program:
    """A network and its use; `sources.source` renders it as Python."""

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
        ops = {name for node in self.nodes for name in _F.findall(node.op) or [node.op]}
        ops |= {str(node.attrs["act_type"]) for node in self.nodes if "act_type" in node.attrs}
        steps = {f"{step.kind}()" for step in self.steps}
        more = {
            "not finite": self.special,
            "training": any(step.options.get("train") for step in self.steps),
            "static_shape": any(step.options.get("static_shape") for step in self.steps),
            "inside": self.inside is not None,
            "no axes": any(node.attrs.get("axis") in ((), []) for node in self.nodes),
            "fuse": "fuse" in self.to_json(),
        }
        return frozenset({self.way, *ops, *steps, *(name for name, there in more.items() if there)})

    @property
    def precision(self) -> str:
        """The lowest precision in which the program computes."""
        if self.inside == "enabled=False":
            return "float32"
        names = {self.policy, *(step.options.get("policy") for step in self.steps)}
        return next(name for name in ("bfloat16", "float16", "float32") if name in names)

    @property
    def keeps_dtypes(self) -> bool:
        """Whether outputs must have plain MXNet's dtypes, as graphs' do."""
        hybridized = [s.options.get("active", True) for s in self.steps if s.kind == "hybridize"]
        eager = self.steps[0].kind != "hybridize" or not all(hybridized)
        return self.way != "block" or not eager

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
    numbers = {old: new for new, old in enumerate(sorted(needed))}
    nodes = [
        replace(
            program.nodes[k], inputs=[renumbered(ref, numbers) for ref in program.nodes[k].inputs]
        )
        for k in sorted(needed)
    ]
    used = {ref for node in nodes for ref in node.inputs}
    params = {name: shape for name, shape in program.params.items() if name in used}
    heads = list(dict.fromkeys(renumbered(ref, numbers) for ref in program.heads))
    return replace(program, nodes=nodes, params=params, heads=heads)


_F = re.compile(r"F\.([\w.]+)")
_NODE = re.compile(r"\bv(\d+)\b")


def renumbered(ref: Ref, numbers: Dict[int, int]) -> Ref:
    """Return a reference with its node's number replaced: `numbers` maps old to new ones."""
    return _NODE.sub(lambda found: f"v{numbers[int(found[1])]}", ref)
