"""Rules of `objective: masked_lm`: what a bidirectional network excludes, and what belongs to it alone."""

from __future__ import annotations

import pytest

from neox.errors import ConfigError
from tests.plans import ENCODERS, small_plan

NOT_BIDIRECTIONAL = [
    ({"no_weight_tying": True}, "no_weight_tying"),
    ({"pos_emb": "alibi"}, "pos_emb: alibi"),
    ({"attention_config": ["local", "global"]}, "local"),
    ({"attention_config": ["gmlp", "global"]}, "gmlp"),
    ({"attention_config": [[["flash"], "all"]], "sliding_window_width": 4}, "sliding_window_width: 4"),
    ({"activation": "swiglu"}, "activation: swiglu"),
    ({"use_mup": True, "mup_base_hidden_size": 16}, "use_mup"),
    ({"lora": {"r": 2}}, "lora"),
    ({"soft_prompt_tuning": {"enabled": True}}, "soft_prompt_tuning"),
    ({"reset_attention_mask": True}, "reset_attention_mask"),
    ({"eval_tasks": ["lambada_openai"]}, "eval_tasks"),
    ({"num_train_epochs": 2, "train_iters": None}, "num_train_epochs: 2"),
    ({"pack_impl": "unpacked"}, "pack_impl: unpacked"),
    ({"train_data_paths": ["a"], "train_label_data_paths": ["b"]}, "train_label_data_paths: ['b']"),
    (
        {
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": 8,
                "max_difficulty": 16,
                "schedule_type": "fixed_linear",
                "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
            }
        },
        "`curriculum_learning`",
    ),
    ({"scaled_upper_triang_masked_softmax_fusion": True}, "scaled_masked_softmax_fusion"),
    ({"max_preds_per_seq": 17}, "max_preds_per_seq: 17"),
    ({"seq_length": 4, "max_preds_per_seq": 2}, "seq_length: 4"),
    ({"gpt_j_residual": True}, "gpt_j_residual"),
]
NOT_CAUSAL = [
    ({"num_tokentypes": 2}, "num_tokentypes: 2"),
    ({"embed_layernorm": True}, "embed_layernorm: true"),
    ({"norm_placement": "post"}, "norm_placement: post"),
]


@pytest.mark.parametrize(("keys", "words"), NOT_BIDIRECTIONAL, ids=str)
def test_what_a_bidirectional_network_excludes_is_refused_by_name(keys, words):
    with pytest.raises(ConfigError) as error:
        small_plan(**{**ENCODERS["bert"], **keys})
    assert words in str(error.value)


@pytest.mark.parametrize(("keys", "words"), NOT_CAUSAL, ids=str)
def test_what_belongs_to_a_bidirectional_network_is_refused_with_a_causal_one(keys, words):
    with pytest.raises(ConfigError) as error:
        small_plan(**keys)
    assert words in str(error.value)
    assert "objective" in str(error.value)


def test_the_padding_mask_s_kernel_is_fused_on_request():
    keys = {**ENCODERS["bert"], "scaled_masked_softmax_fusion": True}
    assert small_plan(**keys).attention == ("fused", "fused")
    assert small_plan(**ENCODERS["bert"]).attention == ("eager", "eager")
