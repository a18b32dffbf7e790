"""`explain`: the precision of each operator of a model under a policy, with reasons."""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence

from mxnet.gluon import HybridBlock
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ...convert import options
from ...convert.blocks import Examples, trace
from ...convert.symbols import widened_graph
from ...errors import ArgumentError, unknown
from ...framework.keywords import checked_call
from ...framework.machine import Dtype
from ...framework.operators import resolve
from ...framework.wording import counted, one_of, shown
from ...graph.casts.insert import rewrite
from ...graph.casts.offline import without_copies_before_casts
from ...graph.casts.widen import has_halves
from ...graph.inspect import precision_of_node, tensors_of
from ...graph.ir import HALVES, Graph, Node, Usage, body_usage, rewrites_bodies
from ...patches.cached_op import PolicyCachedOp, Source
from ...policy.active import current_policy
from ...policy.overrides import LayerArgument
from ...policy.policy import Policy, requested_policy
from ...policy.targets import DEFAULT_TARGET, TARGETS
from ..tables import text_table

#: Arrays, dtypes or shapes by the name of an input.
ByName = Optional[Mapping[str, Any]]
#: What an operator of a plan may compute in; "as is" if its inputs are not cast.
PRECISIONS = (*TARGETS, "float32", "as is")
MODES = CONVERTED, INFERENCE, TRAINING = ("converted", "inference", "training")
#: Colors of `to_dot`; that of low precision is `_LOW`.
_COLORS, _LOW = {"float32": "#f5d76e", "as is": "#e8e8e8"}, "#8fd18f"
#: The mode of a plan of a model that is 16-bit or fused already, without another conversion.
AS_IT_IS = "as it is"

HINT = "Gluon adds _fwd to the name of a layer; * matches any characters, as in *conv*"


class NodePlan(NamedTuple):
    """The plan for one operator in a graph: the dtype in which it computes, and the reason."""

    name: str
    operator: str
    precision: str
    reason: str
    inputs: tuple[tuple[str, str | None], ...] = ()  #: (name, the dtype it is cast to or None)


class Cast(NamedTuple):
    """A cast that mxamp inserts: the node that it reads, and the dtype that it casts to."""

    source: str
    dtype: str


