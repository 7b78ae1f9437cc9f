"""Rules of the kinds of blocks: what `attention_config` may say, and what the rows of the kinds do not allow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from neox.architecture import (
    ACTIVATIONS,
    BLOCKS,
    POSITIONS,
    BlockKind,
    settings_of,
    sparsity_of,
    sparsity_problem,
)
from neox.config.neox_config import NeoXConfig
from neox.errors import ConfigError
from neox.plan.network.attention_config import (
    FLASH,
    SLIDING_WINDOW,
    asked_kinds,
    attention_impls,
    attention_kinds,
    fused_softmax_key,
)
from neox.problems import Problem

_ATTENTION = "attention_config"

_NOTHING: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "norm_placement": ("input",),
        "qk_norm": ("none",),
        "residual_multiplier": (1.0,),
        "pos_emb": tuple(name for name, positions in POSITIONS.items() if not positions.biases_scores),
    }
)
"""Key -> values that ask for nothing of a block; of other keys, all that are false."""
_OF_ATTENTION = (
    "pos_emb",
    "attention_dropout",
    "attention_softcap",
    "attention_sinks",
    "attention_output_gate",
    "attention_multiplier",
    "apply_query_key_layer_scaling",
    "num_kv_heads",
    "qk_norm",
    "use_qk_layernorm",
)
"""Keys that only blocks with attention use."""
_OF_SUBLAYERS = (
    "norm_placement",
    "gpt_j_residual",
    "gpt_j_tied",
    "hidden_dropout",
    "mlp_width",
    "intermediate_size",
    "expansion_factor",
    "mlp_multiple_of",
)
"""Keys that only blocks of two sublayers use. (The dropout of the embedding alone is not what `hidden_dropout` asks
for.)"""


def block_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about kinds of blocks that are broken."""
    yield from _described(config)
    kinds = asked_kinds(config)
    yield from _refused_by_rows(config, kinds)
    yield from _fixed_lengths(config, kinds)
    yield from _without_attention(config, kinds)
    yield from _without_sublayers(config, kinds)
    yield from _fused_softmax(config)
    yield from _backend(config, kinds)


def listed(names: Iterable[str]) -> str:
    """Return names of kinds for a message; empty if there are none."""
    return " and ".join(sorted(names))


def _described(config: NeoXConfig) -> Iterator[Problem]:
    """Yield what is wrong with `attention_config`, and with the keys of single kinds."""
    given = config.model.attention_config
    layers = config.model.num_layers
    if given is None or layers is None:
        return
    try:
        kinds = attention_kinds(given, layers)
    except ConfigError as error:
        for problem in error.problems:
            yield config.problem_about(problem.message, _ATTENTION, "num_layers")
        return
    available = (*BLOCKS, FLASH)
    if unknown := sorted(set(kinds) - set(available)):
        message = f"`{_ATTENTION}` asks for {', '.join(unknown)}: not implemented, use {' or '.join(available)}"
        yield config.problem_about(message, _ATTENTION)
    if len(kinds) != layers:
        first = kinds[0] if kinds else "global"
        depth = config.describe_setting("num_layers")
        message = f'`{_ATTENTION}` describes {len(kinds)} layers, but {depth}; write [[["{first}"], {layers}]]'
        yield config.problem_about(message, _ATTENTION, "num_layers")
    yield from _windows(config, set(kinds))
    if "latent" in kinds:
        yield from _latents(config)
    yield from _sparsity(config, set(kinds))


def _latents(config: NeoXConfig) -> Iterator[Problem]:
    """Yield missing and unsupported settings of latent attention that its row does not refuse by their keys."""
    model = config.model
    if model.kv_lora_rank is None:
        message = f"`{_ATTENTION}` has kind latent, which needs kv_lora_rank"
        yield config.problem_about(message, _ATTENTION, "kv_lora_rank")
    if model.pos_emb != "rotary":
        yield config.problem("pos_emb", "does not work with attention kind latent; use rotary", _ATTENTION)
    has_biases = model.use_bias_in_attn_linear if model.use_bias_in_qkv is None else model.use_bias_in_qkv
    if has_biases:
        rule = "does not work with attention kind latent, which has no such biases; set use_bias_in_qkv: false"
        yield config.problem("use_bias_in_attn_linear", rule, "use_bias_in_qkv", _ATTENTION)
    if model.num_kv_heads and model.num_kv_heads != model.num_attention_heads:
        yield config.problem("num_kv_heads", "does not work with attention kind latent; remove it", _ATTENTION)


