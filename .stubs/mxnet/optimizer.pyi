from typing import Any, Callable

from .ndarray.ndarray import NDArray

class Optimizer:
    opt_registry: dict[str, type[Optimizer]]
    rescale_grad: float
    clip_gradient: float | None
    multi_precision: bool
    _all_index_update_counts: dict[int, dict[Any, int]]
    update_multi_precision: Callable[..., Any]
    _amp_scaling: Any  # mxamp's
    def __init__(self, **kwargs: Any) -> None: ...
    def create_state(self, index: Any, weight: NDArray) -> Any: ...
    def create_state_multi_precision(self, index: Any, weight: NDArray) -> Any: ...
    def _update_count(self, index: Any) -> None: ...
    def _get_lr(self, index: Any) -> float: ...
    def _get_wd(self, index: Any) -> float: ...

class SGD(Optimizer):
    momentum: float

class NAG(Optimizer):
    momentum: float

class LARS(Optimizer):
    momentum: float

class LBSGD(Optimizer): ...
class AdaDelta(Optimizer): ...

class Adam(Optimizer):
    epsilon: float

def __getattr__(name: str) -> Any: ...
