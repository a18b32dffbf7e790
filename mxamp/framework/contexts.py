"""Contexts that say so where a program takes them for the value that `with` gives."""

from typing import Any

from ..errors import StateError

__all__ = ["OnlyWith"]


class OnlyWith:
    """A context manager that raises `StateError` where it is used as its value, a `kind`.

    `message` says what to write.
    """

    def __init__(self, context: Any, kind: type, message: str) -> None:
        self._context, self._kind, self._message = context, kind, message

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._context.__exit__(*error)

    def __call__(self, function: Any) -> Any:
        """Return `function` with a context of its own around each call."""
        return self._context(function)

    def __repr__(self) -> str:
        return f"<{self._message}>"

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._kind, name):
            raise StateError(self._message)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _raise(self, *_others: Any) -> Any:
        raise StateError(self._message)

    __len__ = __iter__ = __getitem__ = __add__ = __mul__ = __truediv__ = _raise
    __radd__ = __rmul__ = _raise
