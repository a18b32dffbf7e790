"""mxamp: automatic mixed precision for Apache MXNet 1.9.1 and Gluon.

>>> import mxamp as amp
>>> amp.init("bfloat16")
>>> amp.is_enabled()
True
>>> amp.shutdown()
"""

from ._compat import import_mxnet as _import_mxnet

_import_mxnet()

from ._version import __version__  # noqa: E402
from .autocast import autocast, current_policy, init, is_enabled, shutdown  # noqa: E402
from .compare import OutputError, compare_models, random_inputs  # noqa: E402
from .contrib import patch_contrib  # noqa: E402
from .convert import (  # noqa: E402
    convert_bucketing_module,
    convert_hybrid_block,
    convert_model,
    convert_symbol,
)
from .decorate import decorate  # noqa: E402
from .drawing import draw  # noqa: E402
from .errors import (  # noqa: E402
    AmpError,
    ArgumentError,
    InstallError,
    StateError,
    UnknownNameError,
)
from .explain import Plan, explain  # noqa: E402
from .files import ConvertedFiles, convert_files  # noqa: E402
from .functions import (  # noqa: E402
    float_function,
    half_function,
    promote_function,
    register_custom_operator,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .grad_scaler import GradScaler  # noqa: E402
from .levels import initialize  # noqa: E402
from .policy import Policy  # noqa: E402
from .scaler import LossScaler, NoScaler, StaticLossScaler  # noqa: E402
from .stock_lists import (  # noqa: E402
    list_conditional_fp32_ops,
    list_fp32_ops,
    list_loss_output_functions,
    list_lp16_fp32_ops,
    list_lp16_ops,
    list_lp16_use_fp32_params,
    list_widest_type_cast,
)
from .trainer import clip_grad_global_norm, init_trainer, scale_loss, unscale  # noqa: E402

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
