"""Convolutions with as many output channels as oneDNN's kernels work on at once, for inference.

oneDNN computes convolutions in blocks of 16 channels. For other numbers of output channels it falls
back to slower kernels: in bfloat16 to a matrix product for each image in the plain layout, with
reorders on both sides of it. Here such a convolution gets filters of zeros, and what reads its
output gets weights of zeros for them. The other channels keep their values: zeros are added to
their sums.
"""

from dataclasses import replace
from typing import (
    Callable,
    Dict,
    FrozenSet,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from ..policy.policy import Policy
from ..policy.values import flattens
from .cast_params import of_any_shape
from .channels import Channels, Runs, elementwise, joined, with_added
from .equivalents import BLOCK, COLOURS
from .fold_batchnorm import Params, float32_array, is_float32, readers_by_name
from .graph import Graph, Node, Output
from .graph_copy import GraphCopy
from .layouts import NORMS

__all__ = ["with_padded_channels"]

# At most a third more arithmetic: what the slower kernels lose by measurement, without reorders.
_MOST = 4 / 3
# What oneDNN's kernels read besides multiples of 16.
_FEW = frozenset({2, COLOURS, 4, 8, 12})

#: They leave the blocked layout anyway, so that a slice before them costs little.
_REORDERS = frozenset(
    {"Flatten", "Reshape", "transpose", "SwapAxis", "_np_reshape", "_npx_reshape", "_np_transpose"}
)
# What added channels have in a BatchNorm's gamma, beta, mean and variance.
_OF_NORMS = (0.0, 0.0, 0.0, 1.0)


def with_padded_channels(graph: Graph, params: Params, policy: Policy) -> Tuple[Graph, Params]:
    """Pad the channels of convolutions to multiples of 16, and the weights that read them.

    Outputs of the graph, and operators that reorder axes, read a slice. Where another one can't
    read added channels, the convolutions that they come from stay as they are.
    """
    rule = policy.rule("Convolution")
    if "padded_channels" not in policy.substitutions or rule.given or rule.missing is not None:
        return graph, params
    plan = _Plan(graph, params)
    while plan.refused:
        plan = _Plan(graph, params, plan.left | plan.refused)
    return plan.made()


Given = Sequence[Optional[Channels]]  #: the channels of a node's inputs, where they are known


class _Places(NamedTuple):
    """Where a parameter gets values for added channels."""

    axis: int
    runs: Runs
    fill: float = 0.0


class _Plan:
    """Which channels each tensor has, and what of the graph changes for that."""

    def __init__(self, graph: Graph, params: Params, left: FrozenSet[int] = frozenset()) -> None:
        self.graph, self.params, self.left = graph, params, left
        self.refused: Set[int] = set()  #: convolutions to leave as they are, too
        self._channels: Dict[Output, Channels] = {}
        self._places: Dict[str, List[_Places]] = {}
        self._attrs: Dict[int, Dict[str, str]] = {}
        self._cut: Set[Tuple[int, int]] = set()  # inputs that read a slice: (node, position)
        self._readers = readers_by_name(graph)
        self._dense = _read_by_dense(graph)
        read = [output for node in graph.nodes for output in node.inputs] + graph.heads
        self._statistics_read = {i for i, output in read if output}
        for i, node in enumerate(graph.nodes):
            if not node.is_variable:
                self._visit(i, node)
        for output in graph.heads:
            self._check_cut(output)

    def made(self) -> Tuple[Graph, Params]:
        """Return the graph and its parameters with the channels that were added."""
        values = dict(self.params)
        for name, places in self._places.items():
            array = values[name].asnumpy()
            for axis, runs, fill in places:
                array = with_added(array, axis, runs, fill)
            values[name] = float32_array(array)
        copy = GraphCopy(self.graph)
        slices: Dict[Output, Output] = {}
        for i, node in enumerate(self.graph.nodes):
            inputs = copy.inputs(node)
            for k, output in enumerate(node.inputs):
                if (i, k) in self._cut:
                    inputs[k] = self._sliced(copy, slices, output)
            changed = of_any_shape(node) if node.name in self._places else node
            attrs = {**changed.attrs, **self._attrs.get(i, {})}
            copy.add_copy(i, inputs=inputs, attrs=attrs)
        heads = [
            self._sliced(copy, slices, output) if self._added(output) else None
            for output in self.graph.heads
        ]
        result = copy.finished()
        return replace(result, heads=[new or old for new, old in zip(heads, result.heads)]), values

    def _sliced(self, copy: GraphCopy, slices: Dict[Output, Output], output: Output) -> Output:
        """Return an output's own channels: one slice for all that read it."""
        if output not in slices:
            name = copy.new_name(f"{self.graph.nodes[output[0]].name}_channels")
            attrs = {"axis": "1", "begin": "0", "end": str(self._channels[output].own)}
            node = Node("slice_axis", name, attrs, [output])
            slices[output] = copy.add(replace(node, inputs=copy.inputs(node)))
        return slices[output]

    # ------------------------------------------------------------------ the walk over nodes

    def _visit(self, i: int, node: Node) -> None:
        given = [self._channels.get(output) for output in node.inputs]
        behind = self._BEHIND.get(node.operator, _Plan._behind_other)(self, i, node, given)
        if behind is not None:
            self._channels[i, 0] = behind
            return
        for k, output in enumerate(node.inputs):
            if self._added(output) and node.operator not in _REORDERS:
                self.refused |= self._channels[output].added_by
            elif self._added(output):
                self._cut.add((i, k))
                self._check_cut(output)

    def _check_cut(self, output: Output) -> None:
        """Refuse added channels before others: one slice does not take them away."""
        if self._added(output) and len(self._channels[output].runs) > 1:
            self.refused |= self._channels[output].added_by

    def _added(self, output: Output) -> int:
        return self._channels[output].added if output in self._channels else 0

    # ------------------------------------------------------------------ operators
    # Each returns the channels of its output: None where they are not known, or where it can't read
    # those that are given.

    def _behind_other(self, _i: int, node: Node, given: Given) -> Optional[Channels]:
        known = [one for one in given if one is not None]
        return elementwise(node, known) if known and len(known) == len(given) else None

    def _behind_concat(self, _i: int, node: Node, given: Given) -> Optional[Channels]:
        known = [one for one in given if one is not None]
        on_channels = node.attrs.get("dim", "1") == "1" and len(known) == len(given)
        return joined(known) if on_channels else None

    def _behind_flatten(self, i: int, _node: Node, given: Given) -> Optional[Channels]:
        return given[0] if i in self._dense else None

    def _behind_convolution(self, i: int, node: Node, given: Given) -> Optional[Channels]:
        data, weight = given[0], self._weight(node)
        own, groups = int(node.attrs["num_filter"]), int(node.attrs.get("num_group", "1"))
        if weight is not None and len(weight) == len("OIHW") and weight[0] == own:
            if groups == 1:
                return self._behind_whole(i, node, data or Channels(((weight[1], 0),)))
            if data is not None and weight[1] == 1 and data.own == groups:
                return self._behind_depthwise(i, node, data)
        return None if data is not None and data.added else Channels(((own, 0),))

    def _behind_whole(self, i: int, node: Node, data: Channels) -> Channels:
        """Return the channels of a convolution whose outputs read all channels."""
        if data.added:
            self._place(node, 1, _Places(1, data.runs))
        own = int(node.attrs["num_filter"])
        total = -(-own // BLOCK) * BLOCK
        reads_blocks = data.total % BLOCK == 0 or data.total in _FEW
        if total == own or total > own * _MOST or not reads_blocks or i in self.left:
            return Channels(((own, 0),))
        behind = Channels(((own, total - own),), frozenset({i}))
        self._widen(i, node, behind, {"num_filter": str(total)})
        return behind

    def _behind_depthwise(self, i: int, node: Node, data: Channels) -> Channels:
        behind = data.times(int(node.attrs["num_filter"]) // data.own)._replace(bound=0.0)
        if behind.added:
            filters, groups = str(behind.total), str(data.total)
            self._widen(i, node, behind, {"num_filter": filters, "num_group": groups})
        return behind

    def _behind_dense(self, _i: int, node: Node, given: Given) -> Optional[Channels]:
        data, weight = given[0], self._weight(node)
        flatten = flattens(node.attrs)
        if data is not None and data.added:
            if weight is None or not flatten or weight[1] % data.own:
                return None
            self._place(node, 1, _Places(1, data.runs))
        return Channels(((int(node.attrs["num_hidden"]), 0),)) if flatten else None

    def _behind_norm(self, i: int, node: Node, given: Given) -> Optional[Channels]:
        data = given[0]
        changeable = self._weight(node) is not None and i not in self._statistics_read
        if data is None or node.attrs.get("axis", "1") != "1" or (data.added and not changeable):
            return None
        if data.added:
            for k, fill in enumerate(_OF_NORMS, 1):
                self._place(node, k, _Places(0, data.runs, fill))
        return data

    _BEHIND: Mapping[str, Callable[..., Optional[Channels]]] = {
        "Convolution": _behind_convolution,
        "FullyConnected": _behind_dense,
        "Concat": _behind_concat,
        "Flatten": _behind_flatten,
        **dict.fromkeys(NORMS, _behind_norm),
    }

    # ------------------------------------------------------------------ parameters

    def _widen(self, i: int, node: Node, behind: Channels, attrs: Dict[str, str]) -> None:
        """Give a convolution filters for added channels."""
        self._attrs[i] = attrs
        for k in range(1, len(node.inputs)):
            self._place(node, k, _Places(0, behind.runs))

    def _weight(self, node: Node) -> Optional[Tuple[int, ...]]:
        """Return the shape of a node's second input, if all but the first may be changed."""
        names = [self.graph.nodes[i].name for i, _ in node.inputs[1:]]
        variables = all(self.graph.nodes[i].is_variable for i, _ in node.inputs[1:])
        own = variables and all(
            self._readers[name] == 1 and name in self.params and is_float32(self.params[name])
            for name in names
        )
        return self.params[names[0]].shape if own and names else None

    def _place(self, node: Node, k: int, places: _Places) -> None:
        name = self.graph.nodes[node.inputs[k][0]].name
        self._places.setdefault(name, []).append(places)


def _read_by_dense(graph: Graph) -> Set[int]:
    """Return the nodes that only dense layers read, as their data, be it through a Flatten."""
    found: Set[int] = set(range(len(graph.nodes))) - {i for i, _ in graph.heads}
    read: Set[int] = set()
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        passes = not node.is_variable and node.operator in ("Flatten", "Dropout") and i in found
        for k, (source, _) in enumerate(node.inputs):
            read.add(source)
            if k or not (passes or node.operator == "FullyConnected"):
                found.discard(source)
    return found & read
