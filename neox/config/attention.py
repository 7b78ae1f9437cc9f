"""Which attention each layer uses."""

from __future__ import annotations

from neox.config.plan import AttentionImpl
from neox.config.sections import NeoXConfig


def attention_kinds(config: NeoXConfig) -> tuple[str, ...]:
    """Return NeoX's kind of each layer (`global`, `flash`, ...), attention_config expanded as gpt-neox does."""
    count, given = config.model.num_layers or 0, config.model.attention_config
    if given is None:
        return ("global",) * count
    if all(isinstance(kind, str) for kind in given):
        return tuple(given)
    kinds: list[str] = []
    for pattern, times in given:
        kinds += pattern * (count // len(pattern)) if times == "all" else pattern * times
    return tuple(kinds)


def attention_impls(config: NeoXConfig) -> tuple[AttentionImpl, ...]:
    """Return each layer's implementation: flash, or the masked softmax, fused or not."""
    plain: AttentionImpl = "fused" if config.model.scaled_upper_triang_masked_softmax_fusion else "eager"
    return tuple("flash" if kind == "flash" else plain for kind in attention_kinds(config))
