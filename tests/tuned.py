"""Evidence of a tuning, made up."""

import math

from mxamp.policy.evidence import Evidence, LayerCost, Trial

NAN, INF = float("nan"), math.inf
PLAIN = Trial("plain", "float32", (), 0, 4.0, 0.1, 1.0, 0.0, True)
FAST = Trial("autocast", "bfloat16", ("relu", "tanh"), 2, 2.1, 0.05, 1.9, 0.004, True)
FASTER = Trial("autocast", "bfloat16", ("relu",), 0, 1.9, 0.05, 2.1, INF, False)
LAYERS = (
    LayerCost("a", "Convolution", 3, False, 0.001, 0.5),
    LayerCost("b<i>", "FullyConnected", 5, True, 0.3),
    LayerCost("c", "Convolution", 8, False, 0.001, 0.75),
    LayerCost("d", "dot", 9, True, NAN, NAN),
)
EVIDENCE = Evidence(
    mode="inference", way="autocast", model="ab12", operators=12,
    inputs=(("data", "float32", (1, 3, 8, 8)),), machine=(("cpu", "Xeon"), ("threads", "2")),
    tolerance=0.01, error=0.004, gradient_error=None, metric=0.91, min_metric=0.9, evaluations=7,
    seconds=33.25, seed=0, complete=False, notes=("One & only.",), trials=(PLAIN, FASTER, FAST),
    layers=LAYERS,
)  # fmt: skip
