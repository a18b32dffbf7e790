"""MXNet's distributed kvstores."""

from typing import Any

__all__ = ["is_distributed"]


def is_distributed(kvstore: Any) -> bool:
    """Tell whether a kvstore, or one of this name, spans several processes."""
    return "dist" in str(getattr(kvstore, "type", kvstore))
