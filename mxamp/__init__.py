"""Automatic mixed precision for Apache MXNet 1.9.1 and Gluon.

>>> import mxamp as amp
>>> amp.init("bfloat16")
>>> amp.is_enabled()
True
>>> amp.shutdown()

Switch it on         init, shutdown, autocast, is_enabled, current_policy
Scale losses         init_trainer, scale_loss, unscale, clip_grad_global_norm,
                     LossScaler, StaticLossScaler, NoScaler, GradScaler
Convert models       convert_hybrid_block, convert_model, convert_symbol,
                     convert_bucketing_module, convert_files, ConvertedFiles, export_onnx
See what happens     explain, Plan, draw, compare_models, OutputError, random_inputs, debugging
Choose precisions    Policy, half_function, float_function, promote_function, register_*, list_*
Measure them         tune, Evidence, Trial, LayerCost
Come from elsewhere  patch_contrib (mxnet.contrib.amp), initialize (Apex), decorate (Paddle)
Errors               AmpError, ArgumentError, UnknownNameError, StateError, InstallError,
                     WriteError

Importing it imports MXNet, and patches nothing; `init`, `autocast` and the front ends do. (A worker
that `mxamp launch` has started learns to end without the others, and to say what it waits for.)
Import mxamp before MXNet: it makes MXNet 1.9.1 importable on newer Python and NumPy.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any
from typing import List as _List
from typing import Optional as _Optional

from ._version import __version__
from .cli import starting as _starting
from .errors import AmpError, ArgumentError, InstallError, StateError, UnknownNameError, WriteError
from .framework.collector import collector_paused as _collector_paused

_problem: _Optional[InstallError] = None
_starting.guard()
# Imports make objects that stay: the collector would look through all of them in vain (0.1 s).
with _collector_paused():
    try:
        if _starting.without_mxnet():
            raise InstallError("this command of `mxamp` does not import MXNet")
        from .framework.compat import import_mxnet as _import_mxnet

        _import_mxnet()
    except InstallError as error:
        # The command is starting: it will say so in one line. Everybody else gets the error here.
        if not _starting.is_starting():
            raise
        _problem = error
    else:
        from .framework.worker_process import prepare_launched as _prepare_launched
        from .patches.autocast import autocast, init, shutdown
        from .policy.active import current_policy, is_enabled
        from .policy.evidence import Evidence, LayerCost, Trial
        from .policy.policy import Policy
        from .scaling.grad_scaler import GradScaler
        from .scaling.losses import scale_loss
        from .scaling.scaler import LossScaler, NoScaler, StaticLossScaler
        from .scaling.trainer import clip_grad_global_norm, init_trainer, unscale

        _prepare_launched()

if _TYPE_CHECKING:
    from . import debugging
    from .convert.bucketing import convert_bucketing_module
    from .convert.compare import OutputError, compare_models, random_inputs
    from .convert.files import ConvertedFiles, convert_files
    from .convert.models import convert_hybrid_block, convert_model, convert_symbol
    from .convert.to_onnx import export_onnx
    from .debugging.drawing import draw
    from .debugging.explain import explain
    from .debugging.plan import Plan
    from .frontends.contrib import patch_contrib
    from .frontends.custom_operators import register_custom_operator
    from .frontends.decorate import decorate
    from .frontends.functions import (
        float_function,
        half_function,
        promote_function,
        register_float_function,
        register_half_function,
        register_promote_function,
    )
    from .frontends.opt_levels import initialize
    from .frontends.stock_lists import (
        list_conditional_fp32_ops,
        list_fp32_ops,
        list_loss_output_functions,
        list_lp16_fp32_ops,
        list_lp16_ops,
        list_lp16_use_fp32_params,
        list_widest_type_cast,
    )
    from .tuning.tune import tune

#: What is loaded when it is first used, by module: a program that trains needs none of it, and it
#: is half of the package.
_LATER = {
    "convert.bucketing": "convert_bucketing_module",
    "convert.compare": "OutputError compare_models random_inputs",
    "convert.files": "ConvertedFiles convert_files",
    "convert.models": "convert_hybrid_block convert_model convert_symbol",
    "convert.to_onnx": "export_onnx",
    "debugging": "debugging",
    "debugging.drawing": "draw",
    "debugging.explain": "explain",
    "debugging.plan": "Plan",
    "frontends.contrib": "patch_contrib",
    "frontends.custom_operators": "register_custom_operator",
    "frontends.decorate": "decorate",
    "frontends.functions": "float_function half_function promote_function register_float_function "
    "register_half_function register_promote_function",
    "frontends.opt_levels": "initialize",
    "frontends.stock_lists": "list_conditional_fp32_ops list_fp32_ops list_loss_output_functions "
    "list_lp16_fp32_ops list_lp16_ops list_lp16_use_fp32_params list_widest_type_cast",
    "tuning.tune": "tune",
}
_modules = {name: module for module, names in _LATER.items() for name in names.split()}

__all__ = [
    "AmpError",
    "ArgumentError",
    "ConvertedFiles",
    "Evidence",
    "GradScaler",
    "InstallError",
    "LayerCost",
    "LossScaler",
    "NoScaler",
    "OutputError",
    "Plan",
    "Policy",
    "StateError",
    "StaticLossScaler",
    "Trial",
    "UnknownNameError",
    "WriteError",
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
    "debugging",
    "decorate",
    "draw",
    "explain",
    "export_onnx",
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
    "tune",
    "unscale",
]


def __dir__() -> _List[str]:
    return sorted(__all__)


if not _TYPE_CHECKING:

    def __getattr__(name: str) -> _Any:
        if _problem is not None and not name.startswith("__"):
            raise InstallError(str(_problem))
        if name not in _modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _import_module(f".{_modules[name]}", __name__)
        found = globals()[name] = module if name == "debugging" else vars(module)[name]
        return found