@dataclass(frozen=True, repr=False)
class Plan:
    """The result of `explain`: the precision of each operator in a graph, with reasons.

    ::

        plan = amp.explain(net, "bfloat16")
        print(plan)  # a table, and a summary
        plan["dense0_fwd"].reason
        plan.filter(precision="float32").counts()
        Path("net.dot").write_text(plan.to_dot())  # dot -Tsvg net.dot -o net.svg
    """

    target_dtype: str
    nodes: tuple[NodePlan, ...]
    casts: tuple[Cast, ...]
    inputs: tuple[str, ...] = ()
    mode: str = CONVERTED

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[NodePlan]:
        return iter(self.nodes)

    def __contains__(self, name: object) -> bool:
        return any(node.name == name for node in self.nodes)

    def __getitem__(self, name: str) -> NodePlan:
        """Return the plan of the first operator of that name.

        In a block that is called twice, each name belongs to two operators.

        Raises `UnknownNameError`, which is a `LookupError`, with the closest names.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise unknown("operator name", name, [node.name for node in self.nodes], HINT)

    @checked_call
    def filter(
        self, name: str = "*", operator: str | None = None, precision: str | None = None
    ) -> Plan:
        """Return a plan with only the operators that match; `name` may contain * and ?.

        `operator` is any name of an MXNet operator, `precision` one of "float16", "bfloat16",
        "float32" and "as is".
        """
        operator = None if operator is None else resolve(operator).name
        if precision not in (None, *PRECISIONS):
            raise ArgumentError(f"precision must be {one_of(PRECISIONS)}, not {shown(precision)}")
        kept = [one for one in self.nodes if fnmatch.fnmatchcase(one.name, name)]
        kept = [one for one in kept if operator in (None, one.operator)]
        kept = [one for one in kept if precision in (None, one.precision)]
        return replace(self, nodes=tuple(kept))

    def counts(self) -> dict[str, int]:
        """Return the number of operators in each precision."""
        return dict(Counter(node.precision for node in self.nodes))

    def __str__(self) -> str:
        table = text_table(NodePlan._fields[:4], [node[:4] for node in self.nodes])
        return f"{table}\n\n{self.summary()}"

    __repr__ = __str__  # for notebooks

    def to_dot(self) -> str:
        """Return the plan as a Graphviz DOT graph, with precisions as colors and casts on edges.

        Known parameters are left out.
        """
        lines = ["digraph plan {", '  node [shape=box style="filled,rounded"]']
        drawn = {*self.inputs, *(node.name for node in self.nodes)}
        lines += [f'  {_quoted(name)} [shape=ellipse fillcolor="white"]' for name in self.inputs]
        for node in self.nodes:
            label, tooltip = _quoted(f"{node.name}\n{node.operator}"), _quoted(node.reason)
            name, color = _quoted(node.name), _quoted(_COLORS.get(node.precision, _LOW))
            lines.append(f"  {name} [label={label} tooltip={tooltip} fillcolor={color}]")
            for source, dtype in node.inputs:
                label = f" [label={_quoted(dtype)}]" if dtype else ""
                if source in drawn:
                    lines.append(f"  {_quoted(source)} -> {name}{label}")
        return "\n".join([*lines, "}", ""])

    def summary(self) -> str:
        """Return a line with the number of operators in each precision, and of casts."""
        counts = ", ".join(f"{n} in {p}" for p, n in self.counts().items()).replace("in as", "as")
        operators = counted(len(self), "operator") + (f": {counts}" if counts else "")
        heads = {CONVERTED: f"if converted to {self.target_dtype}", AS_IT_IS: "the model as it is"}
        head = heads.get(self.mode, f"{self.mode} in {self.target_dtype}")
        return f"{head}: {operators}; {counted(len(self.casts), 'cast')}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ---------------------------------------------------------------------- making a plan


@checked_call
def explain(
    model: Symbol | HybridBlock,
    target_dtype: Dtype | None = None,
    *,
    policy: Policy | None = None,
    excluded_sym_names: LayerArgument = None,
    input_dtypes: Mapping[str, Any] | None = None,
    params: Mapping[str, NDArray] | None = None,
    example_inputs: Examples = None,
    mode: str | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Plan:
    """Show which precision each operator of a model computes in, and why.

    >>> import mxnet as mx, mxamp as amp
    >>> net = mx.sym.softmax(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc"))
    >>> amp.explain(net, policy=amp.Policy.default("float16", "gpu"))["fc"].precision
    'float16'

    The model does not run and is not changed. Printing the plan gives a table::

        plan = amp.explain(net, "bfloat16")
        print(plan.filter(precision="float32"))
        Path("net.dot").write_text(plan.to_dot())  # dot -Tsvg net.dot -o net.svg

    Parameters
    ----------
    model : Symbol or HybridBlock
        The model.
    target_dtype : str or dtype, optional
        "float16" or "bfloat16"; with `policy`, the dtype of that policy. Without `target_dtype`
        and `policy`, the plan shows the graph that a block last ran in mixed precision (the
        training graph if the block has trained). If a converted block has not run yet, the plan
        follows the policy of the conversion. For other models that have not run, the plan follows
        the active policy (`init`, `autocast`). Without an active policy, the plan shows a 16-bit
        model as it is, and a float32 model as `convert_*` to float16 would make it. A fused model
        is shown as it is.
    policy : Policy, optional
        The default is mxamp's own policy for `target_dtype` and this machine's kind of device.
    excluded_sym_names : list of str or Block, optional
        Layers to keep in float32: Gluon blocks, or names of nodes in the plan. In a name, * and ?
        stand for any characters.
    input_dtypes : dict of str to dtype, optional
        Dtypes of inputs that are not float32 and can't be inferred.
    params : dict of str to NDArray, optional
        The parameters of a symbol: `{**arg_params, **aux_params}`. With `params`, the plan applies
        rules that depend on the shapes of weights, as `convert_model` does. Omit `params` for a
        block.
    example_inputs : NDArray or sequence, optional
        The arguments of one call, for a block that was not hybridized and run before.
    mode : str, optional
        "converted" explains the model that `convert_*` makes. "inference" and "training" explain
        the graphs that run while mixed precision is on (`init`, `autocast`), in which faster
        equivalents replace some operators. The default is "converted" if `target_dtype` or `policy`
        is given. Otherwise the default is the mode in which the block last ran, or "inference" if
        the block has not run and a policy is active.
    input_shapes : dict of str to tuple, optional
        Shapes of inputs, for the modes "inference" and "training": the precision of some operators,
        such as a dense layer with few rows, depends on shapes. The default is the shapes of
        `example_inputs`, else the shapes on which the block last ran.

    Returns
    -------
    Plan
        `nodes` are the operators, each with `name`, `operator`, `precision` and `reason`. `casts`
        are the inserted casts, each with `source` and `dtype`. `inputs` are the names of the inputs
        that are not parameters. `mode` is "as it is" for a 16-bit model that is not converted
        again. `target_dtype` is the dtype of the policy.
        `len(plan)` counts the operators, and iterating over a plan yields them.
        `plan["dense0_fwd"]` is the operator of that name: Gluon adds `_fwd` to the name of a layer.
        `plan.filter(name="*", operator=None, precision=None)` returns a plan with the matching
        operators only. `plan.counts()` returns the number of operators in each precision.
        `plan.summary()` returns one line. `plan.to_dot()` returns the graph in Graphviz's language:
        colors show precisions, and labels of edges show casts.

    Raises
    ------
    UnknownNameError
        The model has no such layer or input; the message has the closest names.
    ArgumentError
        `model` is no model, a mode or dtype is unknown, or the policy is for another dtype.
    StateError
        The block has not run yet, and there are no `example_inputs`.
    """
    if mode not in (None, *MODES):
        raise ArgumentError(f"mode must be {one_of(MODES)}, not {shown(mode)}")
    inputs = _inputs_of(model, params, example_inputs, input_dtypes, input_shapes)
    graph, source = Graph.from_symbol(inputs.symbol), None
    # Fused operators have no class in a policy: they keep the dtype that they were fused in.
    if policy is None and target_dtype is None and not graph.has_fused_operators:
        source = getattr(model, "_source", None)
        policy, mode, inputs = _in_force(model, source, mode, inputs)
    graph = graph if source is None else source.graph
    dtypes = options.resolved_dtypes(inputs.symbol, inputs.params, inputs.dtypes)
    inputs = inputs._replace(dtypes=dtypes)
    data = tuple(name for name in graph.input_names if name not in inputs.params)
    is_made = graph.has_fused_operators or has_halves(graph, dtypes)
    if is_made and not any((policy, target_dtype, mode, excluded_sym_names)):
        nodes = tuple(_nodes_as_they_are(graph, dtypes))
        target = max(TARGETS, key=[node.precision for node in nodes].count)
        return Plan(target, nodes, tuple(_inserted_casts(graph)), data, AS_IT_IS)
    policy = requested_policy(target_dtype or DEFAULT_TARGET, policy=policy)
    policy = options.with_excluded_layers(policy, excluded_sym_names, graph)
    options.check_names(list(input_shapes or ()), graph.input_names, "input")
    nodes, casts = _decided(graph, policy, inputs, source, mode or CONVERTED)
    return Plan(policy.precision, nodes, casts, data, mode or CONVERTED)


class _Inputs(NamedTuple):
    """A model's symbol and parameters, and the known dtypes and shapes of its inputs."""

    symbol: Symbol
    params: Mapping[str, NDArray]
    dtypes: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]


