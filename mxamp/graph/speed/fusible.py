"""Checks that a model can be fused, and the view that passes of fusion get."""

from dataclasses import dataclass
from functools import cached_property
from typing import AbstractSet, Any, Container, FrozenSet, Iterable, Mapping, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ...errors import ArgumentError
from ...framework.machine import dtype_name
from ...framework.wording import shortened
from ...policy.decision import decide
from ...policy.policy import Policy
from ...policy.regions import policy_in
from ...policy.values import is_true
from ..edit import Edit, View
from ..ir import Graph, Node, Usage
from .shape_rules import choose

__all__ = [
    "FUSED",
    "FusionView",
    "check_fused",
    "check_fusible",
    "float32_array",
    "nodes_inside",
    "with_barriers",
    "without_barriers",
]

NOT_HERE = (
    "`fuse=True` is for inference in bfloat16 or float32 on CPUs, for which oneDNN has fused "
    "operators; this policy is for {dtype} on the {device}"
)
NO_KERNELS = (
    "oneDNN has no bfloat16 kernels for this CPU, which has no avx512 (or DNNL_MAX_CPU_ISA hides "
    "it): convert without `fuse`"
)

DOUBLE = (
    "oneDNN has no float64 kernels, and float64 is the dtype of {names}: cast the model, or leave "
    "out fuse"
)

FOUND_FUSED = (
    "`fuse=True` can't lower {names}: MXNet has fused them with a BatchNorm or quantized them, "
    "and has no bfloat16 kernel for that. Convert the model as it was before get_backend_symbol or "
    "optimize_for; or convert without `fuse`, which leaves these layers as they are"
)

#: oneDNN's fused operators.
FUSED = ("_sg_mkldnn_conv", "_sg_mkldnn_fully_connected")

#: What they are made of: a product, and what follows it.
_PRODUCTS = frozenset({"Convolution", "FullyConnected"})


@dataclass(frozen=True)
class FusionView(View):
    """A float32 model that is being fused, and the policy that decides what it computes in."""

    policy: Policy

    @cached_property
    def _kept_by_shape(self) -> FrozenSet[str]:
        """Return the operators that choices keep in float32, by name: MXNet's pass moves them."""
        shapes = {name: array.shape for name, array in self.params.items()}
        choices = choose(self.graph, self.policy, Usage(shapes=shapes, converting=True))
        return frozenset(self.graph.nodes[i].name for i, _ in choices.kept)

    def stays_float32(self, node: Node) -> bool:
        """Return whether the policy keeps a product in float32, by class, shape or name."""
        if node.name in self._kept_by_shape or self.policy.keeps_layer(node.name):
            return True
        if node.op not in _PRODUCTS:
            return False
        inside = policy_in(self.policy, node.attrs)
        if inside.target_dtype != self.policy.target_dtype:
            return self.policy.lowers  # oneDNN fuses for one half precision alone
        inputs = ["float32"] * len(node.inputs)
        return not decide(node.op, node.attrs, inputs, inside).changes


def float32_array(values: Any) -> NDArray:
    """Return NumPy values as a float32 array on the CPU."""
    return mx.nd.array(values.astype(np.float32), dtype=np.float32, ctx=mx.cpu())


def nodes_inside(node: Node) -> Iterable[Node]:
    """Return the operators that a fused operator was made of."""
    return (inner for body in node.subgraphs for inner in body.nodes)


def check_fusible(params: Mapping[str, NDArray], policy: Policy) -> None:
    """Raise where a policy is for no fused operators, or a parameter is float64."""
    dtype = policy.target_dtype if policy.lowers else "float32"
    if policy.device != "cpu" or dtype == "float16":
        raise ArgumentError(NOT_HERE.format(dtype=dtype, device=policy.device))
    if policy.lowers and policy.rule("Convolution").missing:
        raise ArgumentError(NO_KERNELS)
    double = [name for name, array in params.items() if dtype_name(array.dtype) == "float64"]
    if double:
        raise ArgumentError(DOUBLE.format(names=shortened(double)))


def check_fused(graph: Graph, layers: Container[str], policy: Policy) -> None:
    """Raise where a fused operator that is to be lowered has no bfloat16 kernel.

    All but `layers` are lowered. Those that MXNet has made before could be left as they are; but
    who fuses a model for bfloat16 would get one that computes in float32, without a word.
    """
    fixed = [
        node.name
        for node in graph.nodes
        if _has_no_bfloat16(node) and node.name not in layers and not policy.keeps_layer(node.name)
    ]
    if fixed:
        raise ArgumentError(FOUND_FUSED.format(names=shortened(fixed)))


def _has_no_bfloat16(node: Node) -> bool:
    # MXNet's pass gets no BatchNorm to fold and nothing quantized from `fuse`.
    ways = [node.attrs.get(name, "False") for name in ("with_bn", "quantized")]
    return node.op in FUSED and any(map(is_true, ways))


_BARRIER = "BlockGrad"


def with_barriers(graph: Graph, before_norms: bool = False) -> Tuple[Graph, AbstractSet[str]]:
    """Return a graph for inference with barriers, and their names.

    They stand behind each output that is read more than once, and `before_norms`, which MXNet would
    fold into weights in the dtype that these have.
    """
    view, edit = View(graph, {}), Edit(graph, {})
    made: Set[str] = set()
    for i, node in enumerate(graph.nodes):
        for position, output in enumerate(node.inputs):
            source = graph.nodes[output[0]]
            shared = _is_fusible(source) and view.reads(output[0]) > 1
            if shared or (before_norms and node.op == "BatchNorm" and position == 0):
                name = edit.new_name(f"{node.name}_{position}_amp_apart")
                made.add(name)
                edit.read(i, position, edit.add_node(Node(_BARRIER, name, {}, [output])))
    return edit.applied(), made


def without_barriers(graph: Graph, made: AbstractSet[str]) -> Graph:
    """Return a graph without the barriers of these names."""
    edit = Edit(graph, {})
    for i, node in enumerate(graph.nodes):
        if node.name in made:
            edit.alias((i, 0), node.inputs[0])
    return edit.applied()


def _is_fusible(node: Node) -> bool:
    return not node.is_variable and node.num_outputs == 1
