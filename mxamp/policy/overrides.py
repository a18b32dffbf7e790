"""Changes to a policy: checks of the given operators and layers, and the changed rules."""

import fnmatch
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import AbstractSet, Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from mxnet.gluon import SymbolBlock
from mxnet.gluon.block import Block
from mxnet.gluon.nn import HybridSequential, Sequential

from ..errors import ArgumentError, UnknownNameError, unknown
from ..framework.operators import resolve
from ..framework.wording import shown
from .lists import OperatorList
from .rules import UNLISTED, Condition, Rule, ShapeRule

#: Names of layers, with * and ?, and Gluon blocks; or one block.
Layers = Union[None, Block, Iterable[Union[str, Block]]]

LAYER_NAMES = "* and ? stand for any characters; the names of Gluon layers end in _fwd"
NO_LAYERS = "{argument} must be a list of names or of Gluon blocks, not {given}"
NO_NAMES = (
    "{argument}: the names of block {name}'s operators are ambiguous, since its prefix {prefix!r} "
    "does not end in '_'. Give the block a prefix that does, or list the names of its layers, "
    "which explain shows"
)


def exact_pattern(name: str) -> str:
    """Return the `fnmatch` pattern that matches only `name`.

    >>> exact_pattern("stage[0]_conv*")
    'stage[[]0]_conv[*]'
    """
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def layer_patterns(argument: str, layers: Any) -> List[Sequence[str]]:
    """Return the name patterns of each given layer: one for a name, several for a block."""
    if isinstance(layers, Block):
        layers = [layers]
    if layers is None:
        return []
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise ArgumentError(NO_LAYERS.format(argument=argument, given=shown(layers)))
    listed = list(layers)
    if not all(isinstance(one, (str, Block)) for one in listed):
        raise ArgumentError(NO_LAYERS.format(argument=argument, given=shown(listed)))
    return [[one] if isinstance(one, str) else _block_patterns(argument, one) for one in listed]


def unknown_layers(patterns: Iterable[str], layers: Sequence[str]) -> List[UnknownNameError]:
    """Return an error for each pattern that matches none of the names `layers`."""
    unmatched = (pattern for pattern in patterns if not fnmatch.filter(layers, pattern))
    return [unknown("layer", pattern, layers, LAYER_NAMES) for pattern in unmatched]


def _block_patterns(argument: str, block: Block) -> Sequence[str]:
    """Return name patterns that match the operators of a block and its children.

    Gluon names an operator after the block whose code calls it: its prefix comes first.
    """
    if isinstance(block, SymbolBlock):
        # Operators have the names of the symbol, whatever the block's name is.
        nodes = block._cached_graph[1].get_internals()
        names = dict.fromkeys(node.name for node in nodes)
        return [exact_pattern(name) for name in names]
    inner = [_block_patterns(argument, child) for child in block._children.values()]
    patterns = [pattern for few in inner for pattern in few]
    if _is_plain_sequence(block):
        return patterns
    prefix = block.prefix
    if not prefix.endswith("_"):
        raise ArgumentError(
            NO_NAMES.format(argument=argument, name=repr(block.name), prefix=prefix)
        )
    own = exact_pattern(prefix)
    return [f"{own}*", *(one for one in patterns if not one.startswith(own))]


def _is_plain_sequence(block: Block) -> bool:
    """Return whether a block is a Gluon sequence with Gluon's own forward function."""
    forward: Tuple[Any, ...] = (Sequential.forward, HybridSequential.hybrid_forward)
    own = getattr(type(block), "hybrid_forward", None), type(block).forward
    return isinstance(block, (Sequential, HybridSequential)) and any(one in forward for one in own)


#: (operator, attribute, values): fp32 where the attribute has one of the values.
Conditional = Tuple[str, str, Sequence[str]]
Names = Optional[Iterable[str]]

NOT_LOWERED = "the policy computes in float32"
CONDITIONAL = (
    "conditional operators must be a list of (operator, attribute, [values]), such as "
    "('Activation', 'act_type', ['softrelu']), not {given}"
)


