"""Says what a starting server is doing, and how long it took. Called by whoever loads blocks."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def stage(doing: str) -> Iterator[None]:
    """Log a line when it begins, for whoever waits, and one when it has ended, with its time."""
    logger.info("%s …", doing)
    began_at = time.monotonic()
    yield
    logger.info("%s took %.1f s", doing, time.monotonic() - began_at)