def _windows(config: NeoXConfig, kinds: set[str]) -> Iterator[Problem]:
    key = "sliding_window_width"
    width = config.model.sliding_window_width
    if width is None and SLIDING_WINDOW in kinds:
        yield config.problem_about(f"`{_ATTENTION}` asks for {SLIDING_WINDOW}: give {key}", _ATTENTION, key)
    if width is not None and not {FLASH, SLIDING_WINDOW} & kinds:
        yield config.problem(key, f"applies to no block: none is {FLASH} or {SLIDING_WINDOW}", _ATTENTION)
    context = max(config.model.seq_length or 0, config.model.max_position_embeddings or 0)
    if width is not None and 0 < context < width:
        rule = (
            f"has no effect: no token has more than {context} tokens before it; remove it, use a smaller one, or set "
            "max_position_embeddings if the network is meant for longer contexts"
        )
        yield config.problem(key, rule, "seq_length", "max_position_embeddings")


def _sparsity(config: NeoXConfig, kinds: set[str]) -> Iterator[Problem]:
    given = config.model.sparsity_config
    sparsity = sparsity_of(kinds, given.model_dump() if given else {})
    for kind in sorted({key.partition(".")[0] for key, _ in sparsity}):
        settings = settings_of(kind, sparsity)
        if problem := sparsity_problem(kind, settings):
            message = f"`sparsity_config` for {kind}: {problem}"
            yield config.problem_about(message, "sparsity_config", _ATTENTION)
        length = config.model.seq_length
        if length and length % settings["block"]:
            rule = f"is not a multiple of sparsity_config.block, {settings['block']}"
            yield config.problem("seq_length", rule, "sparsity_config.block", _ATTENTION)


def _asks(config: NeoXConfig, key: str) -> bool:
    """Return whether a key was given, and asks for something."""
    value = config.value(key)
    if not config.given(key) or not getattr(value, "enabled", True):
        return False
    return bool(value) and value not in _NOTHING.get(key, ())


def _refused_by_rows(config: NeoXConfig, kinds: Mapping[str, BlockKind]) -> Iterator[Problem]:
    """Yield the keys that a kind of block does not work with (`BlockKind.refused`)."""
    for key in dict.fromkeys(key for kind in kinds.values() for key in kind.refused):
        names = listed(name for name, kind in kinds.items() if key in kind.refused)
        if _asks(config, key):
            yield config.problem(key, f"does not work with attention kind {names}; remove it", _ATTENTION)
    names = listed(name for name, kind in kinds.items() if not kind.gated_activations)
    if names and ACTIVATIONS[config.model.activation].width_factor != 1:
        rule = f"gates, which {names} do themselves; use gelu or another plain one"
        yield config.problem("activation", rule, _ATTENTION)


def _fixed_lengths(config: NeoXConfig, kinds: Mapping[str, BlockKind]) -> Iterator[Problem]:
    """Yield longest lengths that differ from that of training, over which parameters of blocks go."""
    names = listed(name for name, kind in kinds.items() if kind.has_fixed_length)
    model = config.model
    if names and model.max_position_embeddings not in (None, model.seq_length):
        length = config.describe_setting("seq_length")
        rule = f"must be {length}, over which {names} gate"
        yield config.problem("max_position_embeddings", rule, "seq_length", _ATTENTION)


def _without_attention(config: NeoXConfig, kinds: Mapping[str, BlockKind]) -> Iterator[Problem]:
    """Yield what needs attention that some blocks, or all, do not have."""
    names = listed(name for name, kind in kinds.items() if kind.attention is None)
    if not names:
        return
    training = config.training
    if training.checkpoint_activations and training.normalized_granularity != "full":
        rule = f"needs attention, which blocks {names} lack; use full"
        yield config.problem("recompute_granularity", rule, _ATTENTION)
    if all(kind.attention is None for kind in kinds.values()):
        yield from _ignored(config, _OF_ATTENTION, kinds)


