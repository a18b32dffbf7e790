"""The Gluon blocks of a net, and the block that a graph node belongs to."""

from __future__ import annotations

from mxnet.gluon import Block


def blocks_in(net: Block) -> list[Block]:
    """Return a net and all blocks in it, once each."""
    found: dict[int, Block] = {}
    net.apply(lambda block: found.setdefault(id(block), block))
    return list(found.values())


class BlockNames:
    """The names of a net's blocks, found by the prefix that Gluon gives to the nodes of a block."""

    def __init__(self, net: Block | None) -> None:
        pairs = [(block.prefix, block.name) for block in blocks_in(net)] if net is not None else []
        self._by_prefix = sorted(pairs, key=lambda pair: -len(pair[0]))

    def of_node(self, name: str) -> str:
        """Return the name of the innermost block of a node; "" if no block is known."""
        return next((block for prefix, block in self._by_prefix if name.startswith(prefix)), "")
