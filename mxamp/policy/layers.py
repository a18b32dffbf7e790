"""Layers as users name them: by patterns of names, or by the Gluon blocks themselves."""

from typing import Any, Iterable, List, Sequence, Tuple, Union

from mxnet.gluon import SymbolBlock
from mxnet.gluon.block import Block
from mxnet.gluon.nn import HybridSequential, Sequential

from ..errors import ArgumentError
from ..framework.wording import shown

__all__ = ["Layers", "exactly", "layer_patterns"]

#: Names of layers, with * and ?, and Gluon blocks; or one block.
Layers = Union[None, Block, Iterable[Union[str, Block]]]

NO_LAYERS = "{argument} must be a list of names or of Gluon blocks, not {given}"
NO_NAMES = (
    "{argument}: the operators of block {name} can't be told from others by their names, as its "
    "prefix {prefix!r} does not end in '_'. Give the block a prefix that does, or the names of its "
    "layers, which explain shows"
)


def exactly(name: str) -> str:
    """Return the pattern that only this name of a layer fits.

    >>> exactly("stage[0]_conv*")
    'stage[[]0]_conv[*]'
    """
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def layer_patterns(argument: str, given: Any) -> List[Sequence[str]]:
    """Return the patterns of each layer that an argument gives: one of a name, more of a block."""
    if isinstance(given, Block):
        given = [given]
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentError(NO_LAYERS.format(argument=argument, given=shown(given)))
    listed = list(given)
    if not all(isinstance(one, (str, Block)) for one in listed):
        raise ArgumentError(NO_LAYERS.format(argument=argument, given=shown(listed)))
    return [[one] if isinstance(one, str) else _patterns_of(argument, one) for one in listed]


def _patterns_of(argument: str, block: Block) -> Sequence[str]:
    """Return patterns that the names of a block's operators fit, those of its children included.

    Gluon names an operator after the block whose code calls it: its prefix comes first.
    """
    if isinstance(block, SymbolBlock):
        # The names are those of its symbol, whatever its own is.
        nodes = block._cached_graph[1].get_internals()
        names = dict.fromkeys(node.name for node in nodes)
        return [exactly(name) for name in names]
    inner = [_patterns_of(argument, child) for child in block._children.values()]
    patterns = [pattern for few in inner for pattern in few]
    if _calls_nothing_itself(block):
        return patterns
    prefix = block.prefix
    if not prefix.endswith("_"):
        raise ArgumentError(
            NO_NAMES.format(argument=argument, name=repr(block.name), prefix=prefix)
        )
    own = exactly(prefix)
    return [f"{own}*", *(one for one in patterns if not one.startswith(own))]


def _calls_nothing_itself(block: Block) -> bool:
    """Return whether a block only calls its children, one after the other."""
    forward: Tuple[Any, ...] = (Sequential.forward, HybridSequential.hybrid_forward)
    own = getattr(type(block), "hybrid_forward", None), type(block).forward
    return isinstance(block, (Sequential, HybridSequential)) and any(one in forward for one in own)
