"""Rules of masked language modelling (`objective: masked_lm`) that depend on several keys."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.network.attention_config import asked_kinds
from neox.plan.rules.blocks import listed
from neox.problems import Problem

_KEY = "objective"
_SHORTEST = 4  # tokens of a sample: [CLS], two of text and [SEP]; a second sentence has a [SEP] of its own


def encoder_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about masked language modelling that are broken."""
    if config.model.objective == "masked_lm":
        if causal := listed(name for name, kind in asked_kinds(config).items() if not kind.bidirectional):
            message = f"`attention_config` asks for {causal}, which see earlier tokens only; use global or flash"
            yield config.problem_about(message, "attention_config", _KEY)
        yield from _lengths(config)
    elif config.model.num_tokentypes:  # Megatron-LM's 0 means that there are none
        objective = config.describe_setting(_KEY)
        yield config.problem("num_tokentypes", f"does not exist with {objective}; remove it", _KEY)


def _lengths(config: NeoXConfig) -> Iterator[Problem]:
    model = config.model
    if not model.seq_length:
        return
    least = _SHORTEST
    if model.bert_binary_head:
        least += 1
    if model.seq_length < least:
        objective = config.describe_setting(_KEY)
        rule = f"is too short for the samples of {objective}; give {least} or more"
        yield config.problem("seq_length", rule, _KEY, "bert_binary_head")
    if (model.max_preds_per_seq or 0) > model.seq_length:
        longest = config.describe_setting("seq_length")
        yield config.problem("max_preds_per_seq", f"is more than {longest}", "seq_length")