def _without_sublayers(config: NeoXConfig, kinds: Mapping[str, BlockKind]) -> Iterator[Problem]:
    """Yield what needs an MLP, or sums of two sublayers, that some blocks, or all, do not have."""
    names = listed(name for name, kind in kinds.items() if not kind.two_sublayers)
    if not names:
        return
    if config.experts.moe_num_experts > 1:
        rule = f"does not work with attention kind {names}, whose blocks have no MLP"
        yield config.problem("moe_num_experts", rule, _ATTENTION)
    if config.training.mlp_tile_size is not None:
        rule = f"does not work with {names}, whose blocks have no MLP; remove one of them"
        yield config.problem("mlp_tile_size", rule, _ATTENTION)
    if not any(kind.two_sublayers for kind in kinds.values()):
        yield from _ignored(config, _OF_SUBLAYERS, kinds)


def _ignored(config: NeoXConfig, keys: tuple[str, ...], kinds: Mapping[str, BlockKind]) -> Iterator[Problem]:
    """Yield the given keys that no block of the network would use."""
    names = listed(kinds)
    used = {key for kind in kinds.values() for key in kind.uses}
    for key in keys:
        if key not in used and _asks(config, key):
            rule = f"has no effect in blocks {names}, and all blocks are of this kind; remove it"
            yield config.problem(key, rule, _ATTENTION)


def _fused_softmax(config: NeoXConfig) -> Iterator[Problem]:
    """Yield what the kernel of the fused softmax cannot do, if any block has it."""
    fused = fused_softmax_key(config)
    if fused is None:
        return
    refused = {
        "reset_attention_mask": (config.data.reset_attention_mask, "its kernel masks later tokens only"),
        "train_impl": (config.preferences.on_preferences, "its kernel does not keep the answers in a row apart"),
    }
    for key, (is_on, reason) in refused.items():
        if is_on:
            rule = f"does not work with {config.describe_setting(fused)}: {reason}; remove that"
            rule += ', or use attention_config: [[["flash"], "all"]]'
            yield config.problem(key, rule, fused, _ATTENTION)


def _backend(config: NeoXConfig, kinds: Mapping[str, BlockKind]) -> Iterator[Problem]:
    """Yield what the kernel of attention that the configuration names cannot do."""
    key = "attention_backend"
    backend = config.training.attention_backend
    if backend == "auto" or not kinds:
        return
    if FLASH not in attention_impls(config):
        rule = (
            'has no effect: no block has attention kind flash; use attention_config: [[["flash"], "all"]], or remove it'
        )
        yield config.problem(key, rule, _ATTENTION)
        return
    # key of the other setting -> why the kernel does not go with it
    refused: dict[str, str] = {}
    if backend in ("flash", "flex") and POSITIONS[config.model.pos_emb].biases_scores:
        refused["pos_emb"] = "adds to scores, which that kernel computes"
    if backend in ("flash", "flex") and config.model.objective != "causal_lm":
        refused["objective"] = "masks padding, and that kernel takes no mask"
    if backend == "flex" and config.training.attention_dropout:
        refused["attention_dropout"] = "drops weights, which that kernel does not"
    if backend == "flash":
        if any(kind.attention is not None and kind.attention.sees != "all" for kind in kinds.values()):
            refused[_ATTENTION] = "hides earlier tokens, and that kernel takes no mask"
        if "latent" in kinds:
            refused[_ATTENTION] = "has values of another width than keys, which that kernel does not take"
        if config.data.reset_attention_mask:
            refused["reset_attention_mask"] = "hides other documents, and that kernel takes no mask"
        if config.preferences.on_preferences:
            refused["train_impl"] = "hides other answers, and that kernel takes no mask"
        if config.parallelism.context_parallel_size > 1 and config.parallelism.context_parallel_kind == "all_gather":
            refused["context_parallel_kind"] = "hides later tokens of other ranks, and that kernel takes no mask"
    for other, why in refused.items():
        setting = config.describe_setting(other)
        yield config.problem(key, f"does not work with {setting}, which {why}; use auto or memory_efficient", other)
