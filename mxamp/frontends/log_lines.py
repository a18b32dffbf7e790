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
    if _level_chosen() or _handler in logger.handlers:
        return
    logger.setLevel(_INFO)
    if not _other_handlers():
        logger.addHandler(_handler)
    logger.addFilter(_give_way)


def _other_handlers() -> bool:
    return any(h is not _handler for h in (*logger.handlers, *logging.getLogger().handlers))


def _level_chosen() -> bool:
    """Tell whether the program has said which lines it wants.

    MXNet and many scripts call `logging.info` with nothing set up: logging then sets itself up as
    `basicConfig()` does, for warnings alone. Nobody has chosen that.
    """
    if (logger.level and logger.level is not _INFO) or set(logger.handlers) - {_handler}:
        return True
    root = logging.getLogger()
    formats = [getattr(handler.formatter, "_fmt", None) for handler in root.handlers]
    unchosen = root.level == logging.WARNING and formats in ([], [logging.BASIC_FORMAT])
    return not unchosen


def _give_way(record: logging.LogRecord) -> bool:
    """Leave log lines to the program's own handlers and levels; asked before each line."""
    if _other_handlers():
        logger.removeHandler(_handler)
    if not _level_chosen() or _handler in logger.handlers:
        # Until a handler of the program's takes over, which the first `logging.info` may add.
        return True
    # A new list: logging is going through the old one.
    logger.filters = [other for other in logger.filters if other is not _give_way]
    if logger.level is _INFO:
        logger.setLevel(logging.NOTSET)
    return logger.isEnabledFor(record.levelno)
