"""What was logged as a mistake of ours while a test ran: everything at the level ERROR, and what asyncio reports."""

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
    """A list that grows with each; the tracebacks are in it."""
    mistakes = _Mistakes()
    loggers = [logging.getLogger(name) for name in ("swarmllm", "asyncio")]
    for logger in loggers:
        logger.addHandler(mistakes)
    try:
        yield mistakes.messages
    finally:
        for logger in loggers:
            logger.removeHandler(mistakes)
