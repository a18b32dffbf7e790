"""Device backends: workarounds for missing, wrong and slow kernels of CPUs and GPUs.

The core asks `backend_of(device)`, and neither names a device nor imports one of the packages
below. `Backend` itself has no quirks: with it in place of the others, the core computes what the
policy says, no faster and no slower.

A backend is loaded when it is first asked for; the first policy and the first patch ask for all of
them, since lists name the rules of every device, and arrays may be on any.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Mapping, NamedTuple, Protocol, Sequence

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..framework.operators import Operator
    from ..graph.edit import Params
    from ..graph.ir import Graph, Usage
    from ..policy.policy import Policy
    from ..policy.rules import Reason, Rule
    from .choices import Chosen

#: The class of each backend, by MXNet's kind of device.
_CLASSES = {
    "cpu": "mxamp.backends.onednn.backend:OneDNN",
    "gpu": "mxamp.backends.cuda.backend:Cuda",
}
DEVICES = tuple(_CLASSES)
#: The features of processors on which kernels depend, as operator lists name them.
FEATURES = ("avx512", "avx512_bf16", "amx_bf16")

#: The choices for a graph that needs none: see `Backend.choose`.
NONE: tuple[()] = ()

NOT_FUSIBLE = (
    "`fuse=True` is for inference in bfloat16 or float32 on CPUs, for which oneDNN has fused "
    "operators; this policy is for {dtype} on the {device}"
)


class DecidedCall(NamedTuple):
    """An operator call whose casts are being decided: its rule, attributes and input dtypes."""

    rule: Rule
    attributes: Mapping[str, str]
    dtypes: Sequence[str]  #: of its inputs
    target: str  #: the policy's dtype


class Site(NamedTuple):
    """An operator call as shape rules see it: attributes, input shapes, neighbors in the graph."""

    operator: str
    attrs: Mapping[str, str]
    shapes: Sequence[tuple[int, ...] | None]  #: of its inputs
    training: bool
    uses: int = 1  #: how often the graph reads its second input; 0 if that input needs no cast
    casts_weight: bool = False  #: gradients may be computed, and its second input would be cast
    feeds_norm: bool = False  #: a BatchNorm reads its output, without a change of layout between
    blocked: bool = False  #: its first input is in oneDNN's blocked layout
    reads_volume: bool = False  #: an input may be a 3-D convolution's output, in that layout
    has_blocks: bool = False  #: it will be replaced by a convolution with a blocked kernel
    in_call: bool = False  #: an eager call, whose casts take several times as long as a node's

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The shapes of the operator's data and weight, or None if one of them is unknown."""
        data, weight = (*self.shapes, None, None)[:2]
        return None if data is None or weight is None else (data, weight)


class Emulation(NamedTuple):
    """A workaround for a missing kernel: the wider dtype to compute in, and the reason."""

    dtype: str
    reason: str


#: MXNet's own `_imperative_invoke`; what an eager call does, a function of it and its arguments.
Invoke = Callable[..., Any]
Action = Callable[[Invoke, Sequence[Any]], Any]


class EagerOperator(Protocol):
    """Interface of an eager operator for the wrappers that a backend puts around its calls."""

    operator: Operator
    rule: Rule
    policy: Policy

    def call(
        self, original: Invoke, op: str, inputs: Sequence[Any], attrs: Mapping[str, str], np: bool
    ) -> Any:
        """Call the operator `op` under the policy; return `mx.np` arrays if `np`."""

    def write(self, outputs: object, out: object) -> object:
        """Cast `outputs` into the arrays `out`; without `out`, return `outputs` as they are."""


#: Returns an action that does something, and then the given action.
Step = Callable[[Action, EagerOperator], Action]


