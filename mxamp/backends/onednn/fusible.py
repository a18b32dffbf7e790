"""Checks of what MXNet can fuse for oneDNN, and barriers against wrong fusion."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import AbstractSet, Container, Mapping

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ...errors import ArgumentError
from ...framework.machine import Values, dtype_name
from ...framework.wording import shortened
from ...graph.edit import Edit, View, without_shape
from ...graph.ir import Graph, Node, Usage
from ...policy.decision import decide
from ...policy.policy import Policy
from ...policy.regions import policy_for_node
from ...policy.values import is_true
from .. import NOT_FUSIBLE, backend_of
from ..choices import Choices

NO_KERNELS = (
    "oneDNN has no bfloat16 kernels for this CPU, which has no avx512 (or DNNL_MAX_CPU_ISA hides "
    "it): use `fuse` with `target_dtype='float32'`, or convert without it"
)

DOUBLE = (
    "oneDNN has no float64 kernels, and {names} have the dtype float64: cast the model to float32, "
    "or convert without `fuse`"
)

FOUND_FUSED = (
    "these layers are fused or quantized already, and can't become bfloat16: {names}. Convert the "
    "model as it was before `fuse`, get_backend_symbol or optimize_for; or keep these layers as "
    "they are by `excluded_sym_names`"
)

#: oneDNN's fused operators.
FUSED = ("_sg_mkldnn_conv", "_sg_mkldnn_fully_connected")

#: The operators that begin a fused operator.
PRODUCTS = frozenset({"Convolution", "FullyConnected"})

_BARRIER = "BlockGrad"  # the identity in inference; MXNet runs it in place


@dataclass(frozen=True)
class FusionView(View):
    """A float32 model during fusion, and the policy that says what stays in float32."""

    policy: Policy

    @cached_property
    def _kept_by_shape(self) -> frozenset[str]:
        """The names of layers that the policy keeps in float32 because of their shapes."""
        shapes = {name: array.shape for name, array in self.params.items()}
        usage = Usage(shapes=shapes, converting=True)
        chosen = backend_of(self.policy.device).choose(self.graph, self.policy, usage)
        return frozenset(self.graph.nodes[i].name for i, _ in (chosen or Choices()).kept_float32)

    def stays_float32(self, node: Node) -> bool:
        """Return whether the policy keeps a layer in float32 for its class, shape or name."""
        if node.name in self._kept_by_shape or self.policy.keeps_layer(node.name):
            return True
        if node.op not in PRODUCTS:
            return False
        inside = policy_for_node(self.policy, node.attrs)
        if inside.target_dtype != self.policy.target_dtype:
            return self.policy.lowers  # fused operators support only one half precision
        inputs = ["float32"] * len(node.inputs)
        return not decide(node.op, node.attrs, inputs, inside).changes


def float32_array(values: Values) -> NDArray:
    """Return NumPy values as a float32 array on the CPU."""
    return mx.nd.array(values.astype(np.float32), dtype=np.float32, ctx=mx.cpu())


def set_parameter(edit: Edit, i: int, values: Values) -> None:
    """Replace the value of the parameter at node i, as float32; its shape may change."""
    variable = edit.node(i)
    edit.params[variable.name] = float32_array(values)
    edit.change(i, attrs=without_shape(variable))


def check_fusible(params: Mapping[str, NDArray], policy: Policy) -> None:
    """Raise if a model can't be fused because of its device, its dtype or a float64 parameter."""
    if policy.device != "cpu" or policy.precision == "float16":
        raise ArgumentError(NOT_FUSIBLE.format(dtype=policy.precision, device=policy.device))
    if policy.lowers and policy.rule("Convolution").no_kernel:
        raise ArgumentError(NO_KERNELS)
    double = [name for name, array in params.items() if dtype_name(array.dtype) == "float64"]
    if double:
        raise ArgumentError(DOUBLE.format(names=shortened(double)))


def check_fused(graph: Graph, policy: Policy, layers: Container[str] | None = None) -> None:
    """Raise if a graph has fused operators, except `layers`, that can't run in bfloat16.

    The graph may have contained such operators before the conversion. In float32 they would run,
    but silently slower than the caller expects. With `layers` None, nothing lowers any of them.
    """
    fixed = [
        node.name
        for node in graph.nodes
        if (node.op in FUSED if layers is None else _has_no_bfloat16(node, layers))
        and not policy.keeps_layer(node.name)
    ]
    if fixed:
        raise ArgumentError(FOUND_FUSED.format(names=shortened(fixed)))


def _has_no_bfloat16(node: Node, layers: Container[str]) -> bool:
    """Return whether a node, not one of `layers`, is fused and has no bfloat16 kernel."""
    # The fusion of mxamp leaves no BatchNorm to fold and nothing to quantize.
    fixed = any(is_true(node.attrs.get(name, "False")) for name in ("with_bn", "quantized"))
    return fixed and node.op in FUSED and node.name not in layers


# ---------------------------------------------------------------------- barriers


def with_barriers(graph: Graph, before_norms: bool = False) -> tuple[Graph, AbstractSet[str]]:
    """Insert no-ops (barriers) where MXNet would fuse wrongly; return the graph and their names.

    MXNet fuses a product with the operator that reads it, in executors and in
    `get_backend_symbol`, even where the product is a graph output or has a second consumer. A
    barrier behind each output with several consumers prevents that. `before_norms` also puts a
    barrier before each BatchNorm, which MXNet would otherwise fold in the dtype of the weight.
    """
    view, edit = View(graph, {}), Edit(graph, {})
    barriers: set[str] = set()
    for i, node in enumerate(graph.nodes):
        for position, output in enumerate(node.inputs):
            source = graph.nodes[output[0]]
            fusible = not source.is_variable and source.num_outputs == 1
            shared = fusible and view.reads(output[0]) > 1
            if shared or (before_norms and node.op == "BatchNorm" and position == 0):
                name = edit.unique_name(f"{node.name}_{position}_amp_apart")
                barriers.add(name)
                edit.set_input(i, position, edit.add_node(Node(_BARRIER, name, {}, [output])))
    return edit.applied(), barriers


def without_barriers(graph: Graph, barriers: AbstractSet[str]) -> Graph:
    """Return the graph without the no-op nodes that `with_barriers` inserted."""
    edit = Edit(graph, {})
    for i, node in enumerate(graph.nodes):
        if node.name in barriers:
            edit.redirect((i, 0), node.inputs[0])
    return edit.applied()
