"""Backends: what each kind of device can't do, does wrong, or does slowly, behind one registry.

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
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ClassVar,
    Mapping,
    NamedTuple,
    Protocol,
    Sequence,
)

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
    """A call of an operator, for which `policy.decision` asks the backend."""

    rule: Rule
    attributes: Mapping[str, str]
    dtypes: Sequence[str]  #: of its inputs
    target: str  #: the policy's dtype


class Site(NamedTuple):
    """An operator and its surroundings, for rules by shape. Unknown shapes are None."""

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
        """The shapes of its data and its weight; None unless both are known."""
        data, weight = (*self.shapes, None, None)[:2]
        return None if data is None or weight is None else (data, weight)


class Emulation(NamedTuple):
    """Why an operator computes on values of one dtype in another, wider one, and in which."""

    dtype: str
    reason: str


#: MXNet's own `_imperative_invoke`; what an eager call does, a function of it and its arguments.
Invoke = Callable[..., Any]
Action = Callable[[Invoke, Sequence[Any]], Any]


class EagerOperator(Protocol):
    """An operator in eager calls under a policy, for which a `Step` is made."""

    operator: Operator
    rule: Rule
    policy: Policy

    def call(
        self, original: Invoke, op: str, inputs: Sequence[Any], attrs: Mapping[str, str], np: bool
    ) -> Any:
        """Call another operator, named `op`, under the policy; `np`: it is one of `mx.np`."""

    def write(self, outputs: object, out: object) -> object:
        """Return `outputs`, or `out` with them written to its arrays in their dtypes."""


#: Returns an action that does something, and then the given action.
Step = Callable[[Action, EagerOperator], Action]


class Backend:
    """A kind of device without quirks; each method returns what a device without them would."""

    name: ClassVar[str] = ""  #: begins the reasons that the backend gives, in `explain`
    #: The target dtypes that the device computes in, or that are emulated; the default first.
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    #: Whether Python can read the memory of the device's arrays in place.
    in_host_memory: ClassVar[bool] = True
    #: Whether `amp_cast` takes arrays without elements, which only NumPy semantics allow.
    casts_empty_arrays: ClassVar[bool] = True
    #: The names of all faster equivalents, in operator lists, and those that a policy has only if
    #: asked for, with what they do.
    substitutions: ClassVar[frozenset[str]] = frozenset()
    on_demand: ClassVar[Mapping[str, str]] = {}

    def said(self, text: str) -> str:
        """Return a reason that the backend gives, with its name."""
        return f"{self.name}: {text}" if self.name else text

    # ------------------------------------------------------------------ the machine

    def features(self) -> frozenset[str]:
        """Return which of `FEATURES` the device has."""
        return frozenset()

    def fast_dtype(self) -> str:
        """Return the dtype that "auto" means here: float32 if no half precision is fast."""
        return "float32"

    def why_float32(self) -> str:
        """Return the reason why "auto" is float32 here, for a log line."""
        return "no half precision is known to be fast here"

    def float32_substitutions(self) -> Mapping[str, str]:
        """Return the faster equivalents in float32, each with its measured gain here."""
        return {}

    def speed_warning(self, policy: Policy, of_model: bool) -> tuple[Any, ...] | None:
        """Return a log line, its key before it, its values after it, if `policy` won't be fast."""
        return None

    # ------------------------------------------------------------------ decisions

    def reason_to_widen(self, call: DecidedCall) -> str | None:
        """Return why a call computes in float32 for its attributes, in any class; else None."""
        return None

    def emulation(self, call: DecidedCall, dtype: str) -> Emulation | None:
        """Return how to emulate an operator that is to compute in `dtype`, None if it can."""
        return None

    def inputs_to_copy(
        self, call: DecidedCall, dtype: str, reads: Sequence[str | None]
    ) -> frozenset[int]:
        """Return the positions of inputs that have to be copied before their cast to `reads`."""
        return frozenset()

    def reason_to_keep(self, rule: Rule, site: Site) -> Reason | None:
        """Return why an eager call stays in float32 by the shapes of its inputs."""
        return None

    # ------------------------------------------------------------------ graphs

    def choose(self, graph: Graph, policy: Policy, usage: Usage) -> Chosen:
        """Return which operators shapes and neighbors keep in float32, or replace by faster ones.

        Graphs of equal choices share a compiled graph; `NONE` if there is nothing to do.
        """
        return NONE

    def with_choices(self, graph: Graph, choices: Chosen, training: bool) -> Graph:
        """Return the graph with the equivalents of `choices`, and the reasons on its nodes."""
        return graph

    def with_ordered_inputs(self, graph: Graph) -> Graph:
        """Return a graph to run, with its inputs in the order that takes the least memory."""
        return graph

    def without_wrong_fusion(self, graph: Graph) -> Graph:
        """Return an inference graph for an executor, in which MXNet fuses only what it may."""
        return graph

    def cached_op_flags(self, flags: Sequence[Any], graph: Graph) -> Sequence[Any]:
        """Return the flags of a block's cached op, without those that make `graph` run wrong."""
        return flags

    def binding(self, groups: object) -> AbstractContextManager[Any]:
        """Return the context in which to bind an executor; `groups` is its `group2ctx`."""
        return nullcontext()

    # ------------------------------------------------------------------ saved models

    def fuse(self, graph: Graph, params: Params, policy: Policy) -> tuple[Graph, Params, Policy]:
        """Return graph and parameters of a model with fused operators, and a policy for it."""
        dtype = policy.target_dtype if policy.lowers else "float32"
        raise ArgumentError(NOT_FUSIBLE.format(dtype=dtype, device=policy.device))

    def check_fused(self, graph: Graph, policy: Policy) -> None:
        """Raise where a graph has fused operators that `policy` would leave in float32."""

    # ------------------------------------------------------------------ eager calls and patches

    def steps(self, operator: str) -> Sequence[Step]:
        """Return what eager calls of an operator do before the cast: see `patches.eager`."""
        return ()

    def patches(self) -> Sequence[tuple[Any, str, Callable[[Any], Any]]]:
        """Return rows for `patches.table`: owner, attribute, builder of the replacement."""
        return ()


