"""Where a worker starts: the process that looks for programs does not import MXNet."""

from typing import Any


def main(pipe: Any, planted: str) -> None:
    """Run the worker."""
    from .worker import serve

    serve(pipe, planted)
