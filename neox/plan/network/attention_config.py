"""Attention of each block, from the YAML's `attention_config`: its kind on paper, and its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from neox.architecture import BLOCKS, AttentionImpl, BlockKind
from neox.config.neox_config import NeoXConfig
from neox.errors import ConfigError

FLASH: Final = "flash"
"""The kind that names a kernel: on paper it is `global`, or `sliding_window` with a window."""
SLIDING_WINDOW: Final = "sliding_window"
_SHAPE: Final = '`attention_config` should be a list such as [[["flash"], "all"]] or [[["global", "flash"], 6]]'
_MOST_REPEATS: Final = 10_000


def attention_kinds(attention_config: Sequence[Any] | None, num_layers: int) -> tuple[str, ...]:
    """Return NeoX's attention kind of each block, with `attention_config` expanded as gpt-neox does.

    If it describes more blocks than there are, all of one kind, the rest is left out. So `num_layers` is the only key
    that has to change to shorten a published network.

    Raises:
        ConfigError: `attention_config` has another shape.
    """
    kinds = described_kinds(attention_config, num_layers)
    if len(set(kinds)) == 1:
        return kinds[:num_layers]
    return kinds


def described_kinds(attention_config: Sequence[Any] | None, num_layers: int) -> tuple[str, ...]:
    """Return the kinds that `attention_config` lists, which may be more or fewer than there are blocks.

    Raises:
        ConfigError: `attention_config` has another shape.
    """
    if attention_config is None:
        return ("global",) * num_layers
    if all(isinstance(kind, str) for kind in attention_config):
        return tuple(attention_config)
    kinds: list[str] = []
    for item in attention_config:
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            raise ConfigError(_SHAPE)
        pattern, times = item
        kinds += _repeated(pattern, times, num_layers)
    return tuple(kinds)


def _repeated(pattern: Any, times: Any, num_layers: int) -> list[str]:
    """Return the kinds of one item [[KIND, ...], TIMES] of `attention_config`. Raises ConfigError for other shapes."""
    if not isinstance(pattern, (list, tuple)) or not pattern or not all(isinstance(kind, str) for kind in pattern):
        raise ConfigError(_SHAPE)
    if times == "all":
        if num_layers % len(pattern):
            raise ConfigError(f"`attention_config` repeats {len(pattern)} kinds over {num_layers} layers: no multiple")
        times = num_layers // len(pattern)
    if not isinstance(times, int) or isinstance(times, bool) or times < 1:
        raise ConfigError(_SHAPE)
    return list(pattern) * min(times, _MOST_REPEATS)


def paper_kinds(attention_config: Sequence[Any] | None, num_layers: int, width: int | None) -> tuple[str, ...]:
    """Return the kind of each block on paper.

    As in gpt-neox a window applies to `flash` blocks, and to all blocks if there is no `attention_config`.

    Args:
        attention_config: The key's value.
        num_layers: Number of blocks.
        width: `sliding_window_width`; None or 0 for no window.
    """
    kinds: Sequence[str] = (FLASH,) * num_layers
    if attention_config is not None:
        kinds = attention_kinds(attention_config, num_layers)
    names = {FLASH: SLIDING_WINDOW if width else "global"}
    return tuple(names.get(kind, kind) for kind in kinds)


def attention_impls(config: NeoXConfig) -> tuple[AttentionImpl, ...]:
    """Return the kernel of each block's attention.

    It is flash, which takes masks, or a softmax, fused or not, which takes scores that were changed before.
    """
    model = config.model
    layers = model.num_layers or 0
    softmax: AttentionImpl = "fused" if config.value(_fusion_key(config)) else "eager"
    given = attention_kinds(model.attention_config, layers)
    on_paper = paper_kinds(model.attention_config, layers, model.sliding_window_width)
    computes_scores = bool(model.attention_softcap) or model.attention_sinks
    impls: list[AttentionImpl] = []
    for kind, paper in zip(given, on_paper, strict=True):
        attention = BLOCKS[paper].attention if paper in BLOCKS else None  # the rules report unknown kinds
        always_flash = attention is not None and not attention.takes_softmax
        if computes_scores and (always_flash or model.attention_sinks):
            impls.append("eager")  # flash attention changes no score, and fused softmax takes no mask
        elif kind == FLASH or always_flash:
            impls.append(FLASH)
        else:
            impls.append(softmax)
    return tuple(impls)


def asked_kinds(config: NeoXConfig) -> dict[str, BlockKind]:
    """Return the kinds of blocks that a configuration asks for; none if its `attention_config` is not understood."""
    layers = config.model.num_layers or 0
    try:
        kinds = paper_kinds(config.model.attention_config, layers, config.model.sliding_window_width)
    except ConfigError:  # the rules of blocks report it
        return {}
    return {kind: BLOCKS[kind] for kind in kinds if kind in BLOCKS}


def only_recurrent(config: NeoXConfig) -> bool:
    """Return whether all blocks are recurrent, so that no key of attention has an effect."""
    kinds = asked_kinds(config)
    return bool(kinds) and all(kind.keeps == "state" for kind in kinds.values())


def fused_softmax_key(config: NeoXConfig) -> str | None:
    """Return the key that asks for the fused softmax, if any block computes its softmax with it; else None.

    As in gpt-neox, `flash` goes first: in such blocks the fused kernel is not built, whatever the key says.
    """
    layers = config.model.num_layers or 0
    try:
        kinds = attention_kinds(config.model.attention_config, layers)
    except ConfigError:  # the rules of attention report it
        return None
    for kind, impl in zip(kinds, attention_impls(config), strict=True):
        has_attention = kind not in BLOCKS or BLOCKS[kind].attention is not None
        if impl == "fused" and has_attention:
            return _fusion_key(config)
    return None


def _fusion_key(config: NeoXConfig) -> str:
    """Return the key of the fused softmax of networks with this objective."""
    if config.model.objective == "masked_lm":
        return "scaled_masked_softmax_fusion"
    return "scaled_upper_triang_masked_softmax_fusion"