@lru_cache(maxsize=None)
def backend_of(device: str) -> Backend:
    """Return the backend of a kind of device, "cpu" or "gpu"."""
    module, _, name = _CLASSES[device].partition(":")
    backend: Backend = getattr(import_module(module), name)()
    return backend


def prepare_import() -> None:
    """Prepare the import of MXNet, before which no device is known."""
    import_module("mxamp.backends.cuda.libraries").preload()


# ---------------------------------------------------------------------- rules by shape


#: A rule by shape: whether it keeps a site, with a limit, in float32.
Holds = Callable[[Site, int], bool]


class ShapeCheck(NamedTuple):
    """A rule that operator lists name: it keeps an operator in float32 at some `Site`s."""

    holds: Holds
    changes_results: bool  #: it is not only about speed
    is_missing_kernel: bool  #: it is for a missing kernel, whatever the operator's class
    in_calls: bool  #: eager calls follow it too
    reads_weight: bool  #: dtype or shape, beyond what an operator's attributes say of it


_shape_checks: dict[str, ShapeCheck] = {}


def rule(
    name: str,
    *,
    changes_results: bool = False,
    is_missing_kernel: bool = False,
    in_calls: bool = False,
    reads_weight: bool = False,
) -> Callable[[Holds], Holds]:
    """Return a decorator that registers a rule by shape, a function of a site and a limit.

    `ShapeCheck` explains the arguments.
    """

    def register(holds: Holds) -> Holds:
        _shape_checks[name] = ShapeCheck(
            holds, changes_results, is_missing_kernel, in_calls, reads_weight
        )
        return holds

    return register


def substitutions() -> frozenset[str]:
    """Return the names of the faster equivalents of all backends."""
    return frozenset().union(*(backend_of(device).substitutions for device in DEVICES))


def shape_checks() -> Mapping[str, ShapeCheck]:
    """Return the rules by shape of all backends, by the names that operator lists have for them."""
    for device in DEVICES:
        backend_of(device)
    return _shape_checks
