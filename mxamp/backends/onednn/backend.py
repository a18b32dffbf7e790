"""The CPU backend: workarounds for oneDNN, shape rules, faster equivalents and fusion."""

# ruff: noqa: D102  # `Backend` says what the methods do

from __future__ import annotations

from typing import Any, Mapping, Sequence

from mxnet.optimizer import SGD

from ...errors import ArgumentError
from ...framework.patching import wrapping
from ...graph.edit import Params
from ...graph.ir import Graph, Node
from ...policy.decision import CASTABLE
from ...policy.policy import Policy
from ...policy.rules import Reason
from ...policy.values import parse_integers
from .. import DecidedCall, Emulation, Step
from ..choices import ChoosingBackend, Match, Setting
from . import cpu, eager, fuse, fusible, inputs, optimizers, recurrent, shape_rules
from .substitutions import PASSES

CAST_WEIGHT = "the gradient for a weight that was cast writes out of bounds"
NO_FLOAT64 = "3-D and dilated ones have no kernel in half precision, and a wrong one in float64"
HALF_WEIGHT = (
    "a dilated transposed convolution with a weight in {dtype} has no right kernel on CPUs: keep "
    "the weight in float32"
)


def _is_dilated(attributes: Mapping[str, str]) -> bool:
    """Return whether a convolution's attributes set a dilation other than 1."""
    return any(step != 1 for step in parse_integers(attributes.get("dilate", "()")))


class OneDNN(ChoosingBackend):
    """The backend of CPUs, whose kernels are oneDNN's."""

    name = "oneDNN"
    dtypes = ("bfloat16", "float16")
    passes = PASSES
    substitutions = frozenset(
        [*PASSES.by_name, *(str(one.name) for one in fuse.PASSES if one.name), optimizers.SGD_STEP]
    )

    def features(self) -> frozenset[str]:
        return cpu.onednn_features()

    def fast_dtype(self) -> str:
        return cpu.fast_dtype()

    def why_float32(self) -> str:
        return cpu.why_float32()

    def float32_substitutions(self) -> Mapping[str, str]:
        return cpu.float32_substitutions()

    def speed_warning(self, policy: Policy, of_model: bool) -> tuple[Any, ...] | None:
        return cpu.speed_warning(policy, of_model)

    # ------------------------------------------------------------------ decisions

    def reason_by_attributes(self, call: DecidedCall) -> str | None:
        # oneDNN reads a float32 weight as it is, and has no gradient for a cast one.
        if call.rule.operator != "Deconvolution" or not call.rule.no_kernel:
            return None
        is_volume = len(parse_integers(call.attributes.get("kernel", "()"))) == len("DHW")
        return self.said(NO_FLOAT64) if is_volume or _is_dilated(call.attributes) else None

    def emulation(self, call: DecidedCall, dtype: str) -> Emulation | None:
        casts = {*call.dtypes[1:2]} & (CASTABLE - {dtype})
        # The rule `cast_weight` keeps calls with a gradient in float32.
        guarded = dtype == call.target and call.rule.has_shape_rule("cast_weight")
        if call.rule.operator != "Deconvolution" or not casts or guarded:
            return None
        if _is_dilated(call.attributes):
            raise ArgumentError(HALF_WEIGHT.format(dtype=call.dtypes[1]))
        # MXNet's own kernel, which float64 selects, computes that gradient.
        return Emulation("float64", self.said(CAST_WEIGHT))

    def inputs_to_copy(
        self, call: DecidedCall, dtype: str, reads: Sequence[str | None]
    ) -> frozenset[int]:
        # After a float32 inference pass, oneDNN leaves the weight of a grouped convolution in a
        # blocked layout that it can't reorder to bfloat16; a copy has the plain layout.
        grouped = str(call.attributes.get("num_group", "1")) != "1"
        convolution = call.rule.operator in ("Convolution", "Deconvolution")
        copies = convolution and dtype == "bfloat16" and grouped and reads[1] is not None
        return frozenset({1} if copies else ())

    # ------------------------------------------------------------------ graphs

    def choose_nodes(self, setting: Setting) -> tuple[Mapping[int, Reason], Mapping[int, Match]]:
        return shape_rules.choose_nodes(setting)

    def with_ordered_inputs(self, graph: Graph) -> Graph:
        return inputs.with_reversed_inputs(graph)

    def without_wrong_fusion(self, graph: Graph) -> Graph:
        return fusible.with_barriers(graph)[0]

    def reads_unset_flag(self, rnn: Node) -> bool:
        # Where the flag changes between a forward and a backward pass, one of several RNNs, such as
        # `rnn_layers` makes, fails with "_M_range_check".
        return super().reads_unset_flag(rnn) or recurrent.is_divided(rnn)

    def fuse(self, graph: Graph, params: Params, policy: Policy) -> tuple[Graph, Params, Policy]:
        return fuse.fused(graph, params, policy)

    def check_fused(self, graph: Graph, policy: Policy) -> None:
        fusible.check_fused(graph, policy)

    # ------------------------------------------------------------------ eager calls and patches

    def steps(self, operator: str) -> Sequence[Step]:
        return eager.STEPS.get(operator, ())

    def patches(self) -> Sequence[tuple[Any, str, Any]]:
        return (
            # Operators that can't read views of bfloat16 arrays read copies of them.
            *((owner, name, eager.build_view) for owner, names in eager.VIEWS for name in names),
            # On few cores NumPy updates weights several times as fast, to the same bits.
            (SGD, "_update_impl", wrapping(optimizers.patched_update_impl)),
        )