def _inputs_of(
    model: object, params: ByName, examples: Examples, dtypes: ByName, shapes: ByName
) -> _Inputs:
    """Check the arguments of `explain`; return the model's symbol and its known inputs."""
    shapes = options.checked_shapes("input_shapes", shapes)
    options.check_mapping("input_dtypes", dtypes, "dtypes")
    options.check_mapping("params", params, "NDArrays", NDArray)
    if isinstance(model, HybridBlock) and params is None:
        traced = trace(model, examples)
        known = {**traced.example_shapes, **shapes}
        return _Inputs(traced.symbol, traced.param_values(), traced.input_dtypes(dtypes), known)
    if not isinstance(model, Symbol):
        raise ArgumentError(f"explain takes a Symbol, or a HybridBlock alone, not {shown(model)}")
    read = set(model.list_inputs())
    values = {n: array for n, array in (params or {}).items() if n in read}
    return _Inputs(model, values, dtypes or {}, shapes)


def _in_force(
    model: Symbol | HybridBlock, source: Source | None, mode: str | None, inputs: _Inputs
) -> tuple[Policy | None, str | None, _Inputs]:
    """Return the policy, mode and inputs with which a model last ran, or would run now."""
    policy = current_policy() if source is None else source.policy
    op = None if mode == CONVERTED else getattr(model, "_cached_op", None)
    variants: Any = op.variants if isinstance(op, PolicyCachedOp) else None
    used = [one for one in variants.made if policy in (None, one)] if variants else []
    if not used:
        return policy, mode or (INFERENCE if policy and source is None else None), inputs
    calls = [*variants.made[used[-1]].choices.items()]
    # The last graph that has trained, if any has.
    (call, _), sizes = ([one for one in calls if one[0][0].training] or calls)[-1]
    # Shapes are known of data alone, and only under a policy that depends on them.
    shapes = dict(zip((variants.names[i] for i in variants.inputs), [*sizes][-1] or ()))
    dtypes = {**dict(zip(variants.names, call.dtypes)), **inputs.dtypes}
    inputs = inputs._replace(dtypes=dtypes, shapes={**shapes, **inputs.shapes})
    return used[-1], mode or (TRAINING if call.training else INFERENCE), inputs


