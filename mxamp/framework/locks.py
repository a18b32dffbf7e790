"""Locks in processes that fork."""

import os
from typing import Any

__all__ = ["hold_during_forks"]


def hold_during_forks(lock: Any) -> None:
    """Hold a lock during forks: a child would wait forever for one that another thread held."""
    if hasattr(os, "register_at_fork"):
        release = lock.release
        os.register_at_fork(before=lock.acquire, after_in_parent=release, after_in_child=release)
