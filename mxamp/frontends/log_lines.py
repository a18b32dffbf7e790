"""mxamp's log lines on standard error, for programs that have not set up logging."""

import logging

__all__ = ["show_log"]

logger = logging.getLogger("mxamp")


class _Level(int):
    """A level that can be told from the same one set by the program."""


_INFO = _Level(logging.INFO)
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("mxamp: %(message)s"))


def show_log() -> None:
    """Let log lines be seen, until the program sets up logging itself.

    From then on its own handlers and levels count, and each line comes once.
    """
    if not _set_up_by_program() and _handler not in logger.handlers:
        logger.addHandler(_handler)
        logger.addFilter(_give_way)
        logger.setLevel(_INFO)


def _set_up_by_program() -> bool:
    return any(h is not _handler for h in (*logger.handlers, *logging.getLogger().handlers))


def _give_way(record: logging.LogRecord) -> bool:
    """Take the handler off when a program has one of its own; logging asks before each line."""
    if not _set_up_by_program():
        return True
    logger.removeHandler(_handler)
    # A new list: logging is going through the old one.
    logger.filters = [other for other in logger.filters if other is not _give_way]
    if logger.level is _INFO:
        logger.setLevel(logging.NOTSET)
    return logger.isEnabledFor(record.levelno)