@dataclass(frozen=True)
class Change:
    """One step from a policy to another: the arguments of `Policy.override`, or a name for a step.

    Operators are canonical names, sorted; None stands for a list that is not given.
    """

    low: Optional[Tuple[str, ...]] = None
    fp32: Optional[Tuple[str, ...]] = None
    widest: Optional[Tuple[str, ...]] = None
    conditional: Optional[Tuple[Tuple[str, str, Tuple[str, ...]], ...]] = None
    replace_lists: bool = False
    fp32_layers: Tuple[str, ...] = ()
    substitutions: Optional[Tuple[str, ...]] = None
    untuned: bool = False
    in_float32: bool = False
    neutral: Optional[str] = None  #: why no operator is cast
    operator_list: Optional[str] = None  #: a whole list in place of the one before, as JSON

    def given(self) -> Dict[str, Any]:
        """Return the fields that say something, by name."""
        kept = ((one.name, getattr(self, one.name), one.default) for one in fields(self))
        return {name: value for name, value, default in kept if value != default}

    def apply(self, before: OperatorList, dtype: str) -> OperatorList:
        """Return `before` with this change; raise for an operator in two lists."""
        rules, layers, substitutions = before
        if self.untuned:
            untuned = MappingProxyType(without_rules_for_speed(rules))
            return OperatorList(untuned, layers, MappingProxyType({}))
        if self.in_float32:
            return OperatorList(MappingProxyType(in_float32(rules)), layers, substitutions)
        if self.neutral is not None:
            neutral = MappingProxyType(neutral_rules(rules, self.neutral))
            return OperatorList(neutral, layers, substitutions)
        if self.substitutions is not None:
            kept = {name: substitutions[name] for name in self.substitutions}
            substitutions = MappingProxyType(kept)
        layers = tuple(dict.fromkeys((*layers, *self.fp32_layers)))
        return OperatorList(self._changed_rules(rules, dtype), layers, substitutions)

    def _changed_rules(self, rules: Mapping[str, Rule], dtype: str) -> Mapping[str, Rule]:
        """Return `rules` with operators moved to other classes, as `Policy.override` describes."""
        operators = {"low": self.low, "fp32": self.fp32, "widest": self.widest}
        classes: Dict[str, str] = {}
        for op_class, names in operators.items():
            for name in names or ():
                if classes.setdefault(name, op_class) != op_class:
                    raise _two_lists_error(name, classes[name], op_class)
        conditions = _conditions_by_operator(self.conditional or (), dtype)
        for name in conditions:
            if classes.get(name) in ("fp32", "widest"):
                raise _two_lists_error(name, classes[name], "conditionally fp32")
        result = dict(rules)
        if self.replace_lists:
            replaced = {op_class for op_class, names in operators.items() if names is not None}
            result = _with_empty_classes(rules, replaced, self.conditional is None)
        _set_classes(result, classes, conditions)
        return MappingProxyType(result)


def without_rules_for_speed(rules: Mapping[str, Rule]) -> Dict[str, Rule]:
    """Return `rules` without the shape rules that only affect speed."""
    return {
        name: replace(rule, by_shape=tuple(one for one in rule.by_shape if one.reason.exact))
        for name, rule in rules.items()
    }


def in_float32(rules: Mapping[str, Rule]) -> Dict[str, Rule]:
    """Return `rules` with all operators and custom operators of class low moved to class fp32."""
    result = without_rules_for_speed(rules)
    for name, rule in result.items():
        if rule.op_class == "low":
            result[name] = replace(
                rule, op_class="fp32", reason=NOT_LOWERED, conditions=(), by_shape=()
            )
        elif rule.by_shape:
            result[name] = replace(rule, by_shape=_detour_rules(rule))
    unlisted = replace(UNLISTED, operator="Custom")
    custom = replace(result.get("Custom", unlisted), lowers_custom=False)
    result["Custom"] = custom.with_custom_operators(custom.by_op_type)
    return result


def neutral_rules(rules: Mapping[str, Rule], reason: str) -> Dict[str, Rule]:
    """Return `rules` with every operator in the dtype of its inputs, as in plain MXNet.

    Inputs of different float dtypes, which MXNet refuses, are widened.
    """
    return {
        name: rule
        if rule.op_class == "untouched"
        else replace(
            rule,
            op_class="neutral",
            reason=reason,
            conditions=(),
            by_op_type=(),
            by_shape=_detour_rules(rule),
            given=True,
        )
        for name, rule in rules.items()
    }


