"""Log settings of the test process, which programs that run inside of it change."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored_log_settings() -> Iterator[None]:
    """Restore the handlers, level and propagation of `neox`'s logger, so that later tests capture what they expect."""
    logger = logging.getLogger("neox")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    try:
        yield
    finally:
        logger.handlers[:] = handlers
        logger.propagate = propagate
        logger.setLevel(level)  # not by assignment: loggers below remember what is enabled until this is called
