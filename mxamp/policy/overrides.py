"""Changes to a policy: check the arguments of `Policy.override`, compute the new rules."""

from __future__ import annotations

import fnmatch
import glob
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Iterable, Mapping, Optional, Sequence, Tuple, Union

from mxnet.gluon import SymbolBlock
from mxnet.gluon.block import Block
from mxnet.gluon.nn import HybridSequential, Sequential

from ..errors import ArgumentError, UnknownNameError, unknown
from ..framework.data import own_tables
from ..framework.operators import resolve
from ..framework.wording import shown
from .lists import OperatorList
from .rules import UNLISTED, Condition, Rule, ShapeRule, not_lowered

#: Names of layers, with * and ?, and Gluon blocks; or one block.
LayerArgument = Union[None, str, Block, Iterable[Union[str, Block]]]

LAYER_NAMES = "* and ? stand for any characters; the names of Gluon layers end in _fwd"
LAYERS = "a name, a Gluon block or a list of them"
NO_NAMES = (
    "{argument}: the prefix {prefix!r} of block {name!r} does not end in '_': give the block one "
    "that does, or list the names of its layers, which explain shows"
)


def layer_patterns(argument: str, layers: object) -> list[Sequence[str]]:
    """Return layer-name patterns for each item of a list of layer names and Gluon blocks."""
    if isinstance(layers, (str, Block)):
        layers = [layers]
    if layers is None:
        return []
    listed = _listed(argument, layers, LAYERS)
    if not all(isinstance(one, (str, Block)) for one in listed):
        raise ArgumentError(f"{argument} must be {LAYERS}, not {shown(listed)}")
    return [[one] if isinstance(one, str) else _block_patterns(argument, one) for one in listed]


def unknown_layers(patterns: Iterable[str], layers: Sequence[str]) -> list[UnknownNameError]:
    """Return an `UnknownNameError` for each pattern that matches no layer name."""
    unmatched = (pattern for pattern in patterns if not fnmatch.filter(layers, pattern))
    return [unknown("layer", pattern, layers, LAYER_NAMES) for pattern in unmatched]


def _block_patterns(argument: str, block: Block) -> Sequence[str]:
    """Return patterns that match the names of all operators in a Gluon block.

    Gluon names an operator after the block whose code calls it: its prefix comes first.
    """
    if isinstance(block, SymbolBlock):
        # Operators have the names of the symbol, whatever the block's name is.
        nodes = block._cached_graph[1].get_internals()
        names = dict.fromkeys(node.name for node in nodes)
        return [glob.escape(name) for name in names]
    inner = [_block_patterns(argument, child) for child in block._children.values()]
    patterns = [pattern for few in inner for pattern in few]
    hybrid = getattr(type(block), "hybrid_forward", None)
    if hybrid is HybridSequential.hybrid_forward or type(block).forward is Sequential.forward:
        return patterns  # it runs its children, and no operator of its own
    prefix = block.prefix
    if not prefix.endswith("_"):
        raise ArgumentError(NO_NAMES.format(argument=argument, name=block.name, prefix=prefix))
    own = glob.escape(prefix)
    return [f"{own}*", *(one for one in patterns if not one.startswith(own))]


#: (operator, attribute, values): fp32 where the attribute has one of the values.
Conditional = Tuple[str, str, Sequence[str]]
Names = Optional[Iterable[str]]

TWO_LISTS = "operator {!r} is given as {} and as {}; leave it in one list"
TRIPLES = "a list of (operator, attribute, [values]), as ('Activation', 'act_type', ['softrelu'])"


