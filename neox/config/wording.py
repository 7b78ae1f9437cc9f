"""How messages name a setting: its place first, then `key: value`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from neox.config.neox_config import NeoXConfig

WITHOUT_SAVED_OPTIMIZER = (
    "set `no_load_optim: true` (weights and iteration, a new optimizer) or `finetune: true` (weights, iteration 0)"
)
"""What a user can do about an optimizer's state that cannot be taken up."""


def place(config: NeoXConfig, key: str) -> str:
    """Return `file:line: ` of a key, for the start of a message; nothing where it was not given."""
    source = config.source(key)
    return "" if source in ("default", "given") else f"{source}: "


def said(config: NeoXConfig, key: str, value: Any) -> str:
    """Return `key: value (where)` for the middle of a message."""
    source = config.source(key)
    return f"`{key}: {show(value)}`" + ("" if source == "given" else f" ({source})")


def show(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, BaseModel):
        return str(value.model_dump(exclude_none=True))
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value)
