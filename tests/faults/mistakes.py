"""Mistakes of ours that were logged while a test ran: everything at the level ERROR, and all that asyncio reports."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Mistakes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


@contextmanager
def logged_mistakes() -> Iterator[list[str]]:
    """A list that grows with each; the tracebacks are in it. What is less than a mistake isn't logged meanwhile: pytest
    keeps it all, which was 80 MB of warnings in a hundred thousand messages."""
    mistakes = _Mistakes()
    loggers = [logging.getLogger(name) for name in ("swarmllm", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(mistakes)
        logger.setLevel(logging.ERROR)
    try:
        yield mistakes.messages
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(mistakes)
            logger.setLevel(level)
