"""Rules of context parallelism: numbers that divide, and networks whose tokens cannot be divided over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.network.attention_config import asked_kinds, fused_softmax_key
from neox.plan.rules.blocks import listed
from neox.plan.rules.network import nearest_multiples
from neox.plan.rules.parallelism import uneven_lengths
from neox.problems import Problem

_DEGREE = "context_parallel_size"
_TENSOR_RANKS = "model_parallel_size"


def context_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about context ranks that are broken; none for one rank."""
    if config.parallelism.context_parallel_size == 1:
        return
    yield from networks_without_context_ranks(config)
    yield from _lengths(config)
    yield from _heads(config)


def networks_without_context_ranks(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the reasons why the network or other settings do not support context parallelism."""
    model = config.model
    if model.objective != "causal_lm":
        objective = config.describe_setting("objective")
        yield config.problem(_DEGREE, f"does not work with {objective}; remove one of them", "objective")
    kinds = asked_kinds(config)
    for reason in dict.fromkeys(kind.context_ranks for kind in kinds.values() if kind.context_ranks):
        names = listed(name for name, kind in kinds.items() if kind.context_ranks == reason)
        rule = f"does not work with attention kind {names}, {reason}; remove one of them"
        yield config.problem(_DEGREE, rule, "attention_config")
    if model.soft_prompt_tuning is not None and model.soft_prompt_tuning.enabled:
        rule = "does not work with soft_prompt_tuning, whose vectors every rank holds; remove one of them"
        yield config.problem(_DEGREE, rule, "soft_prompt_tuning")
    if (fused := fused_softmax_key(config)) is not None:
        rule = "needs all tokens of a sample on one rank; remove it, or use attention kind flash in every block"
        yield config.problem(fused, rule, _DEGREE, "attention_config")


def _lengths(config: NeoXConfig) -> Iterator[Problem]:
    """Yield lengths that two parts for each context rank, and shares of tensor ranks, do not divide."""
    unit = 2 * config.parallelism.context_parallel_size
    keys: tuple[str, ...] = (_DEGREE,)
    if config.parallelism.sequence_parallel:
        unit *= config.parallelism.model_parallel_size
        keys = (_DEGREE, _TENSOR_RANKS, "sequence_parallel")
    ranks = config.describe_setting(_DEGREE)
    length = config.model.seq_length or 0
    if length % unit:
        rule = f"cannot be divided into {unit} equal parts ({ranks}, two for each rank); use "
        yield config.problem("seq_length", rule + nearest_multiples(length, unit), *keys)
    for uneven in uneven_lengths(config, unit)[:1]:
        rule = f"needs lengths that divide into {unit} equal parts; one is {uneven}"
        yield config.problem(_DEGREE, rule, "curriculum_learning", "data_stages")


def _heads(config: NeoXConfig) -> Iterator[Problem]:
    """Yield heads that context ranks cannot exchange for tokens."""
    if config.parallelism.context_parallel_kind != "ulysses":
        return
    model = config.model
    key = "num_attention_heads"
    heads = model.num_attention_heads or 0
    if model.num_kv_heads and not model.use_qk_layernorm:
        key = "num_kv_heads"
        heads = model.num_kv_heads
    degree = config.parallelism.context_parallel_size
    here = heads // config.parallelism.model_parallel_size
    if here % degree:
        rule = (
            f"gives each context rank some heads, and {heads} on {config.parallelism.model_parallel_size} tensor ranks "
            f"do not divide by {degree}; use context_parallel_kind: all_gather, or another degree"
        )
        yield config.problem("context_parallel_kind", rule, _DEGREE, key, _TENSOR_RANKS)
