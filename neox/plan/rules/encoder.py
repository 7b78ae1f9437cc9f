"""Rules of masked language modelling (`objective: masked_lm`), and of keys that belong to it alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from neox.architecture import ACTIVATIONS
from neox.config.neox_config import NeoXConfig
from neox.config.sections.data import SPLITS
from neox.errors import ConfigError
from neox.plan.attention_config import FLASH, attention_kinds
from neox.problems import Problem

_DENSE = {"global", FLASH}
_KEY = "objective"
_SHORTEST = 4  # tokens of a sample: [CLS], two of text and [SEP]; a second sentence has a [SEP] of its own
# What works with a causal network alone, by key: the values that mean off, and why.
_CAUSAL_ALONE = {
    "no_weight_tying": ((False,), "its head multiplies by the embedding's weight"),
    "sliding_window_width": ((None,), "windows see earlier tokens alone"),
    "use_mup": ((False,), "muP's factors of a masked language model are not known here"),
    "lora": ((None,), "adapters of such a network are not implemented"),
    "reset_attention_mask": ((False,), "its samples are pairs of sentences"),
    "eod_mask_loss": ((False,), "masked tokens alone are in its loss"),
    "scaled_upper_triang_masked_softmax_fusion": ((False,), "that kernel is causal; use scaled_masked_softmax_fusion"),
    "num_train_epochs": ((None,), "the samples of a pass are not known before they are made; give train_iters"),
    "pack_impl": (("packed",), "its samples are pairs of sentences"),
    **{f"{split}_label_data_paths": ((None,), "masked tokens alone are in its loss") for split in SPLITS},
    "eval_tasks": ((None, ()), "tasks score next tokens"),
    "checkpoint_validation_with_forward_pass": ((False,), "that check is for causal networks"),
}


def encoder_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about the objective that are broken."""
    model, objective = config.model, config.describe_setting(_KEY)
    if model.objective != "masked_lm":
        asked = {"num_tokentypes": model.num_tokentypes, "embed_layernorm": model.embed_layernorm}
        for key in [key for key, value in asked.items() if value] + ["norm_placement"] * (
            model.norm_placement == "post"
        ):
            yield config.problem(key, f"does not exist with {objective}; remove it, or set objective: masked_lm", _KEY)
        return
    for key, (off, why) in _CAUSAL_ALONE.items():
        if config.value(key) not in off:
            yield config.problem(key, f"does not work with {objective}: {why}; remove it", _KEY)
    for key, block in (
        ("soft_prompt_tuning", model.soft_prompt_tuning),
        ("curriculum_learning", config.schedule.curriculum_learning),  # cuts samples, and with them predictions
    ):
        if block is not None and block.enabled:
            yield config.problem_about(f"`{key}` does not work with {objective}; remove it", key, _KEY)
    if model.pos_emb in ("alibi", "rpe"):
        yield config.problem(
            "pos_emb", f"counts distances to earlier tokens alone, so not with {objective}; use learned", _KEY
        )
    if ACTIVATIONS[model.activation].width_factor != 1:
        rule = f"halves its input, which the head of {objective} does not; use gelu"
        yield config.problem("activation", rule, _KEY)
    with suppress(ConfigError):  # reported with the attention
        wrong = set(attention_kinds(model.attention_config, model.num_layers or 0)) - _DENSE
        if wrong:
            kinds = ", ".join(sorted(wrong))
            message = f"`attention_config` asks for {kinds}, which see earlier tokens alone; use global or flash"
            yield config.problem_about(message, "attention_config", _KEY)
    least = _SHORTEST + (1 if model.bert_binary_head else 0)
    if model.seq_length and model.seq_length < least:
        rule = f"is too short for the samples of {objective}; give {least} or more"
        yield config.problem("seq_length", rule, _KEY, "bert_binary_head")
    if model.seq_length and (model.max_preds_per_seq or 0) > model.seq_length:
        longest = config.describe_setting("seq_length")
        yield config.problem("max_preds_per_seq", f"is more than {longest}", "seq_length")
