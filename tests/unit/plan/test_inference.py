"""A configuration that trains on many ranks, read by scripts that only run the model."""

from __future__ import annotations

import pytest

from neox.config import NeoXConfig, for_inference
from neox.errors import ConfigError
from neox.plan import resolve
from neox.plan.memory.inference import inference_bytes
from neox.problems import COMMAND_LINE, Source

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8, "pos_emb": "rotary"}
OF_96 = {**SIZES, "train_batch_size": 1536, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}


def test_another_number_of_ranks_than_trainings():
    config = NeoXConfig.from_flat({**OF_96, "global_num_gpus": 96}, {})
    with pytest.raises(ConfigError) as caught:
        resolve(config, 1, 100)
    assert caught.value.problems[0].keys[0] == "train_batch_size"
    for world in (1, 8):
        assert resolve(for_inference(config), world, 100).grid.dp_size == world


def test_a_batch_alone_is_enough_to_be_left_out():
    plan = resolve(for_inference(NeoXConfig.from_flat({**SIZES, "train_batch_size": 1536}, {})), 7, 100)
    assert plan.batch.train_micro_batch_size_per_gpu == 1


def test_a_files_count_of_ranks_is_trainings_and_the_command_lines_is_this_runs():
    flat = {**OF_96, "global_num_gpus": 96}
    for source, counted in ((Source.in_file("a.yml", 1), None), (COMMAND_LINE, 96)):
        config = NeoXConfig.from_flat(flat, {"global_num_gpus": source})
        assert for_inference(config).runner.global_num_gpus == counted


def test_aliases_of_what_is_left_out_go_too():
    keys = {**SIZES, "batch_size": 4, "gas": 8, "train_batch_size": 1536}
    plan = resolve(for_inference(NeoXConfig.from_flat(keys)), 3, 100)
    assert (plan.batch.train_micro_batch_size_per_gpu, plan.batch.gradient_accumulation_steps) == (4, 1)


def test_latent_attention_keeps_one_vector_of_each_token():
    keys = {**SIZES, "head_dim": 8, "rotary_pct": 0.5, "use_bias_in_qkv": False, "generation_batch_size": 1}
    latent = {**keys, "attention_config": ["latent", "latent"], "kv_lora_rank": 12, "v_head_dim": 5}
    cached = []
    for flat in (keys, latent):
        bytes_of = []
        for tokens in (100, 200):
            config = for_inference(NeoXConfig.from_flat({**flat, "maximum_tokens": tokens}))
            bytes_of.append(inference_bytes(resolve(config, 1, 100), 1, 1))
        cached.append((bytes_of[1] - bytes_of[0]) // 100)
    number = 4
    assert cached == [2 * number * 2 * 2 * 8, 2 * number * (12 + 4)]  # in two blocks
