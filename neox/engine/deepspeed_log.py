"""What DeepSpeed may say. Importing this module before `deepspeed` takes effect on what it says while it is imported."""

from __future__ import annotations

import logging

_DEEPSPEED = logging.getLogger("DeepSpeed")
_UNNEEDED = ("Setting accelerator to CPU",)


def _worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_UNNEEDED)


_DEEPSPEED.addFilter(_worth_saying)
