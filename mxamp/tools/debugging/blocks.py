"""The Gluon blocks of a net, and the block that a graph node belongs to."""

from typing import Dict, List, Optional

from mxnet.gluon import Block

__all__ = ["BlockNames", "blocks_in"]


def blocks_in(net: Block) -> List[Block]:
    """Return a net and all blocks in it, once each."""
    found: Dict[int, Block] = {}
    net.apply(lambda block: found.setdefault(id(block), block))
    return list(found.values())


class BlockNames:
    """The names of a net's blocks, found by the prefix that Gluon gives to the nodes of a block."""

    def __init__(self, net: Optional[Block]) -> None:
        pairs = [(block.prefix, block.name) for block in blocks_in(net)] if net is not None else []
        self._by_prefix = sorted(pairs, key=lambda pair: -len(pair[0]))

    def of_node(self, name: str) -> str:
        """Return the name of the innermost block of a node; "" if no block is known."""
        return next((block for prefix, block in self._by_prefix if name.startswith(prefix)), "")
