"""Rules of multi-token prediction (`mtp_num_layers`) that depend on several keys."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.problems import Problem

_KEY = "mtp_num_layers"
_STAGES = "pipe_parallel_size"


def multi_token_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about multi-token prediction that are broken."""
    model = config.model
    if not model.mtp_num_layers:
        return
    if model.seq_length and model.seq_length <= model.mtp_num_layers:
        length = config.describe_setting("seq_length")
        yield config.problem(_KEY, f"predicts tokens behind the samples, with {length}; use less", "seq_length")
    if (model.hidden_size or 0) % config.parallelism.model_parallel_size:
        described = config.describe_setting("model_parallel_size")
        yield config.problem(_KEY, f"needs a hidden_size that is a multiple of {described}", "hidden_size")
    if config.parallelism.pipe_parallel_size < 2:
        return
    # Its stage, the last one, has a copy of the tokens' vectors, and nothing else of the embedding.
    described = config.describe_setting(_STAGES)
    if model.pos_emb == "learned":
        rule = f"does not work with {described} and pos_emb: learned, whose table is on the first stage; use rotary"
        yield config.problem(_KEY, rule, _STAGES, "pos_emb")
    if model.embed_layernorm:
        rule = f"does not work with {described} and embed_layernorm, which is on the first stage; use one stage"
        yield config.problem(_KEY, rule, _STAGES, "embed_layernorm")
