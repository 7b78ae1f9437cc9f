"""A plan as one line of base64, to travel to ranks."""

from __future__ import annotations

import base64
import binascii
import json

from neox.config.neox_config import NeoXConfig
from neox.config.plan import RunPlan
from neox.config.resolve import resolve
from neox.errors import ConfigError


def encode_payload(plan: RunPlan) -> str:
    """Return flat config, world size and vocabulary as base64; a rank resolves them again."""
    data = {
        "config": plan.config.to_flat(),
        "sources": plan.config.sources(),
        "world_size": plan.grid.world_size,
        "vocab_size": plan.vocab_size,
    }
    return base64.urlsafe_b64encode(json.dumps(data).encode()).decode()


def decode_payload(text: str) -> RunPlan:
    """Return the plan of `encode_payload`. Raises ConfigError when the text is none."""
    try:
        data = json.loads(base64.urlsafe_b64decode(text.encode()))
        config = NeoXConfig.from_flat(data["config"], data["sources"])
        return resolve(config, int(data["world_size"]), int(data["vocab_size"]))
    except (binascii.Error, UnicodeError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the payload of the launcher cannot be read: {error}") from None
