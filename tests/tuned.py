"""A made-up tuning."""

import math

from mxamp.policy.policy import Policy
from mxamp.tools.tuning.tuning import LayerCost, Trial, Tuning

NAN, INF = float("nan"), math.inf
PLAIN = Trial("plain", "float32", (), 0, 4.0, 0.1, 1.0, 0.0, True)
FAST = Trial("autocast", "bfloat16", ("relu", "tanh"), 2, 2.1, 0.05, 1.9, 0.004, True)
FASTER = Trial("autocast", "bfloat16", ("relu",), 0, 1.9, 0.05, 2.1, INF, False)
LAYERS = (
    LayerCost("a", "Convolution", False, 0.001, 0.5),
    LayerCost("b<i>", "FullyConnected", True, 0.3),
    LayerCost("c", "Convolution", False, 0.001, 0.75),
    LayerCost("d", "dot", True, NAN, NAN),
)
TUNING = Tuning(
    policy=Policy.default("bfloat16").override(fp32_layers=["b<i>", "d"]),
    way="autocast", mode="inference", operators=12, inputs=(("data", "float32", (1, 3, 8, 8)),),
    machine=(("cpu", "Xeon"), ("threads", "2")), tolerance=0.01, error=0.004, gradient_error=None,
    metric=0.91, min_metric=0.9, evaluations=7, seconds=33.25, seed=0, complete=False,
    notes=("One & only.",), chosen=FAST, trials=(PLAIN, FASTER, FAST), layers=LAYERS,
)  # fmt: skip
