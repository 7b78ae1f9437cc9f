"""What DeepSpeed may say. To be imported before `deepspeed`: it holds for what is said during that import too."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

_DEEPSPEED = logging.getLogger("DeepSpeed")
_UNNEEDED = ("Setting accelerator to CPU",)


def _worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_UNNEEDED)


_DEEPSPEED.addFilter(_worth_saying)
# Newer names of collectives that DeepSpeed does not use yet: thousands of lines about nothing a user could do.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def let_deepspeed_speak(aloud: bool) -> None:
    """Show DeepSpeed's lines about itself (timers, profiles) if they were asked for; they drown the run's otherwise."""
    level = logging.INFO if aloud else logging.WARNING
    _DEEPSPEED.setLevel(level)
    for handler in _DEEPSPEED.handlers:
        handler.setLevel(level)


@contextmanager
def unprinted() -> Iterator[None]:
    """Keep what DeepSpeed prints past its logger (topologies, memory) off standard output."""
    with redirect_stdout(io.StringIO()):
        yield
