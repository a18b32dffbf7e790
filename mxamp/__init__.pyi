"""The public names of mxamp, and the modules that they are loaded from when first used."""

from . import debugging as debugging
from ._version import __version__ as __version__
from .convert.files import ConvertedFiles as ConvertedFiles
from .convert.files import convert_files as convert_files
from .convert.models import convert_bucketing_module as convert_bucketing_module
from .convert.models import (
    convert_hybrid_block as convert_hybrid_block,
)
from .convert.models import (
    convert_model as convert_model,
)
from .convert.models import (
    convert_symbol as convert_symbol,
)
from .convert.outputs import (
    OutputError as OutputError,
)
from .convert.outputs import (
    compare_models as compare_models,
)
from .convert.outputs import (
    random_inputs as random_inputs,
)
from .errors import (
    AmpError as AmpError,
)
from .errors import (
    ArgumentError as ArgumentError,
)
from .errors import (
    CheckError as CheckError,
)
from .errors import (
    InstallError as InstallError,
)
from .errors import (
    StateError as StateError,
)
from .errors import (
    UnknownNameError as UnknownNameError,
)
from .errors import (
    WriteError as WriteError,
)
from .framework.machine import bfloat16 as bfloat16
from .frontends.apex import initialize as initialize
from .frontends.contrib import (
    list_conditional_fp32_ops as list_conditional_fp32_ops,
)
from .frontends.contrib import (
    list_fp32_ops as list_fp32_ops,
)
from .frontends.contrib import (
    list_loss_output_functions as list_loss_output_functions,
)
from .frontends.contrib import (
    list_lp16_fp32_ops as list_lp16_fp32_ops,
)
from .frontends.contrib import (
    list_lp16_ops as list_lp16_ops,
)
from .frontends.contrib import (
    list_lp16_use_fp32_params as list_lp16_use_fp32_params,
)
from .frontends.contrib import (
    list_widest_type_cast as list_widest_type_cast,
)
from .frontends.contrib import patch_contrib as patch_contrib
from .frontends.functions import (
    float_function as float_function,
)
from .frontends.functions import (
    half_function as half_function,
)
from .frontends.functions import (
    promote_function as promote_function,
)
from .frontends.functions import register_custom_operator as register_custom_operator
from .frontends.functions import (
    register_float_function as register_float_function,
)
from .frontends.functions import (
    register_half_function as register_half_function,
)
from .frontends.functions import (
    register_promote_function as register_promote_function,
)
from .frontends.paddle import decorate as decorate
from .patches.autocast import autocast as autocast
from .patches.autocast import init as init
from .patches.autocast import shutdown as shutdown
from .policy.active import current_policy as current_policy
from .policy.active import is_enabled as is_enabled
from .policy.policy import Policy as Policy
from .scaling.grad_scaler import GradScaler as GradScaler
from .scaling.scaler import (
    LossScaler as LossScaler,
)
from .scaling.scaler import (
    NoScaler as NoScaler,
)
from .scaling.scaler import (
    StaticLossScaler as StaticLossScaler,
)
from .scaling.trainer import (
    clip_grad_global_norm as clip_grad_global_norm,
)
from .scaling.trainer import (
    init_trainer as init_trainer,
)
from .scaling.trainer import scale_loss as scale_loss
from .scaling.trainer import (
    unscale as unscale,
)
from .tools.debugging.explain import Plan as Plan
from .tools.debugging.explain import explain as explain
from .tools.onnx import export_onnx as export_onnx
from .tools.tuning.benchmark import benchmark as benchmark
from .tools.tuning.tune import tune as tune
