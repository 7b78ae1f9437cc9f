"""Rules of `objective: masked_lm`: what a bidirectional network excludes, and what belongs to it alone."""

from __future__ import annotations

import pytest

from tests.plans import ENCODERS, SMALL, problem_keys, small_plan

CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 16,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
}
# The key that a problem points to, and the keys that cause it.
NOT_BIDIRECTIONAL = [
    ("no_weight_tying", {"no_weight_tying": True}),
    ("pos_emb", {"pos_emb": "alibi"}),
    ("attention_config", {"attention_config": ["local", "global"]}),
    ("attention_config", {"attention_config": ["gmlp", "global"]}),
    ("sliding_window_width", {"attention_config": [[["flash"], "all"]], "sliding_window_width": 4}),
    ("activation", {"activation": "swiglu"}),
    ("use_mup", {"use_mup": True, "mup_base_hidden_size": 16}),
    ("lora", {"lora": {"r": 2}}),
    ("soft_prompt_tuning.enabled", {"soft_prompt_tuning": {"enabled": True}}),
    ("reset_attention_mask", {"reset_attention_mask": True}),
    ("eval_tasks", {"eval_tasks": ["lambada_openai"]}),
    ("num_train_epochs", {"num_train_epochs": 2, "train_iters": None}),
    ("pack_impl", {"pack_impl": "unpacked"}),
    ("train_label_data_paths", {"train_data_paths": ["a"], "train_label_data_paths": ["b"]}),
    ("curriculum_learning.enabled", {"curriculum_learning": CURRICULUM}),
    ("scaled_upper_triang_masked_softmax_fusion", {"scaled_upper_triang_masked_softmax_fusion": True}),
    ("max_preds_per_seq", {"max_preds_per_seq": 17}),
    ("seq_length", {"seq_length": 4, "max_preds_per_seq": 2}),
    ("norm_placement", {"gpt_j_residual": True}),
]
NOT_CAUSAL = [
    ("num_tokentypes", {"num_tokentypes": 2}),
    ("norm_placement", {"norm_placement": "post"}),
]


@pytest.mark.parametrize(("key", "keys"), NOT_BIDIRECTIONAL, ids=str)
def test_what_a_bidirectional_network_excludes_is_refused_by_name(key, keys):
    assert key in {found[0] for found in problem_keys(**{**SMALL, **ENCODERS["bert"], **keys})}


@pytest.mark.parametrize(("key", "keys"), NOT_CAUSAL, ids=str)
def test_what_belongs_to_a_bidirectional_network_is_refused_with_a_causal_one(key, keys):
    assert problem_keys(**{**SMALL, **keys}) == [(key, "objective")]


def test_the_padding_mask_s_kernel_is_fused_on_request():
    keys = {**ENCODERS["bert"], "scaled_masked_softmax_fusion": True}
    assert small_plan(**keys).attention == ("fused", "fused")
    assert small_plan(**ENCODERS["bert"]).attention == ("eager", "eager")