def _decided(
    graph: Graph, policy: Policy, inputs: _Inputs, source: Source | None, mode: str
) -> tuple[tuple[NodePlan, ...], tuple[Cast, ...]]:
    """Return the plan for each operator under a policy, and the casts to insert.

    `source` is the conversion that made the model, whose graph this is, or None.
    """
    stored = frozenset() if source is None else source.stored
    known = {name: dtype for name, dtype in inputs.dtypes.items() if name not in stored}
    converting = mode == CONVERTED
    if converting and source is None:
        plain = without_copies_before_casts(graph)
        graph, variables = widened_graph(plain, policy, known, inputs.params, True)
        known.update(dict.fromkeys(variables, "float32"))
    shapes = {name: array.shape for name, array in inputs.params.items()}
    if not converting:  # a conversion serves data of any shape
        shapes.update(inputs.shapes)
    usage = Usage(known, shapes, stored=stored, training=mode == TRAINING, converting=converting)
    result = rewrite(graph, policy, usage)
    nodes = tuple(
        _node_plan(graph, node, why.precision, why.reason) for graph, node, why in result.decided()
    )
    return nodes, tuple(_inserted_casts(result.graph))


def _nodes_as_they_are(graph: Graph, dtypes: Mapping[str, str]) -> Iterator[NodePlan]:
    """Yield the plan for each operator of a model that is in 16 bits or fused already."""
    values = tensors_of(graph, {**dict.fromkeys(graph.input_names, "float32"), **dtypes}, {})
    for i, node in enumerate(graph.nodes):
        if node.is_variable or node.is_inserted_cast or node.is_inserted_copy:
            continue
        reads = [values[output].dtype for output in node.inputs]
        precision, read = precision_of_node(graph, i, values), " and ".join(dict.fromkeys(reads))
        reason = f"its inputs are {read}" if reads else "it has no input"
        casts = [graph.nodes[j] for j, _ in node.inputs if graph.nodes[j].is_inserted_cast]
        halves = sorted({values[cast.inputs[0]].dtype for cast in casts} & HALVES)
        reason += f", rounded to {' and '.join(halves)}" if halves else ""
        yield _node_plan(graph, node, precision if precision in PRECISIONS else "as is", reason)
        if rewrites_bodies(node, training=False):
            for k, body in enumerate(node.subgraphs):
                yield from _nodes_as_they_are(body, body_usage(Usage(), node, k, reads).dtypes)


def _node_plan(graph: Graph, node: Node, precision: str, reason: str) -> NodePlan:
    """Return the plan for one operator (`NodePlan`), with the names and casts of its inputs."""
    inputs = tuple(_source_and_cast(graph, i) for i, _ in node.inputs)
    return NodePlan(node.name, node.operator, precision, reason, inputs)


def _source_and_cast(graph: Graph, i: int) -> tuple[str, str | None]:
    """Follow inserted casts from node i to their source; return its name and the casts' dtype.

    The dtype is None without a cast.
    """
    node, dtype = graph.nodes[i], None
    while node.is_inserted_cast or node.is_inserted_copy:
        dtype = dtype or node.attrs.get("dtype")
        node = graph.nodes[node.inputs[0][0]]
    return node.name, dtype


def _inserted_casts(graph: Graph) -> Iterable[Cast]:
    """Yield the casts that mxamp inserted in a graph and in the bodies of its loops."""
    for node in graph.nodes:
        if node.is_inserted_cast:
            yield Cast(graph.nodes[node.inputs[0][0]].name, node.attrs["dtype"])
        for body in node.subgraphs:
            yield from _inserted_casts(body)
