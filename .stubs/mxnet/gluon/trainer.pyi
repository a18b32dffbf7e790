from typing import Any, Callable

from ..kvstore import KVStore
from ..optimizer import Optimizer
from .parameter import Parameter

class Trainer:
    _params: list[Parameter]
    _contexts: list[Any]
    _optimizer: Optimizer
    _contains_sparse_weight: bool
    _kvstore: KVStore | None
    _kv_initialized: bool
    _params_to_init: list[Parameter]
    _update_on_kvstore: bool | None
    _updaters: list[Any]
    _compression_params: Any
    _kvstore_params: dict[str, Any]
    save_states: Callable[..., None]
    load_states: Callable[..., None]
    _allreduce_grads: Callable[..., None]
    _amp_loss_scaler: Any
    _amp_original_scale: Any  # MXNet's own mixed precision sets these two
    def __init__(self, params: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None: ...
    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None: ...
    def allreduce_grads(self) -> None: ...
    def _init_kvstore(self) -> None: ...
    def _init_params(self) -> None: ...
