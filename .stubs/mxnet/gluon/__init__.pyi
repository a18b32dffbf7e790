from typing import Any

from . import block as block
from . import nn as nn
from .block import Block as Block
from .block import HybridBlock as HybridBlock
from .block import SymbolBlock as SymbolBlock
from .parameter import Parameter as Parameter
from .parameter import ParameterDict as ParameterDict
from .trainer import Trainer as Trainer

def __getattr__(name: str) -> Any: ...
