"""mxamp: automatic mixed precision for Apache MXNet 1.9.1 and Gluon.

>>> import mxamp as amp
>>> amp.init("bfloat16")
>>> amp.is_enabled()
True
>>> amp.shutdown()
"""

from .framework.compat import import_mxnet as _import_mxnet

_import_mxnet()

from ._version import __version__  # noqa: E402
from .convert.bucketing import convert_bucketing_module  # noqa: E402
from .convert.compare import OutputError, compare_models, random_inputs  # noqa: E402
from .convert.files import ConvertedFiles, convert_files  # noqa: E402
from .convert.models import convert_hybrid_block, convert_model, convert_symbol  # noqa: E402
from .debugging.drawing import draw  # noqa: E402
from .debugging.explain import explain  # noqa: E402
from .debugging.plan import Plan  # noqa: E402
from .errors import (  # noqa: E402
    AmpError,
    ArgumentError,
    InstallError,
    StateError,
    UnknownNameError,
)
from .frontends.contrib import patch_contrib  # noqa: E402
from .frontends.decorate import decorate  # noqa: E402
from .frontends.functions import (  # noqa: E402
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontends.opt_levels import initialize  # noqa: E402
from .frontends.stock_lists import (  # noqa: E402
    list_conditional_fp32_ops,
    list_fp32_ops,
    list_loss_output_functions,
    list_lp16_fp32_ops,
    list_lp16_ops,
    list_lp16_use_fp32_params,
    list_widest_type_cast,
)
from .patches.autocast import autocast, init, shutdown  # noqa: E402
from .policy.active import current_policy, is_enabled  # noqa: E402
from .policy.custom_operators import register_custom_operator  # noqa: E402
from .policy.policy import Policy  # noqa: E402
from .scaling.grad_scaler import GradScaler  # noqa: E402
from .scaling.scaler import LossScaler, NoScaler, StaticLossScaler  # noqa: E402
from .scaling.trainer import clip_grad_global_norm, init_trainer, scale_loss, unscale  # noqa: E402

__all__ = [
    "AmpError",
    "ArgumentError",
    "ConvertedFiles",
    "GradScaler",
    "InstallError",
    "LossScaler",
    "NoScaler",
    "OutputError",
    "Plan",
    "Policy",
    "StateError",
    "StaticLossScaler",
    "UnknownNameError",
    "__version__",
    "autocast",
    "clip_grad_global_norm",
    "compare_models",
    "convert_bucketing_module",
    "convert_files",
    "convert_hybrid_block",
    "convert_model",
    "convert_symbol",
    "current_policy",
    "decorate",
    "draw",
    "explain",
    "float_function",
    "half_function",
    "init",
    "init_trainer",
    "initialize",
    "is_enabled",
    "list_conditional_fp32_ops",
    "list_fp32_ops",
    "list_loss_output_functions",
    "list_lp16_fp32_ops",
    "list_lp16_ops",
    "list_lp16_use_fp32_params",
    "list_widest_type_cast",
    "patch_contrib",
    "promote_function",
    "random_inputs",
    "register_custom_operator",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "shutdown",
    "unscale",
]
