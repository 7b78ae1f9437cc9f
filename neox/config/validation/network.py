"""Laws of the network: shapes that divide, kinds that exist."""

from __future__ import annotations

from collections.abc import Iterator

from neox.architecture import ACTIVATIONS, ATTENTION, NORMS, POSITIONS
from neox.config.architecture import FLASH, attention_kinds, rotated_dimensions
from neox.config.sections import NeoXConfig
from neox.config.stages import partition_problem
from neox.config.wording import place, said
from neox.errors import ConfigError

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")

# Keys that name a choice; gpt-neox's default is not always available.
_CHOICES = {"norm": NORMS, "pos_emb": POSITIONS, "activation": ACTIVATIONS}


def network_problems(config: NeoXConfig) -> Iterator[str]:
    """Yield violations of laws about the network."""
    model = config.model
    for key in REQUIRED:
        if getattr(model, key) is None:
            yield f"`{key}` is missing: every model needs it"
    for key, available in _CHOICES.items():
        if (value := getattr(model, key)) not in available:
            names = ", ".join(available)
            yield f"`{key}` is missing: gpt-neox's default {value} is not implemented; give one of {names}"
    yield from _heads(config)
    yield from _lengths(config)
    yield from _attention(config)


def _heads(config: NeoXConfig) -> Iterator[str]:
    model, mp = config.model, config.parallelism.model_parallel_size
    hidden, heads = model.hidden_size, model.num_attention_heads
    if heads is None:
        return
    if heads % mp:
        yield (
            f"{place(config, 'num_attention_heads')}`num_attention_heads: {heads}` cannot be divided over "
            f"{said(config, 'model_parallel_size', mp)}; use a degree among {_divisors(heads)}"
        )
    if hidden is None:
        return
    if hidden % heads:
        lower, upper = hidden // heads * heads, -(-hidden // heads) * heads
        nearest = " or ".join(str(n) for n in (lower, upper) if n)
        yield (
            f"{place(config, 'hidden_size')}`hidden_size: {hidden}` is not a multiple of "
            f"{said(config, 'num_attention_heads', heads)}; the nearest multiples are {nearest}"
        )
    elif model.pos_emb == "rotary":
        rotated = rotated_dimensions(model.pos_emb, model.rotary_pct, hidden, heads)
        if rotated < 2 or rotated % 2:
            yield (
                f"{place(config, 'rotary_pct')}`rotary_pct: {model.rotary_pct}` rotates {rotated} of the "
                f"{hidden // heads} dimensions of a head; it must be an even number of at least 2"
            )


def _lengths(config: NeoXConfig) -> Iterator[str]:
    model, pp = config.model, config.parallelism.pipe_parallel_size
    if model.seq_length and model.max_position_embeddings and model.seq_length > model.max_position_embeddings:
        yield (
            f"{place(config, 'seq_length')}`seq_length: {model.seq_length}` is longer than "
            f"{said(config, 'max_position_embeddings', model.max_position_embeddings)}; raise the second"
        )
    if model.num_layers is not None and pp > model.num_layers:
        yield (
            f"{place(config, 'pipe_parallel_size')}`pipe_parallel_size: {pp}` is more stages than "
            f"{said(config, 'num_layers', model.num_layers)}; use at most {model.num_layers}"
        )
    method = config.parallelism.pipe_partition_method
    problem = partition_problem(method)
    if problem is not None:
        yield f"{place(config, 'pipe_partition_method')}`pipe_partition_method: {method}` {problem}"
    asked = config.to_flat().get("is_pipe_parallel")
    if asked is not None and bool(asked) != (pp >= 2) and not (asked and pp == 1):
        yield (
            f"{place(config, 'is_pipe_parallel')}`is_pipe_parallel: {asked}` contradicts "
            f"{said(config, 'pipe_parallel_size', pp)}, from which it follows; remove it"
        )


def _attention(config: NeoXConfig) -> Iterator[str]:
    key, layers = "attention_config", config.model.num_layers
    if config.model.attention_config is None or layers is None:
        return
    try:
        kinds = attention_kinds(config.model.attention_config, layers)
    except ConfigError as error:
        yield from (f"{place(config, key)}{problem}" for problem in error.problems)
        return
    if unknown := sorted(set(kinds) - {*ATTENTION, FLASH}):
        known = " or ".join((*ATTENTION, FLASH))
        yield f"{place(config, key)}`{key}` asks for {', '.join(unknown)}: not implemented, use {known}"
    if len(kinds) != layers:
        yield (
            f"{place(config, key)}`{key}` describes {len(kinds)} layers, but "
            f'{said(config, "num_layers", layers)}; write [[["{kinds[0] if kinds else "global"}"], {layers}]]'
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
