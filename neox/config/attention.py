"""Which attention each layer uses."""

from __future__ import annotations

from neox.config.plan import AttentionImpl
from neox.config.sections import NeoXConfig
from neox.errors import ConfigError

_SHAPE = '`attention_config` should be a list such as [[["flash"], "all"]] or [[["global", "flash"], 6]]'


def attention_kinds(config: NeoXConfig) -> tuple[str, ...]:
    """Return NeoX's kind of each layer (`global`, `flash`, ...), attention_config expanded as gpt-neox does.

    Raises ConfigError when it has another shape.
    """
    count, given = config.model.num_layers or 0, config.model.attention_config
    if given is None:
        return ("global",) * count
    if all(isinstance(kind, str) for kind in given):
        return tuple(given)
    kinds: list[str] = []
    for item in given:
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            raise ConfigError(_SHAPE)
        pattern, times = item
        if not isinstance(pattern, (list, tuple)) or not pattern or not all(isinstance(k, str) for k in pattern):
            raise ConfigError(_SHAPE)
        if times == "all":
            if count % len(pattern):
                raise ConfigError(f"`attention_config` repeats {len(pattern)} kinds over {count} layers: no multiple")
            times = count // len(pattern)
        if not isinstance(times, int) or isinstance(times, bool) or times < 1:
            raise ConfigError(_SHAPE)
        kinds += list(pattern) * min(times, 10_000)
    return tuple(kinds)


def attention_impls(config: NeoXConfig) -> tuple[AttentionImpl, ...]:
    """Return each layer's implementation: flash, or the masked softmax, fused or not."""
    plain: AttentionImpl = "fused" if config.model.scaled_upper_triang_masked_softmax_fusion else "eager"
    return tuple("flash" if kind == "flash" else plain for kind in attention_kinds(config))