class Backend:
    """Base class of device backends; its defaults suit a device without workarounds."""

    name: ClassVar[str] = ""  #: begins the reasons that the backend gives, in `explain`
    #: The target dtypes that the device computes in, or that are emulated; the default first.
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    #: Whether Python can read the memory of the device's arrays in place.
    in_host_memory: ClassVar[bool] = True
    #: Whether `amp_cast` takes arrays without elements, which only NumPy semantics allow.
    casts_empty_arrays: ClassVar[bool] = True
    #: The names of all faster equivalents, in operator lists.
    substitutions: ClassVar[frozenset[str]] = frozenset()

    def said(self, text: str) -> str:
        """Return a reason's text with the backend's name before it, as in "oneDNN: no kernel"."""
        return f"{self.name}: {text}" if self.name else text

    # ------------------------------------------------------------------ the machine

    def features(self) -> frozenset[str]:
        """Return the features in `FEATURES`, such as "avx512", that this device has."""
        return frozenset()

    def fast_dtype(self) -> str:
        """Return the dtype that "auto" stands for on this device."""
        return "float32"

    def why_float32(self) -> str:
        """Return a text that says why "auto" is float32 on this device, for a log line."""
        return "no half precision is known to be fast here"

    def float32_substitutions(self) -> Mapping[str, str]:
        """Return the operators' faster equivalents to use in float32, as {name: measured gain}."""
        return {}

    def speed_warning(self, policy: Policy, of_model: bool) -> tuple[Any, ...] | None:
        """Return a warning for the log if a policy is slow on this device, else None.

        It is (key, log line, *values): each key is logged once.
        """
        return None

    # ------------------------------------------------------------------ decisions

    def reason_by_attributes(self, call: DecidedCall) -> str | None:
        """Return why the attributes of an operator call require float32; None if they don't."""
        return None

    def emulation(self, call: DecidedCall, dtype: str) -> Emulation | None:
        """Return how to emulate an operator that has no kernel in `dtype`; None if it has one."""
        return None

    def inputs_to_copy(
        self, call: DecidedCall, dtype: str, reads: Sequence[str | None]
    ) -> frozenset[int]:
        """Return the positions of inputs to copy because a cast can't read their memory layout."""
        return frozenset()

    def reason_by_shapes(self, rule: Rule, site: Site) -> Reason | None:
        """Return why the shapes of an eager call keep it in float32; None if they don't."""
        return None

    # ------------------------------------------------------------------ graphs

    def choose(self, graph: Graph, policy: Policy, usage: Usage) -> Chosen:
        """Return which nodes of a graph to keep in float32, and which to replace by faster ones.

        Graphs of equal choices share a compiled graph; `NONE` if there is nothing to do.
        """
        return NONE

    def leaves_as_is(self, graph: Graph, policy: Policy) -> bool:
        """Return whether a graph runs exactly as in plain MXNet under a policy."""
        return policy.target_dtype == "float32" and not policy.changes

    def with_choices(self, graph: Graph, choices: Chosen, training: bool) -> Graph:
        """Return the graph with nodes replaced or kept in float32 as `choose` has decided."""
        return graph

    def with_ordered_inputs(self, graph: Graph) -> Graph:
        """Return the graph with its inputs in the order that takes the least memory."""
        return graph

    def without_wrong_fusion(self, graph: Graph) -> Graph:
        """Return an inference graph in which MXNet fuses no operators incorrectly."""
        return graph

    def cached_op_flags(self, flags: Sequence[Any], graph: Graph) -> Sequence[Any]:
        """Return a CachedOp's flags without those that give wrong results for its graph."""
        return flags

    def binding(self, groups: object) -> AbstractContextManager[Any]:
        """Return a context manager that applies workarounds while an executor is bound.

        `groups` is the argument `group2ctx` of `bind`.
        """
        return nullcontext()

    # ------------------------------------------------------------------ saved models

    def fuse(self, graph: Graph, params: Params, policy: Policy) -> tuple[Graph, Params, Policy]:
        """Return a model with operators fused for inference: graph, parameters and policy."""
        raise ArgumentError(NOT_FUSIBLE.format(dtype=policy.precision, device=policy.device))

    def check_fused(self, graph: Graph, policy: Policy) -> None:
        """Raise if a graph has fused operators that can't run in the policy's dtype."""

    # ------------------------------------------------------------------ eager calls and patches

    def steps(self, operator: str) -> Sequence[Step]:
        """Return wrappers for an operator's eager calls; they run before its inputs are cast."""
        return ()

    def patches(self) -> Sequence[tuple[Any, str, Callable[[Any], Any]]]:
        """Return the MXNet methods to replace on this device: (owner, name, wrapping function)."""
        return ()


@lru_cache(maxsize=None)
def backend_of(device: str) -> Backend:
    """Return the backend of a kind of device, "cpu" or "gpu"."""
    module, _, name = _CLASSES[device].partition(":")
    backend: Backend = getattr(import_module(module), name)()
    return backend


def prepare_import() -> None:
    """Load the CUDA libraries that MXNet needs; call it before importing MXNet."""
    import_module("mxamp.backends.cuda.libraries").preload()


# ---------------------------------------------------------------------- rules by shape


#: A rule by shape: whether it keeps a site, with a limit, in float32.
Holds = Callable[[Site, int], bool]


class ShapeCheck(NamedTuple):
    """A shape rule: a test of an operator's shapes that keeps the operator in float32."""

    holds: Holds
    changes_results: bool = False  #: it is not only about speed
    is_missing_kernel: bool = False  #: it is for a missing kernel, whatever the operator's class
    in_calls: bool = False  #: eager calls follow it too
    reads_weight: bool = False  #: dtype or shape, beyond what an operator's attributes say of it


_shape_checks: dict[str, ShapeCheck] = {}


def rule(name: str, **traits: bool) -> Callable[[Holds], Holds]:
    """Return a decorator that registers a function as the test of the shape rule `name`.

    Where its test is true, a shape rule keeps an operator in float32. `traits` are fields of
    `ShapeCheck`.
    """

    def register(holds: Holds) -> Holds:
        _shape_checks[name] = ShapeCheck(holds, **traits)
        return holds

    return register


def substitutions() -> frozenset[str]:
    """Return the names of all faster equivalents of operators that device backends have."""
    return frozenset().union(*(backend_of(device).substitutions for device in DEVICES))


def shape_checks() -> Mapping[str, ShapeCheck]:
    """Return the shape rules of all device backends, by their names in operator lists."""
    for device in DEVICES:
        backend_of(device)
    return _shape_checks
