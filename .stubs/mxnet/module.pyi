from typing import Any

from .ndarray.ndarray import NDArray
from .optimizer import Optimizer
from .symbol import Symbol

class BaseModule:
    logger: Any
    _symbol: Symbol
    _params_dirty: bool
    params_initialized: bool
    optimizer_initialized: bool
    def bind(self, data_shapes: Any, label_shapes: Any = None, **kwargs: Any) -> None: ...
    def forward(self, data_batch: Any, is_train: bool | None = None) -> None: ...
    def backward(self, out_grads: Any = None) -> None: ...
    def get_params(self) -> tuple[dict[str, NDArray], dict[str, NDArray]]: ...
    def init_optimizer(self, *args: Any, **kwargs: Any) -> None: ...

class Module(BaseModule):
    _optimizer: Optimizer
    _kvstore: Any
    _update_on_kvstore: bool
    _exec_group: Any
    _state_names: list[str]
    _compression_params: Any
    def __init__(self, symbol: Symbol, *args: Any, **kwargs: Any) -> None: ...

class BucketingModule(BaseModule):
    _buckets: dict[Any, Module]
    def __init__(self, sym_gen: Any, default_bucket_key: Any = None, **kwargs: Any) -> None: ...
    @staticmethod
    def load_dict(sym_dict: dict[Any, Symbol], **kwargs: Any) -> BucketingModule: ...

def __getattr__(name: str) -> Any: ...
