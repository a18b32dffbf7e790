"""NVIDIA Apex's API: `initialize`, with its optimization levels O0 to O3.

| level | what it does |
|---|---|
| O0 | float32 throughout; nothing is patched; loss scale 1 |
| O1 | operators run by list (`init`), parameters stay float32, the loss scale is dynamic |
| O2 | parameters in float16, except norms and embeddings; float32 master weights, dynamic scale |
| O3 | all in float16 where MXNet has it; loss scale 1 |

With bfloat16, O2 and O3 leave parameters in float32: MXNet's optimizers know no bfloat16 ones.
"""

import copy
import functools
import logging
from typing import Any, Dict, List, Optional, Sequence, Union

from mxnet.gluon import Block, HybridBlock, Parameter, Trainer, nn
from mxnet.gluon.contrib.nn import SparseEmbedding
from mxnet.symbol import Symbol

from ..errors import ArgumentError, StateError, unknown
from ..framework.keywords import checked_call
from ..framework.machine import DTYPE_CODES, Device, Dtype, dtype_name
from ..framework.wording import shown
from ..graph.ir import Graph
from ..patches.autocast import turn_on
from ..policy.active import chose_float32, is_enabled
from ..policy.policy import PLAIN_FLOAT32, Policy, PolicyChoice, chosen_policy
from ..policy.targets import DEFAULT_TARGET
from ..scaling.float16_optimizers import check_float16_update
from ..scaling.scaler import LossScaler, NoScaler, StaticLossScaler
from ..scaling.trainer import active_state, attach_state, check_skippable

logger = logging.getLogger("mxamp")

#: The default loss scaler of each level.
_LEVELS = {"O0": NoScaler, "O1": LossScaler, "O2": LossScaler, "O3": StaticLossScaler}
_NORMS = (nn.BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm)

IN_FLOAT32 = "float32 is in force, and every opt_level is O0: leave out init() to choose a dtype"
STAY_FLOAT32 = "opt_level %s keeps float32 parameters: MXNet's optimizers know no bfloat16 ones"


@checked_call
def initialize(
    models: Union[Block, Sequence[Block]],
    trainers: Union[None, Trainer, Sequence[Trainer]] = None,
    opt_level: str = "O1",
    loss_scale: Union[None, float, str] = None,
    *,
    dtype: Dtype = DEFAULT_TARGET,
    ctx: Optional[Device] = None,
) -> Any:
    """Prepare nets and trainers for an optimization level, and return them.

    ::

        net, trainer = amp.initialize(net, trainer, opt_level="O2")
        with autograd.record():
            loss = loss_function(net(data), label)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(batch_size)

    Parameters
    ----------
    models : Block or list of Block
        Initialized nets. O2 and O3 cast the nets in place. Parameter files and exports of the nets
        contain float32 at every level.
    trainers : Trainer or list of Trainer, optional
        Trainers that have not stepped yet.
    opt_level : str
        "O0": everything is in float32. "O1": mxamp's list chooses the precision of each operator,
        parameters stay in float32, and the loss scale is dynamic. "O2": parameters are in float16,
        except in norms and embeddings, with float32 master weights and a dynamic loss scale. "O3":
        everything for which MXNet has float16 kernels is in float16, and the loss scale is 1.
    loss_scale : float or "dynamic", optional
        Replaces the level's loss scale.
    dtype : str, default "float16"
        "float16", "bfloat16" or "auto", the fast dtype of this machine. In an automatic run, the
        default is the dtype of the run. In bfloat16, O2 and O3 cast no parameters, and mxamp's list
        chooses the precision of O3's operators too. If "auto" chooses float32, or `init` has
        chosen it and you pass no dtype, every level is O0, with updates as in plain MXNet.
    ctx : Context, optional
        As in `init`.

    Raises
    ------
    ArgumentError
        The level, the dtype or the loss scale is unknown, or the level is O3 and the optimizer
        can't update float16 weights.
    StateError
        Mixed precision is on already, or `init` has chosen float32 and you pass a 16-bit dtype; a
        trainer has loss scaling already or has stepped; or a net has float16 parameters.
    """
    if opt_level not in _LEVELS:
        raise unknown("opt_level", opt_level, _LEVELS, "Levels begin with the letter O, not zero")
    nets, optimizers = _as_list("models", models, Block), _as_list("trainers", trainers, Trainer)
    policy = chosen_policy(dtype, ctx=ctx)
    if chose_float32() and (dtype is DEFAULT_TARGET or not policy.lowers):
        logger.warning(IN_FLOAT32)
        policy, opt_level = PLAIN_FLOAT32, "O0"
    in_float16 = policy.target_dtype == "float16"
    scaler = _scaler(loss_scale, opt_level if in_float16 else "O0")
    _check_fresh(nets, optimizers)
    for trainer in optimizers:
        check_skippable(trainer, scaler)
    if opt_level != "O0":
        turn_on(_o3_policy(policy, optimizers) if opt_level == "O3" else policy, dtype)
    if not policy.lowers:
        opt_level, scaler = "O0", NoScaler()
    if opt_level in ("O2", "O3") and not in_float16:
        logger.info(STAY_FLOAT32, opt_level)
    elif opt_level in ("O2", "O3"):
        for net in nets:
            _cast_to_float16(net, opt_level == "O2")
            _keep_files_in_float32(net)
    for trainer in optimizers:
        if in_float16 and opt_level == "O2":
            trainer._optimizer.multi_precision = True
        attach_state(trainer, copy.deepcopy(scaler), scaled_by="initialize")
    return models if trainers is None else (models, trainers)


