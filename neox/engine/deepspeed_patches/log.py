"""Filters for DeepSpeed's log lines and warnings. Imported before `deepspeed`, which logs during its import."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

_DEEPSPEED = logging.getLogger("DeepSpeed")
_UNNEEDED = ("Setting accelerator to CPU", "**** You are using ZeRO with an untested optimizer")


def _is_needed(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_UNNEEDED)


_DEEPSPEED.addFilter(_is_needed)
# Newer names of collective operations that DeepSpeed does not use yet: thousands of lines that no user can act on.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
# DeepSpeed's barriers name no device; each rank has chosen its own before.
warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context", category=UserWarning)


def show_deepspeed_log(shown: bool) -> None:
    """Show or hide DeepSpeed's information lines (timers, profiles); there are more of them than of the run's own."""
    level = logging.INFO if shown else logging.WARNING
    _DEEPSPEED.setLevel(level)
    for handler in _DEEPSPEED.handlers:
        handler.setLevel(level)


@contextmanager
def hidden_stdout() -> Iterator[None]:
    """Discard what DeepSpeed prints past its logger (topologies, memory)."""
    with redirect_stdout(io.StringIO()):
        yield