def _detour_rules(rule: Rule) -> Tuple[ShapeRule, ...]:
    """Return an operator's shape rules that exist because a low-precision kernel is missing."""
    return tuple(one for one in rule.by_shape if one.reason.is_detour)


def checked_substitutions(
    names: Optional[Iterable[str]], known: Mapping[str, str]
) -> Optional[Tuple[str, ...]]:
    """Return names of substitutions, sorted; raise unless all are `known`."""
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ArgumentError(f"substitutions must be a list of names, not {shown(names)}")
    names = list(names)
    for name in names:
        if name not in known:
            raise unknown("substitution", name, known)
    return tuple(sorted(set(names)))


def checked_layers(layers: Layers) -> Tuple[str, ...]:
    """Return the name patterns of `fp32_layers`, without repetitions."""
    patterns = layer_patterns("fp32_layers", layers)
    return tuple(dict.fromkeys(one for few in patterns for one in few))


def checked_operators(op_class: str, names: Names) -> Optional[Tuple[str, ...]]:
    """Return the canonical names of the operators given for a class; raise for unknown ones."""
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ArgumentError(f"the {op_class} operators must be a list of names, not {shown(names)}")
    return tuple(sorted({resolve(name).name for name in names}))


def _two_lists_error(name: str, one: str, other: str) -> ArgumentError:
    """Return the error for an operator that is given in two classes."""
    return ArgumentError(
        f"operator {name!r} is given as {one} and as {other}; leave it in one list"
    )


def checked_conditional(
    conditional: Optional[Iterable[Conditional]],
) -> Optional[Tuple[Tuple[str, str, Tuple[str, ...]], ...]]:
    """Return `Policy.override`'s `conditional` with canonical names and values as text."""
    if conditional is None:
        return None
    if not isinstance(conditional, Iterable):
        raise ArgumentError(CONDITIONAL.format(given=shown(conditional)))
    checked = []
    for entry in conditional:
        try:
            name, attribute, values = entry
        except (TypeError, ValueError):
            raise ArgumentError(CONDITIONAL.format(given=shown(entry))) from None
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ArgumentError(f"the values of {attribute!r} must be a list, not {shown(values)}")
        operator = resolve(name)
        attribute = operator.check_attribute(attribute)
        checked.append((operator.name, attribute, operator.check_values(attribute, values)))
    return tuple(checked)


def _conditions_by_operator(
    conditional: Iterable[Tuple[str, str, Tuple[str, ...]]], dtype: str
) -> Dict[str, Tuple[Condition, ...]]:
    """Return the conditions of each operator."""
    conditions: Dict[str, Tuple[Condition, ...]] = {}
    for name, attribute, values in conditional:
        default = resolve(name).defaults.get(attribute)
        condition = Condition(attribute, values, default=default, dtype=dtype)
        conditions[name] = (*conditions.get(name, ()), condition)
    return conditions


def _with_empty_classes(
    rules: Mapping[str, Rule], replaced: AbstractSet[str], keep_conditions: bool
) -> Dict[str, Rule]:
    """Return `rules` with the operators of the `replaced` classes made neutral."""
    result = {}
    for name, rule in rules.items():
        kept = rule.conditions if keep_conditions else ()
        if rule.op_class in replaced and not kept:
            why = f"left out of {rule.op_class}"
            result[name] = replace(rule, op_class="neutral", reason=why, conditions=())
        else:
            result[name] = replace(rule, conditions=kept)
    return result


def _set_classes(
    rules: Dict[str, Rule],
    classes: Mapping[str, str],
    conditions: Mapping[str, Tuple[Condition, ...]],
) -> None:
    """Change in `rules` the classes and conditions of operators, by canonical name."""
    for name, op_class in classes.items():
        old = rules.get(name, UNLISTED)
        rules[name] = replace(
            old,
            operator=name,
            op_class=op_class,
            reason=f"given as {op_class}",
            given=True,
            conditions=(),
            by_shape=_detour_rules(old),
        )
    for name, of_one in conditions.items():
        old = rules.get(name, UNLISTED)
        # In class fp32 the condition would have no effect, so the operator follows its input.
        op_class = "neutral" if old.op_class in ("fp32", "untouched") else old.op_class
        rules[name] = replace(old, operator=name, op_class=op_class, conditions=of_one)