def _scaler(loss_scale: Any, opt_level: str) -> LossScaler:
    """Return the loss scaler for `initialize(loss_scale=...)`; None means the level's default."""
    if loss_scale is None:
        return _LEVELS[opt_level]()  # type: ignore[no-any-return]
    return LossScaler() if loss_scale == "dynamic" else StaticLossScaler(loss_scale)


def _as_list(name: str, value: object, cls: type) -> List[Any]:
    """Return an argument (None, one `cls` or several) as a list; raise for other types."""
    listed = [] if value is None else [value] if isinstance(value, cls) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(x, cls) for x in listed):
        raise ArgumentError(f"{name} must be a {cls.__name__} or list of them, not {shown(value)}")
    return list(listed)


def _check_fresh(nets: Sequence[Block], trainers: Sequence[Trainer]) -> None:
    """Raise if mixed precision is on already, or if a net or trainer was prepared before."""
    if is_enabled():
        raise StateError(
            "initialize turns mixed precision on, and init() or another API has done so already: "
            "use one of the two, or call mxamp.shutdown() before"
        )
    for trainer in trainers:
        state = active_state(trainer)
        if state is not None:
            raise StateError(f"{state.scaled_by} scales this trainer's losses already")
        if trainer._kv_initialized:
            raise StateError("initialize comes before a trainer's first step")
    for net in nets:
        for name, param in net.collect_params().items():
            if dtype_name(param.dtype) == "float16":
                raise StateError(f"parameter {name!r} is float16 already: was it cast before?")


def _o3_policy(choice: PolicyChoice, trainers: Sequence[Trainer] = ()) -> PolicyChoice:
    """Return the policy for level O3: float16 for all operators that have a float16 kernel.

    A `choice` that is no float16 policy is unchanged. Raises if a trainer's optimizer can't update
    float16 weights.
    """
    if not isinstance(choice, Policy) or choice.target_dtype != "float16":
        return choice
    kept = [name for name in choice.operators("fp32") if choice.rule(name).no_kernel is not None]
    for trainer in trainers:
        check_float16_update(trainer, casts=True)
    return choice.override(fp32=kept, replace_lists=True)


def _cast_to_float16(net: Block, is_o2: bool) -> None:
    """Cast a net to float16 except BatchNorm; in O2, except all norms and embeddings.

    With a float16 weight, GPUs sum the gradient of a frequent token in float16, and have no sparse
    gradient: embeddings with one stay float32 in O3 too.
    """
    net.cast("float16")
    norms = _NORMS if is_o2 else nn.BatchNorm

    def restore_float32(block: Block) -> None:
        is_float = isinstance(block, norms)
        if isinstance(block, (nn.Embedding, SparseEmbedding)):
            is_float = is_o2 or block.weight._grad_stype != "default"
        for param in block._reg_params.values() if is_float else ():
            param.cast("float32")

    net.apply(restore_float32)


# ------------------------------------------------- files of nets with float16 parameters: float32


def _keep_files_in_float32(net: Block) -> None:
    """Make a float16 net write parameter files and exports in float32, and load such files."""
    # Partial objects, not closures: a deep copy of the net gets its own.
    net.save_parameters = functools.partial(_write_float32, net, "save_parameters")
    net.load_parameters = functools.partial(type(net).load_parameters, net, cast_dtype=True)
    if isinstance(net, HybridBlock):
        net.export = functools.partial(_write_float32, net, "export")


def _write_float32(net: Block, method: str, *args: object, **kwargs: object) -> object:
    """Call `save_parameters` or `export` of a net with its float16 parameters as float32."""
    params = net.collect_params().values()
    halves = {param.name: param for param in params if dtype_name(param.dtype) == "float16"}
    traced = vars(net)["_cached_graph"] if method == "export" else ()
    for param in halves.values():
        param._reduce = lambda param=param: type(param)._reduce(param).astype("float32")
    try:
        if traced:
            vars(net)["_cached_graph"] = traced[0], _with_float32_variables(traced[1], halves)
        return getattr(type(net), method)(net, *args, **kwargs)
    finally:
        if traced:
            vars(net)["_cached_graph"] = traced
        for param in halves.values():
            del param._reduce


def _with_float32_variables(symbol: Symbol, params: Dict[str, Parameter]) -> Symbol:
    """Return a copy of a symbol in which variables in `params` record float32 (`__dtype__`)."""
    graph = Graph.from_symbol(symbol)
    for node in graph.variables:
        if node.name in params and "__dtype__" in node.attrs:
            node.attrs = {**node.attrs, "__dtype__": str(DTYPE_CODES["float32"])}
    return graph.to_symbol(type(symbol))
