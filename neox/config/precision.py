"""One precision from three places that may name it."""

from __future__ import annotations

from neox.config.plan import Precision
from neox.config.sections import NeoXConfig


def choose_precision(config: NeoXConfig, problems: list[str]) -> Precision | None:
    """Return the precision; a contradiction between `precision`, `fp16` and `bf16` goes to `problems`."""
    claims: dict[str, Precision] = {}
    named = config.model.precision
    if named is not None:
        claims["precision"] = "bf16" if named == "bfloat16" else named
    fp16 = config.deepspeed.fp16
    if fp16 is not None:
        enabled = fp16.enabled if fp16.enabled is not None else fp16.fp16
        if fp16.type in ("bfloat16", "bf16"):
            claims["fp16"] = "bf16"
        elif enabled or (enabled is None and fp16.type == "fp16"):
            claims["fp16"] = "fp16"
        elif enabled is False and claims.get("precision") == "fp16":
            claims["fp16"] = "fp32"
    if config.deepspeed.bf16 is not None and config.deepspeed.bf16.enabled:
        claims["bf16"] = "bf16"
    if len(set(claims.values())) > 1:
        claimed = ", ".join(f"`{key}` ({config.source(key)}) says {value}" for key, value in claims.items())
        last = list(claims)[-1]
        problems.append(f"{config.source_prefix(last)}two precisions: {claimed}; keep one")
        return None
    return next(iter(claims.values()), "fp32")