@dataclass(frozen=True)
class Change:
    """A change to a policy: what one call of `override`, `untuned` or `in_float32` asks for.

    Operators are canonical names, sorted; None stands for a list that is not given.
    """

    low: tuple[str, ...] | None = None
    fp32: tuple[str, ...] | None = None
    widest: tuple[str, ...] | None = None
    conditional: tuple[tuple[str, str, tuple[str, ...]], ...] | None = None
    replace_lists: bool = False
    fp32_layers: tuple[str, ...] = ()
    substitutions: tuple[str, ...] | None = None
    untuned: bool = False
    in_float32: bool = False
    #: why every operator computes in the dtype of its inputs, as in plain MXNet; inputs of
    #: different float dtypes, which MXNet refuses, are widened
    neutral: str | None = None
    operator_list: str | None = None  #: a whole list in place of the one before, as JSON

    def given(self) -> dict[str, Any]:
        """Return the non-default fields of the change by name, as policy files store them."""
        return {name: value for name, value in vars(self).items() if value != getattr(Change, name)}

    def apply(self, before: OperatorList, dtype: str) -> OperatorList:
        """Return an operator list with this change made; raise for an operator in two lists."""
        rules, layers, substitutions = before
        rules = {name: self._changed_rule(rule) for name, rule in rules.items()}
        rules.update(self._given_rules(rules, dtype))
        if self.untuned:
            substitutions = {}
        if self.substitutions is not None:
            for name in self.substitutions:
                if name not in {*substitutions, *own_tables("schema")["gone_substitutions"]}:
                    raise unknown("substitution", name, substitutions)
            kept = substitutions.keys() & self.substitutions
            substitutions = {name: substitutions[name] for name in sorted(kept)}
        layers = tuple(dict.fromkeys((*layers, *self.fp32_layers)))
        return OperatorList(MappingProxyType(rules), layers, MappingProxyType({**substitutions}))

    @property
    def _lists(self) -> dict[str, tuple[str, ...]]:
        """The operators that the change moves to "low", "fp32" or "widest", by class."""
        lists = {"low": self.low, "fp32": self.fp32, "widest": self.widest}
        return {op_class: names for op_class, names in lists.items() if names is not None}

    def _changed_rule(self, rule: Rule) -> Rule:
        """Return an operator's rule after this change, if the change does not name the operator."""
        if self.untuned:
            needed = tuple(one for one in rule.by_shape if one.reason.changes_results)
            return replace(rule, by_shape=needed)
        if self.in_float32:
            if rule.op_class == "low":
                rule = _moved(rule, "fp32", "the policy computes in float32", by_shape=())
            custom = not_lowered(rule.by_op_type)
            return replace(rule, by_shape=_missing_kernels(rule), by_op_type=custom)
        if self.neutral is not None and rule.op_class != "untouched":
            return _moved(rule, "neutral", self.neutral, by_op_type=(), given=True)
        if self.replace_lists:
            rule = rule if self.conditional is None else replace(rule, conditions=())
            if rule.op_class in self._lists and not rule.conditions:
                return replace(rule, op_class="neutral", reason=f"left out of {rule.op_class}")
        return rule

    def _given_rules(self, rules: Mapping[str, Rule], dtype: str) -> dict[str, Rule]:
        """Return the new rules of the operators that the change names."""
        classes: dict[str, str] = {}
        result: dict[str, Rule] = {}
        for op_class, names in self._lists.items():
            for name in names:
                if classes.setdefault(name, op_class) != op_class:
                    raise ArgumentError(TWO_LISTS.format(name, classes[name], op_class))
                old, reason = rules.get(name, UNLISTED), f"given as {op_class}"
                result[name] = _moved(old, op_class, reason, operator=name, given=True)
        for name, attribute, values in self.conditional or ():
            if classes.get(name) in ("fp32", "widest"):
                raise ArgumentError(TWO_LISTS.format(name, classes[name], "conditionally fp32"))
            default = resolve(name).defaults.get(attribute)
            condition = Condition(attribute, values, default=default, dtype=dtype)
            old = result.get(name) or replace(rules.get(name, UNLISTED), conditions=())
            # In class fp32 the condition would have no effect, so the operator follows its input.
            op_class = "neutral" if old.op_class in ("fp32", "untouched") else old.op_class
            conditions = *old.conditions, condition
            result[name] = replace(old, operator=name, op_class=op_class, conditions=conditions)
        return result


def _moved(rule: Rule, op_class: str, reason: str, **more: Any) -> Rule:
    """Return a rule moved to another precision class, without the conditions of the old class."""
    fields = {"conditions": (), "by_shape": _missing_kernels(rule), **more}
    return replace(rule, op_class=op_class, reason=reason, **fields)


def _missing_kernels(rule: Rule) -> tuple[ShapeRule, ...]:
    """Return an operator's shape rules that exist because MXNet lacks a kernel."""
    return tuple(one for one in rule.by_shape if one.reason.is_missing_kernel)


def checked_substitutions(names: Names) -> tuple[str, ...] | None:
    """Return the argument `substitutions` as a sorted tuple of names; None for None."""
    return None if names is None else tuple(sorted(set(_listed("substitutions", names)), key=str))


def checked_operators(op_class: str, names: Names) -> tuple[str, ...] | None:
    """Return an argument's operators under their canonical names; raise for unknown operators."""
    if names is None:
        return None
    listed = _listed(f"the {op_class} operators", names)
    return tuple(sorted({resolve(name).name for name in listed}))


def _listed(argument: str, names: object, kind: str = "a list of names") -> list[Any]:
    """Return an argument as a list; raise if it is a string or not iterable."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ArgumentError(f"{argument} must be {kind}, not {shown(names)}")
    return list(names)


def checked_conditional(
    conditional: Iterable[Conditional] | None,
) -> tuple[tuple[str, str, tuple[str, ...]], ...] | None:
    """Return the argument `conditional` with canonical operator names and values as text."""
    if conditional is None:
        return None
    checked = []
    for entry in _listed("conditional operators", conditional, TRIPLES):
        try:
            name, attribute, values = entry
        except (TypeError, ValueError):
            words = f"conditional operators must be {TRIPLES}, not {shown(entry)}"
            raise ArgumentError(words) from None
        values = _listed(f"the values of {attribute!r}", values, "a list")
        operator = resolve(name)
        attribute = operator.check_argument("attribute", attribute)
        checked.append((operator.name, attribute, operator.check_values(attribute, values)))
    return tuple(checked)
