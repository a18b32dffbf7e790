"""Biases whose gradients MXNet leaves out, because their layers' weights have none."""

import logging
import re
from typing import Iterable, List

from mxnet.gluon import Parameter

from ..framework.wording import shortened

__all__ = ["biases_without_gradients", "warn_of_frozen_weights"]

logger = logging.getLogger("mxamp")

FROZEN = (
    "MXNet computes the gradient of a dense layer's bias only beside that of its weight: %s would "
    "be trained on whatever is in memory, as the weight has grad_req 'null'. Set the weight's "
    "grad_req to 'write' too, and give the Trainer only the parameters that are to change"
)
#: The fused recurrent layers compute these gradients all the same.
_FUSED = re.compile(r"_[lr]\d+_[ih]2h_weight$")


def biases_without_gradients(params: Iterable[Parameter]) -> List[str]:
    """Return the names of the biases of dense layers that are trained beside a frozen weight."""
    by_name = {param.name: param for param in params}
    found = []
    for name, weight in by_name.items():
        dense = name.endswith("_weight") and len(weight.shape or ()) == len("OI")
        if weight.grad_req != "null" or not dense or _FUSED.search(name):
            continue
        bias = by_name.get(f"{name[: -len('weight')]}bias")
        if bias is not None and bias.grad_req != "null":
            found.append(bias.name)
    return found


def warn_of_frozen_weights(params: Iterable[Parameter]) -> None:
    """Say in the log which biases these are."""
    found = biases_without_gradients(params)
    if found:
        logger.warning(FROZEN, shortened(found))
