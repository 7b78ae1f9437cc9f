"""Block-sparse attention on paper: the patterns, and the settings of each with gpt-neox's defaults.

A pattern allows pairs of blocks of tokens; inside them attention stays causal. The names and settings are those of
DeepSpeed's sparse attention as gpt-neox uses it. Sparse Transformers (`sparse_fixed`): arXiv:1904.10509, BigBird:
arXiv:2007.14062, Longformer: arXiv:2004.05150.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from neox.architecture.architecture import Pairs, frozen, without_none

_BLOCKS = {"block": 16}
_HEADS = {**_BLOCKS, "different_layout_per_head": False}
_RANGES = {"global_block_indices": (0,), "global_block_end_indices": None}
_RANDOM = {"random_seed": 1234}

SPARSITY: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "local": {**_BLOCKS, "num_local_blocks": 4},
        "sparse_fixed": {**_HEADS, "num_local_blocks": 4, "num_global_blocks": 1, "num_different_global_patterns": 1},
        "sparse_variable": {**_HEADS, **_RANDOM, "num_random_blocks": 0, "local_window_blocks": (4,), **_RANGES},
        "bigbird": {
            **_HEADS,
            **_RANDOM,
            "num_random_blocks": 1,
            "num_sliding_window_blocks": 3,
            "num_global_blocks": 1,
        },
        "bslongformer": {**_BLOCKS, "num_sliding_window_blocks": 3, **_RANGES},
    }
)
"""Kind -> its settings with their defaults. `random_seed` is ours: gpt-neox draws from a shared generator."""


def sparsity_of(kinds: set[str], given: Mapping[str, Any]) -> Pairs:
    """Return pairs (`KIND.SETTING`, value) for the sparse kinds among a network's attention kinds.

    Args:
        kinds: Attention kinds of the blocks.
        given: `sparsity_config`; None stands for a default.
    """
    settings = without_none(given)
    if "num_sliding_window_blocks" in settings:
        settings.setdefault("local.num_local_blocks", settings["num_sliding_window_blocks"])  # `local` takes either
    pairs = []
    for kind in sorted(kinds & SPARSITY.keys()):
        for key, default in SPARSITY[kind].items():
            name = f"{kind}.{key}"
            value = settings.get(key, settings.get(name, default))
            pairs.append((name, frozen(value)))
    return tuple(pairs)


def settings_of(kind: str, sparsity: Pairs) -> dict[str, Any]:
    """Return the settings of one sparse kind."""
    return {key.removeprefix(f"{kind}."): value for key, value in sparsity if key.startswith(f"{kind}.")}


def sparsity_problem(kind: str, settings: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the settings of one kind, or None."""
    starts = settings.get("global_block_indices", ())
    ends = settings.get("global_block_end_indices")
    if ends is not None and not _are_ranges(starts, ends):
        return "`global_block_end_indices` needs one larger number for each of `global_block_indices`"
    if min(settings.get("local_window_blocks", ()), default=1) < 1 or min(starts, default=0) < 0:
        return "`local_window_blocks` must be above 0, and `global_block_indices` not below"
    if kind == "sparse_fixed":
        return _fixed_pattern_problem(settings)
    return None


def _are_ranges(starts: Sequence[int], ends: Sequence[int]) -> bool:
    if len(starts) != len(ends):
        return False
    return all(start < end for start, end in zip(starts, ends, strict=True))


def _fixed_pattern_problem(settings: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the settings of `sparse_fixed`, or None."""
    window = settings["num_local_blocks"]
    width = settings["num_global_blocks"]
    patterns = settings["num_different_global_patterns"]
    if window % width:
        return f"`num_local_blocks` {window} is not a multiple of `num_global_blocks` {width}"
    if patterns > window // width:
        return f"`num_different_global_patterns` {patterns} is more than num_local_blocks / num_global_blocks"
    if patterns > 1 and not settings["different_layout_per_head"]:
        return "`num_different_global_patterns` above 1 needs `different_layout_per_head`"
    return None
