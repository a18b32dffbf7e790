from typing import Any

from .context import Context
from .ndarray.ndarray import NDArray
from .symbol import Symbol

class Executor:
    handle: Any
    grad_arrays: list[NDArray | None]
    _symbol: Symbol
    _ctx: Context
    _grad_req: Any
    _group2ctx: Any
    _monitor_callback: Any
    _monitor_all: bool | None
    def get_optimized_symbol(self) -> Symbol: ...
    @property
    def arg_dict(self) -> dict[str, NDArray]: ...
    @property
    def aux_dict(self) -> dict[str, NDArray]: ...
    def forward(self, is_train: bool = False, **kwargs: Any) -> list[NDArray]: ...
    def backward(self, out_grads: Any = None, is_train: bool = True) -> None: ...
    def reshape(
        self, partial_shaping: bool = False, allow_up_sizing: bool = False, **kwargs: Any
    ) -> Executor: ...
    def set_monitor_callback(self, callback: Any, monitor_all: bool = False) -> None: ...
