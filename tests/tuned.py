"""A made-up tuning."""

from mxamp.policy.policy import Policy
from mxamp.tools.tuning.forms import Timing
from mxamp.tools.tuning.tune import Tuning

PLAIN = Timing("inference", "plain", "float32", 4.0, 1.0, (1.0, 1.0), 0.0, True)
FAST = Timing("inference", "fused", "bfloat16", 2.1, 1.9, (1.8, 2.0), 0.004, True)
TUNING = Tuning(
    policy=Policy.default("bfloat16").override(fp32_layers=["b<i>", "d"]),
    way="fused", kept=("b<i>", "d"), error=0.004, gradient_error=None, metric=0.91, complete=False,
    notes=("Two\nlayers.", "One & only."), timings=(PLAIN, FAST), chosen=FAST,
)  # fmt: skip
