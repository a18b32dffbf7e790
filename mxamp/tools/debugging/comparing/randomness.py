"""Random numbers in runs that are compared: the same in each, and none drawn where that can be.

`Dropout` becomes a multiplication with a mask from a generator of its own: MXNet's would be
another one in another dtype.
"""

import contextlib
import random
import re
import zlib
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd

from ....graph.edit import Edit
from ....graph.inspect import Tensor
from ....graph.ir import Graph, Node, Output
from ....policy.active import suspended

__all__ = ["Seeds", "any_draws", "draws", "drops", "mask_of", "with_masks"]

#: Random numbers are the same in each run of a comparison.
_SEED = 20180201
#: Operators that draw from MXNet's generator, by their canonical names.
_RANDOM = re.compile(
    r"_random_(?!pdf)|_sample_|_shuffle|_npi_(uniform|normal|gamma|bernoulli|choice|exponential"
    r"|gumbel|laplace|logistic|multinomial|pareto|powerd|rayleigh|shuffle|weibull)"
)


class Seeds:
    """MXNet's generator: left alone until something draws from it, and seeded alike from then on.

    MXNet does not tell the state of its generator. Where something has drawn from it, it goes on
    from a number that was drawn before the first seed.
    """

    def __init__(self) -> None:
        self._resume_from: Optional[int] = None
        self._seeded = False

    def seed(self) -> None:
        """Seed it, if that was not done in this run; what has been drawn before does not count."""
        if self._seeded:
            return
        self._seeded = True
        with suspended(), autograd.pause():
            if self._resume_from is None:
                self._resume_from = int(mx.nd.random.randint(0, 2**31 - 1).asscalar())
            mx.random.seed(_SEED)

    def begin_run(self) -> None:
        """Start all generators alike."""
        self._seeded = False
        random.seed(_SEED)
        np.random.seed(_SEED)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put all generators back."""
        states = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            if self._resume_from is not None:
                mx.random.seed(self._resume_from)


def drops(attrs: Mapping[str, str]) -> bool:
    """Tell whether a `Dropout` of these attributes drops anything now."""
    active = autograd.is_training() or attrs.get("mode") == "always"
    return active and float(attrs.get("p", 0.5)) > 0


def draws(operator: str, attrs: Mapping[str, str]) -> bool:
    """Tell whether an operator draws random numbers."""
    if operator == "LeakyReLU":
        return attrs.get("act_type") == "rrelu" and autograd.is_training()
    if operator in ("RNN", "Dropout"):
        default = 0.0 if operator == "RNN" else 0.5
        return autograd.is_training() and float(attrs.get("p", default)) > 0
    return _RANDOM.match(operator) is not None


def any_draws(graph: Graph, inside: bool = False) -> bool:
    """Tell whether a graph draws random numbers, but for its `Dropout`, which gets masks."""
    for node in graph.nodes:
        drawn = not node.is_variable and draws(node.operator, node.attrs)
        if drawn and (inside or node.operator != "Dropout"):
            return True
        if any(any_draws(body, inside=True) for body in node.subgraphs):
            return True
    return False


def mask_of(name: str, attrs: Mapping[str, str], shape: Sequence[int]) -> Any:
    """Return the mask of one `Dropout`: 0 where it drops, and else what makes up for that."""
    keep = 1 - float(attrs.get("p", 0.5))
    axes = [int(axis) for axis in re.findall(r"\d+", attrs.get("axes", ""))]
    sizes = [1 if i in axes else size for i, size in enumerate(shape)]
    generator = np.random.RandomState(zlib.crc32(name.encode()) ^ _SEED)
    kept = generator.random_sample(sizes) < keep
    return kept.astype("float32") / np.float32(keep or 1)


def with_masks(graph: Graph, tensors: Mapping[Output, Tensor]) -> Tuple[Graph, Dict[str, Any]]:
    """Return a graph in which masks are inputs, and the masks by the names of these.

    All shapes have to be known.
    """
    masks: Dict[str, Any] = {}
    edit = Edit(graph, {})
    for i, node in enumerate(graph.nodes):
        if node.is_variable or node.operator != "Dropout" or not drops(node.attrs):
            continue
        # By its number among them: two may have one name.
        name = f"_mxamp_mask{len(masks)}"
        data = tensors[node.inputs[0]]
        masks[name] = mask_of(f"{node.name} {len(masks)}", node.attrs, data.shape or ())
        mask = edit.add_node(Node("null", name))
        if data.dtype != "float32":
            mask = edit.add("amp_cast", f"{name}_cast", [mask], dtype=data.dtype)
        reads = [*node.inputs, mask]
        edit.change(i, op="broadcast_mul", attrs={}, inputs=reads, num_outputs=1)
    return edit.applied(), masks
