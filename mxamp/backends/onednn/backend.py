"""The backend of CPUs: exact rules and rules of speed, equivalents, and fused models."""

# ruff: noqa: D102  # `Backend` says what the methods do

from __future__ import annotations

from typing import Any, Mapping, Sequence

from mxnet.optimizer import SGD

from ...framework.patching import wrapping
from ...graph.ir import Graph, Usage
from ...policy.policy import Policy
from ...policy.rules import Reason, Rule
from .. import Backend, Quirk, Step
from .. import choices as chosen
from . import cpu, eager, fuse, fusible, inputs, optimizers, quirks, recurrent, shape_rules
from .substitutions import PASSES


class OneDNN(Backend):
    """The backend of CPUs."""

    name = "oneDNN"
    dtypes = ("bfloat16", "float16")
    substitutions = frozenset(
        [*PASSES.by_name, *(str(one.name) for one in fuse.PASSES if one.name), optimizers.SGD_STEP]
    )

    def features(self) -> frozenset[str]:
        return cpu.onednn_features()

    def fast_dtype(self) -> str:
        return cpu.fast_dtype()

    def why_float32(self) -> str:
        return cpu.why_float32()

    def speed_warning(self, policy: Policy, of_model: bool) -> tuple[Any, ...] | None:
        return cpu.speed_warning(policy, of_model)

    def reason_to_widen(self, rule: Rule, attributes: Mapping[str, str]) -> str | None:
        return quirks.reason_to_widen(rule, attributes)

    def quirk(
        self,
        rule: Rule,
        attributes: Mapping[str, str],
        dtypes: Sequence[str],
        dtype: str,
        target: str,
    ) -> Quirk | None:
        return quirks.weight_quirk(rule, attributes, dtypes, dtype, target)

    def inputs_to_copy(
        self, operator: str, attributes: Mapping[str, str], dtype: str, reads: Sequence[str | None]
    ) -> frozenset[int]:
        return quirks.inputs_to_copy(operator, attributes, dtype, reads)

    def choose(self, graph: Graph, policy: Policy, usage: Usage) -> Any:
        return chosen.choose(graph, policy, usage, PASSES, shape_rules.choose_nodes)

    def with_choices(self, graph: Graph, choices: Any, training: bool) -> Graph:
        return chosen.with_choices(graph, choices, training, PASSES) if choices else graph

    def reason_to_keep_call(
        self,
        rule: Rule,
        attrs: dict[str, str],
        shapes: Sequence[Any],
        training: bool,
        casts_weight: bool,
    ) -> Reason | None:
        return chosen.reason_to_keep_call(rule, attrs, shapes, training, casts_weight)

    def with_ordered_inputs(self, graph: Graph) -> Graph:
        return inputs.with_reversed_inputs(graph)

    def without_wrong_fusion(self, graph: Graph) -> Graph:
        return fusible.with_barriers(graph)[0]

    def cached_op_flags(self, flags: Sequence[Any], graph: Graph) -> Sequence[Any]:
        unset = any(chosen.reads_unset_flag(n) or recurrent.is_divided(n) for n in graph.nodes)
        return [flag for flag in flags if flag[0] != "static_shape" or not unset]

    def fuse(self, graph: Graph, params: Any, policy: Policy) -> tuple[Graph, Any, Policy]:
        return fuse.fused(graph, params, policy)

    def check_fused(self, graph: Graph, policy: Policy) -> None:
        fusible.check_fused(graph, policy)

    def steps(self, operator: str) -> Sequence[Step]:
        return eager.STEPS.get(operator, ())

    def patches(self) -> Sequence[tuple[Any, str, Any]]:
        return (
            # Operators that can't read views of bfloat16 arrays read copies of them.
            *((owner, name, eager.build_view) for owner, names in eager.VIEWS for name in names),
            # On few cores NumPy updates weights several times as fast, to the same bits.
            (SGD, "_update_impl", wrapping(optimizers.patched_update_impl)),
        )
