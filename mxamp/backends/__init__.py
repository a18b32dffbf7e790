"""Device backends: the missing, wrong and slow kernels of CPUs and GPUs, behind one registry.

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
    """An operator call whose dtype the policy decides, as the device backend sees it."""

    rule: Rule
    attributes: Mapping[str, str]
    dtypes: Sequence[str]  #: of its inputs
    target: str  #: the policy's dtype


class Site(NamedTuple):
    """An operator call with its neighbors in the graph, as rules by shape see it."""

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
        """The shapes of the operator's data and weight; None unless both are known."""
        data, weight = (*self.shapes, None, None)[:2]
        return None if data is None or weight is None else (data, weight)


class Emulation(NamedTuple):
    """The wider dtype in which an operator emulates a missing kernel, and the reason."""

    dtype: str
    reason: str


#: MXNet's own `_imperative_invoke`; what an eager call does, a function of it and its arguments.
Invoke = Callable[..., Any]
Action = Callable[[Invoke, Sequence[Any]], Any]


class EagerOperator(Protocol):
    """An operator in eager calls under a policy, as the steps of a device backend see it."""

    operator: Operator
    rule: Rule
    policy: Policy

    def call(
        self, original: Invoke, op: str, inputs: Sequence[Any], attrs: Mapping[str, str], np: bool
    ) -> Any:
        """Call the operator named `op` under the policy; `np`: it belongs to `mx.np`."""

    def write(self, outputs: object, out: object) -> object:
        """Return `outputs`; with `out`, cast them into the arrays of `out` and return `out`."""


#: Returns an action that does something, and then the given action.
Step = Callable[[Action, EagerOperator], Action]


class Backend:
    """Base class of device backends; its methods describe a device without special cases."""

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
        """Return the text of a reason, prefixed with the name of this device backend."""
        return f"{self.name}: {text}" if self.name else text

    # ------------------------------------------------------------------ the machine

    def features(self) -> frozenset[str]:
        """Return the CPU or GPU features, among `FEATURES`, that the device has."""
        return frozenset()

    def fast_dtype(self) -> str:
        """Return the dtype of "auto" on this device: float32 if no half precision is fast."""
        return "float32"

    def why_float32(self) -> str:
        """Return the reason why "auto" is float32 on this device, for a log line."""
        return "no half precision is known to be fast here"

    def float32_substitutions(self) -> Mapping[str, str]:
        """Return faster float32 equivalents of operators by name, each with its measured gain."""
        return {}

    def speed_warning(self, policy: Policy, of_model: bool) -> tuple[Any, ...] | None:
        """Return (key, log line, *values) if `policy` is slow on this device, else None."""
        return None

    # ------------------------------------------------------------------ decisions

    def reason_to_widen(self, call: DecidedCall) -> str | None:
        """Return why the attributes of an operator call force float32, in any class; else None."""
        return None

    def emulation(self, call: DecidedCall, dtype: str) -> Emulation | None:
        """Return the emulation of an operator without a kernel in `dtype`; else None."""
        return None

    def inputs_to_copy(
        self, call: DecidedCall, dtype: str, reads: Sequence[str | None]
    ) -> frozenset[int]:
        """Return the positions of inputs to copy before the cast to the dtypes `reads`."""
        return frozenset()

    def reason_to_keep(self, rule: Rule, site: Site) -> Reason | None:
        """Return why the input shapes of an eager call keep it in float32; None if they do not."""
        return None

    # ------------------------------------------------------------------ graphs

    def choose(self, graph: Graph, policy: Policy, usage: Usage) -> Chosen:
        """Return which nodes of a graph stay in float32 and which get a faster equivalent.

        Graphs of equal choices share a compiled graph; `NONE` if there is nothing to do.
        """
        return NONE

    def leaves_as_is(self, graph: Graph, policy: Policy) -> bool:
        """Return whether a graph runs as in plain MXNet under `policy`, whatever its inputs."""
        return policy.target_dtype == "float32" and not policy.changes

    def with_choices(self, graph: Graph, choices: Chosen, training: bool) -> Graph:
        """Return the graph with the equivalents and the float32 reasons of `choices` applied."""
        return graph

    def with_ordered_inputs(self, graph: Graph) -> Graph:
        """Return the graph with its inputs in the order that needs the least memory."""
        return graph

    def without_wrong_fusion(self, graph: Graph) -> Graph:
        """Return an inference graph in which MXNet cannot fuse operators incorrectly."""
        return graph

    def cached_op_flags(self, flags: Sequence[Any], graph: Graph) -> Sequence[Any]:
        """Return a block's CachedOp flags, without those that make `graph` compute wrongly."""
        return flags

    def binding(self, groups: object) -> AbstractContextManager[Any]:
        """Return a context manager for binding an executor; `groups` is its `group2ctx`."""
        return nullcontext()

    # ------------------------------------------------------------------ saved models

    def fuse(self, graph: Graph, params: Params, policy: Policy) -> tuple[Graph, Params, Policy]:
        """Return a model with fused operators: its graph, its parameters, and its policy."""
        raise ArgumentError(NOT_FUSIBLE.format(dtype=policy.precision, device=policy.device))

    def check_fused(self, graph: Graph, policy: Policy) -> None:
        """Raise if a graph has fused operators that `policy` would leave in float32."""

    # ------------------------------------------------------------------ eager calls and patches

    def steps(self, operator: str) -> Sequence[Step]:
        """Return the steps of an operator's eager calls to take before its inputs are cast."""
        return ()

    def patches(self) -> Sequence[tuple[Any, str, Callable[[Any], Any]]]:
        """Return patches of MXNet that the device needs: (owner, attribute, builder) rows."""
        return ()


@lru_cache(maxsize=None)
def backend_of(device: str) -> Backend:
    """Return the device backend of "cpu" or "gpu"."""
    module, _, name = _CLASSES[device].partition(":")
    backend: Backend = getattr(import_module(module), name)()
    return backend


def prepare_import() -> None:
    """Load the CUDA libraries that MXNet needs, before MXNet is imported."""
    import_module("mxamp.backends.cuda.libraries").preload()


# ---------------------------------------------------------------------- rules by shape


#: A rule by shape: whether it keeps a site, with a limit, in float32.
Holds = Callable[[Site, int], bool]


class ShapeCheck(NamedTuple):
    """A rule of operator lists that keeps an operator in float32 depending on its shapes."""

    holds: Holds
    changes_results: bool = False  #: it is not only about speed
    is_missing_kernel: bool = False  #: it is for a missing kernel, whatever the operator's class
    in_calls: bool = False  #: eager calls follow it too
    reads_weight: bool = False  #: dtype or shape, beyond what an operator's attributes say of it


_shape_checks: dict[str, ShapeCheck] = {}


def rule(name: str, **traits: bool) -> Callable[[Holds], Holds]:
    """Return a decorator that registers a function (site, limit) as a shape rule called `name`.

    `traits` are fields of `ShapeCheck`.
    """

    def register(holds: Holds) -> Holds:
        _shape_checks[name] = ShapeCheck(holds, **traits)
        return holds

    return register


def substitutions() -> frozenset[str]:
    """Return the names of the faster equivalents of operators, of all device backends."""
    return frozenset().union(*(backend_of(device).substitutions for device in DEVICES))


def shape_checks() -> Mapping[str, ShapeCheck]:
    """Return the shape rules of all device backends by their names in operator lists."""
    for device in DEVICES:
        backend_of(device)
    return _shape_checks
