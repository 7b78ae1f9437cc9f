"""Rules across keys: each violation is named with place, keys, values and a way out, and all are listed together."""

from __future__ import annotations

import re
from typing import Literal, get_args, get_origin

import pytest

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.plan import load_config, resolve
from neox.plan.rules import missing_for_training
from tests.plans import small_plan


def violations(flat, world=1, vocab=100) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(NeoXConfig.from_flat(flat), world, vocab)
    return caught.value.problems


def test_the_fixture_resolves(tiny):
    resolve(NeoXConfig.from_flat(tiny), 1, 100)


NVME = {"device": "nvme", "nvme_path": "/nvme"}
# (keys to change, words every one of which must be in one message)
VIOLATIONS = [
    ({"hidden_size": 66}, ("`hidden_size: 66`", "num_attention_heads: 4", "64 or 68")),
    (
        {"num_attention_heads": 2, "model_parallel_size": 4},
        ("num_attention_heads: 2", "model_parallel_size: 4", "1, 2"),
    ),
    (
        {"log_gradient_noise_scale": True, "zero_optimization": {"stage": 1}},
        ("log_gradient_noise_scale", "zero_optimization.stage: 1", "use stage 0"),
    ),
    (
        {"log_gradient_noise_scale": True, "pipe_parallel_size": 2, "bf16": {"enabled": True}},
        ("log_gradient_noise_scale", "pipe_parallel_size: 2", "fp16"),
    ),
    (
        {"log_gradient_noise_scale": True, "rampup_batch_size": [2, 2, 8], "train_batch_size": 4},
        ("log_gradient_noise_scale", "rampup_batch_size"),
    ),
    ({"log_style": "megatron"}, ("log_style", "fleetx")),
    ({"checkpoint_activations": True, "no_recompute_layers": [0, 4]}, ("no_recompute_layers", "has 4", "0 to 3")),
    (
        {"checkpoint_activations": True, "recompute_granularity": "selective", "checkpoint_num_layers": 2},
        ("checkpoint_num_layers: 2", "recompute_granularity: selective"),
    ),
    (
        {"checkpoint_activations": True, "recompute_granularity": "full_attn", "attention_config": ["gmlp"] * 4},
        ("recompute_granularity", "gmlp"),
    ),
    (
        {"checkpoint_activations": True, "recompute_granularity": "full_attn", "compile_layers": True},
        ("recompute_granularity: full_attn", "compile_layers: true"),
    ),
    ({"recompute_granularity": "half"}, ("recompute_granularity", "full_attn")),
    ({"num_train_epochs": 2}, ("`num_train_epochs: 2.0`", "train_iters: 10", "keep one")),
    ({"train_epochs": 2}, ("num_train_epochs", "train_iters: 10")),
    ({"num_layers": None}, ("`num_layers` is missing",)),
    ({"seq_length": 64, "max_position_embeddings": 32}, ("seq_length: 64", "max_position_embeddings: 32")),
    ({"pipe_parallel_size": 8}, ("pipe_parallel_size: 8", "num_layers: 4", "at most 4")),
    ({"is_pipe_parallel": True}, ("`is_pipe_parallel: ", "pipe_parallel_size: 0")),
    ({"pipe_partition_method": "best"}, ("pipe_partition_method: best", "uniform, parameters or type:REGEX")),
    ({"pipe_partition_method": "type:("}, ("no regular expression",)),
    ({"pipe_partition_method": "type:conv"}, ("matches none", "TransformerLayer")),
    ({"rotary_pct": 0.2}, ("rotary_pct: 0.2", "3 of the 16", "even")),
    ({"rotary_pct": 0.05}, ("rotary_pct: 0.05", "at least 2")),
    ({"norm": "batchnorm"}, ("norm", "batchnorm", "layernorm")),
    ({"pos_emb": "relative"}, ("pos_emb", "relative", "learned", "rotary")),
    ({"pos_emb": "learned", "opt_pos_emb_offset": 2}, ("opt_pos_emb_offset", "max_position_embeddings", "34")),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, ("rope_scaling", "dynamic", "linear")),
    ({"pos_emb": "sinusoidal", "hidden_size": 65, "num_attention_heads": 5}, ("hidden_size: 65", "sinusoidal")),
    ({"activation": "tanh"}, ("activation", "tanh", "gelu_tanh")),
    ({"num_kv_heads": 3}, ("num_kv_heads: 3", "num_attention_heads: 4")),
    ({"num_kv_heads": 2, "model_parallel_size": 4}, ("num_kv_heads: 2", "model_parallel_size: 4")),
    ({"intermediate_size": 64, "expansion_factor": 2.0}, ("intermediate_size: 64", "expansion_factor: 2.0")),
    ({"mlp_width": 64, "mlp_multiple_of": 8}, ("mlp_width: 64", "mlp_multiple_of: 8")),
    ({"mlp_width": 63, "model_parallel_size": 2}, ("width is 63", "model_parallel_size: 2")),
    ({"norm_placement": "output", "gpt_j_residual": True}, ("norm_placement: output", "gpt_j_residual: true")),
    ({"use_qk_layernorm": True, "qk_norm": "head"}, ("use_qk_layernorm: true", "qk_norm: head")),
    ({"use_qk_layernorm": True, "norm": "scalenorm"}, ("use_qk_layernorm: true", "norm: scalenorm")),
    ({"attention_config": ["sliding_window"] * 4}, ("sliding_window", "sliding_window_width")),
    ({"attention_config": ["global"] * 4, "sliding_window_width": 8}, ("sliding_window_width: 8", "no block")),
    ({"num_unique_layers": 2}, ("num_unique_layers: 2", "share")),
    ({"attention_config": [[["rwkv"], 4]]}, ("rwkv", "or flash")),
    ({"attention_config": [[["flash"], 3]]}, ("3 layers", "num_layers: 4", '[[["flash"], 4]]')),
    ({"attention_config": [[["flash", "global", "flash"], "all"]]}, ("3 kinds over 4 layers",)),
    ({"attention_config": [["flash", 4]]}, ("should be a list such as",)),
    ({"moe_num_experts": 8}, ("moe_num_experts: 8", "mixture of experts")),
    ({"use_mup": True}, ("use_mup", "mup_base_hidden_size")),
    ({"precision": "fp16", "bf16": {"enabled": True}}, ("two precisions", "`precision`", "`bf16`", "keep one")),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ("two precisions", "`fp16`", "`bf16`")),
    ({"precision": "fp32", "fp16": {"enabled": True}}, ("two precisions",)),
    ({"precision": "fp16", "fp16": {"enabled": False}}, ("two precisions",)),
    ({"fp16": {"type": "bfloat16", "enabled": True}, "precision": "fp16"}, ("two precisions",)),
    ({"fp16": {"enabled": True, "fp16": False}}, ("fp16.fp16: false", "fp16.enabled: true")),
    ({"fp16": {"enabled": True}, "dynamic_loss_scale": False}, ("dynamic_loss_scale: false", "fp16.loss_scale")),
    (
        {"zero_optimization": {"stage": 3}, "pipe_parallel_size": 2},
        ("zero_optimization.stage: 3", "pipe_parallel_size: 2", "use stage 1, or pipe_parallel_size 1"),
    ),
    ({"zero_optimization": {"stage": 0, "cpu_offload": True}}, ("zero_optimization.cpu_offload", "stage 1, 2 or 3")),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ("offload_optimizer.device", "stage: 0")),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": NVME}}, ("device: nvme", "stage 3", "use cpu")),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, ("device: nvme", "`nvme_path`")),
    ({"zero_optimization": {"offload_optimizer": {"fast_init": True}}}, ("offload_optimizer.fast_init", "remove it")),
    ({"zero_optimization": {"offload_param": {**NVME, "pin_memory": True}}}, ("offload_param.pin_memory", "files")),
    ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": NVME}}, ("cpu_offload: true", "keep one")),
    (
        {"zero_optimization": {"stage": 1, "cpu_offload": True, "offload_optimizer": {"device": "none"}}},
        ("cpu_offload: true", "keep one"),
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
        ("offload_param.device", "stage 3"),
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/nvme"}}},
        ("offload_param.nvme_path: /nvme", "device: nvme"),
    ),
    (
        {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "pipe_parallel_size": 2},
        ("data_types.grad_accum_dtype: fp32", "tied weights drift"),
    ),
    ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, ("zero_optimization.stage 1",)),
    ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}}, ("does not fit bf16",)),
    ({"fp32_allreduce": True, "communication_data_type": "bf16"}, ("fp32_allreduce", "communication_data_type: bf16")),
    ({"sparse_gradients": True}, ("sparse_gradients",)),
    ({"min_lr": 0.01}, ("min_lr: 0.01", "optimizer.params.lr: 0.001", "(default)")),
    ({"lr_decay_iters": 5, "lr_decay_fraction": 0.5}, ("lr_decay_fraction: 0.5", "lr_decay_iters: 5")),
    ({"warmup": 1.0}, ("warmup: 1.0", "below 1")),
    ({"warmup": 0.6, "lr_schedule_version": "v2.0"}, ("warmup: 0.6", "at most 0.5")),
    ({"checkpoint_factor": 1, "checkpoint_scale": "log"}, ("checkpoint_factor: 1", "above 1")),
    ({"checkpoint_scale": "log"}, ("needs checkpoint_factor",)),
    ({"train_iters": 10**20}, ("train_iters: 100000000000000000000", "1000000000")),
    ({"seed": 2**32}, ("seed: 4294967296", "less than")),
    ({"checkpoint_factor": 1, "train_iters": 10**9}, ("1,000,000,000 checkpoints", "checkpoint_factor: 1")),
    ({"serve_model_weights": True}, ("serve_model_weights", "tools/serve.py")),
    ({"extra_save_iters": [3, -1]}, ("extra_save_iters", "-1")),
    ({"finetune": True}, ("finetune: true", "`load`")),
    ({"data_path": "a", "train_data_paths": ["b"]}, ("`data_path`", "train_data_paths: ['b']", "keep one")),
    ({"train_data_paths": ["a", "b"], "train_data_weights": [1]}, ("1 weights for 2",)),
    ({"train_data_paths": ["a", "b"], "train_data_weights": [0, 0]}, ("must not all be 0",)),
    ({"train_data_paths": ["a"], "train_label_data_paths": ["b", "c"]}, ("['b', 'c']", "one label file for each")),
    ({"data_path": "a", "train_label_data_paths": ["b"]}, ("train_data_paths: []", "data_path has none")),
    ({"split": "a,b"}, ("split: a,b", "969,30,1")),
    ({"split": "0,0,0"}, ("split: 0,0,0",)),
    ({"split": "9,1,1,1"}, ("split: 9,1,1,1", "three")),
    ({"num_nodes": 0}, ("num_nodes: 0",)),
    ({"include": "a:0", "exclude": "b"}, ("include: a:0", "exclude: b")),
    ({"world_size": 8}, ("world_size", "num_gpus")),
    ({"train_micro_batch_size_per_gpu": None}, ("batch size is missing",)),
    ({"autotuning": {"enabled": True}}, ("autotuning",)),
    ({"padded_vocab_size": 90}, ("padded_vocab_size: 90", "100 ids")),
]


@pytest.mark.parametrize(("change", "words"), VIOLATIONS, ids=lambda value: str(value)[:50])
def test_violation(tiny, change, words):
    problems = violations({**tiny, **change}, world=8)
    assert any(all(word in problem for word in words) for problem in problems), problems


OFF = [
    {"curriculum_learning": {"enabled": False}},
    {"autotuning": {"enabled": False}},
    {"amp": {}},
    {"moe_num_experts": 1},
    {"gpt_j_tied": False},
    {"rms_norm_epsilon": 1e-8},
    {"deepspeed": True},
    {"use_bias_in_mlp": True},
    {"is_pipe_parallel": False},
    {"fp16": {"enabled": False}},
    {"zero_optimization": {"stage": 1, "cpu_offload": False, "offload_optimizer": {"device": "none"}}},
]


@pytest.mark.parametrize("change", OFF, ids=str)
def test_features_that_are_off_load(tiny, change):
    assert resolve(NeoXConfig.from_flat({**tiny, **change}), 1, 100).notes == ()


NO_EFFECT = [
    ({"moe_jitter_eps": 0.1}, "moe_jitter_eps: 0.1"),
    ({"moe_top_k": 2}, "moe_top_k: 2"),
    ({"mamba_use_bias_in_conv": False}, "mamba_use_bias_in_conv: false"),
    ({"hysteresis": 4}, "hysteresis"),
    ({"fp16": {"loss_scale": 0, "initial_scale_power": 12}}, "training is in fp32"),
    ({"fp16": {"loss_scale": 0}, "precision": "bf16"}, "training is in bf16"),
    ({"zero_optimization": {"stage": 1, "load_from_fp32_weights": True}}, "load_from_fp32_weights: true"),
    ({"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}, "elastic_checkpoint: true"),
]


@pytest.mark.parametrize(("change", "words"), NO_EFFECT, ids=str)
def test_what_changes_nothing_says_so(tiny, change, words):
    notes = resolve(NeoXConfig.from_flat({**tiny, **change}), 1, 100).notes
    assert any(words in note and "changes nothing" in note for note in notes), notes


def test_every_violation_is_listed(tiny, tmp_path):
    flat = {
        **tiny,
        "hidden_size": 66,
        "min_lr": 1.0,
        "pos_emb": "learned",
        "opt_pos_emb_offset": 2,
        "split": "x",
        "pipe_parallel_size": 3,
    }
    problems = violations(flat, world=7)
    for text in ("hidden_size", "min_lr", "opt_pos_emb_offset", "split", "7 GPUs"):
        assert any(text in problem for problem in problems)


def test_deepspeed_extra_args_are_checked_like_all_others(tmp_path):
    path = tmp_path / "a.yml"
    path.write_text(
        "num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 8\npos_emb: rotary\nbatch_size: 1\n"
        "deepspeed_extra_args:\n  comms_logger: {enabled: true}\n"
    )
    config = load_config([path])
    assert resolve(config, 1, 100).deepspeed["comms_logger"] == {"enabled": True}
    assert config.source("comms_logger") == f"{path}:8"
    path.write_text(
        "dump_state: true\ndeepspeed_extra_args: {dump_state: false, comms_loger: {}, elasticity: {enabled: true}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config([path])
    text = str(caught.value)
    for words in ("`dump_state` is given twice", "did you mean `comms_logger`?", f"{path}:2: `elasticity"):
        assert words in text, words
    path.write_text("deepspeed_extra_args: 5\n")
    with pytest.raises(ConfigError, match="should be a block"):
        load_config([path])


def test_a_wrong_type_does_not_hide_the_rest(tmp_path):
    path = tmp_path / "a.yml"
    path.write_text("num_layers: four\nhidden_size: 66\nnum_attention_heads: 4\nsed: 3\nmin_lr: 1\nseq_length: 8\n")
    with pytest.raises(ConfigError) as caught:
        load_config([path])
    problems = caught.value.problems
    starts = [":1: `num_layers", ":4: unknown key `sed`", ":2: `hidden_size", ":5: `min_lr"]
    for start in starts:
        assert any(f"{path}{start}" in problem for problem in problems), start
    assert not any("`num_layers` is missing" in problem for problem in problems)


def test_duplicates_and_bad_overrides_do_not_hide_the_rest(tmp_path):
    a, b = tmp_path / "a.yml", tmp_path / "b.yml"
    a.write_text("seed: 1\nseed: 2\nhidden_size: 66\nnum_attention_heads: 4\nzero_optimization: {stage: 3, x: 1}\n")
    b.write_text("seed: 3\npipe_parallel_size: 2\nnum_layers: 4\nseq_length: 8\npos_emb: rotary\n")
    with pytest.raises(ConfigError) as caught:
        load_config([a, b], overrides=["nonsense", "min_lr=1"])
    text = str(caught.value)
    for words in (
        f"{a}:2: `seed` is given twice",
        f"{b}:1: `seed` is also given at {a}:1",
        "--set nonsense: should be key=value",
        f"{a}:5: `zero_optimization` has no key `x`",
        f"{a}:3: `hidden_size: 66`",
        f"{a}:5: `zero_optimization.stage: 3` does not work with",
        "--set: `min_lr: 1.0`",
    ):
        assert words in text, words
    assert len(caught.value.problems) == 7


def test_places_are_files_and_lines(tmp_path):
    (tmp_path / "a.yml").write_text("hidden_size: 66\nnum_layers: 2\nseq_length: 8\npos_emb: rotary\nbatch_size: 1\n")
    (tmp_path / "b.yml").write_text("\nnum_attention_heads: 4\n")
    config = load_config(["a", "b"], conf_dir=tmp_path, overrides=["model_parallel_size=3"])
    with pytest.raises(ConfigError) as caught:
        resolve(config, 3, 100)
    text = str(caught.value)
    assert f"{tmp_path}/a.yml:1: `hidden_size: 66`" in text
    assert f"`num_attention_heads: 4` ({tmp_path}/b.yml:2)" in text
    assert "`model_parallel_size: 3` (--set)" in text


class TestGridAndBatch:
    def test_world_must_divide(self, tiny):
        (problem,) = violations({**tiny, "pipe_parallel_size": 2, "model_parallel_size": 2}, world=6)
        assert "6 GPUs" in problem
        assert "use 4 or 8 GPUs" in problem
        (problem,) = violations({**tiny, "pipe_parallel_size": 2}, world=1)
        assert "use 2 GPUs" in problem

    @pytest.mark.parametrize("asked", [0, 1])
    def test_zero_and_one_are_one_stage(self, tiny, asked):
        assert resolve(NeoXConfig.from_flat({**tiny, "pipe_parallel_size": asked}), 2, 100).grid.pp_size == 1

    @pytest.mark.parametrize(
        ("total", "micro", "steps", "expected"),
        [
            (None, 2, 3, (24, 2, 3)),
            (None, 2, None, (8, 2, 1)),
            (24, 2, None, (24, 2, 3)),
            (24, None, 3, (24, 2, 3)),
            (24, None, None, (24, 6, 1)),
            (24, 2, 3, (24, 2, 3)),
        ],
    )
    def test_any_two_give_the_third(self, tiny, total, micro, steps, expected):
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        plan = resolve(NeoXConfig.from_flat({**tiny, **dict(zip(keys, (total, micro, steps), strict=True))}), 4, 100)
        batch = plan.batch
        assert tuple(getattr(batch, key) for key in keys) == expected
        assert tuple(plan.deepspeed[key] for key in keys) == expected

    @pytest.mark.parametrize(
        ("total", "micro", "steps", "words"),
        [
            (25, 2, 3, ("train_batch_size: 25", "= 24", "use train_batch_size 24")),
            (25, 2, None, ("not a multiple of", "use train_batch_size 24 with gradient_accumulation_steps 3")),
            (2, 2, None, ("use train_batch_size 8 with gradient_accumulation_steps 1",)),
            (3, None, None, ("gradient_accumulation_steps 1 x 4", "use train_batch_size 4")),
        ],
    )
    def test_contradictions_name_the_nearest(self, tiny, total, micro, steps, words):
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        flat = {**tiny, **dict(zip(keys, (total, micro, steps), strict=True))}
        (problem,) = violations(flat, world=4)
        assert all(word in problem for word in words), problem

    def test_aliases_set_what_they_name(self, tiny):
        del tiny["train_micro_batch_size_per_gpu"]
        config = NeoXConfig.from_flat({**tiny, "batch_size": 3, "gas": 2, "clip_grad": 0.5, "zero_stage": 1, "lr": 0.1})
        plan = resolve(config, 2, 100)
        assert plan.batch.train_batch_size == 12
        assert plan.deepspeed["gradient_clipping"] == 0.5
        assert plan.deepspeed["zero_optimization"]["stage"] == 1
        assert config.optimizer.optimizer.params.lr == 0.1

    def test_contradicting_aliases_are_refused(self, tiny):
        with pytest.raises(ConfigError, match=r"`batch_size: 3` contradicts `train_micro_batch_size_per_gpu: 2`"):
            NeoXConfig.from_flat({**tiny, "batch_size": 3})
        with pytest.raises(ConfigError, match=r"`deepspeed_slurm: True` contradicts `launcher: pdsh`"):
            NeoXConfig.from_flat({**tiny, "deepspeed_slurm": True, "launcher": "pdsh"})

    def test_launcher_from_v2_flags(self, tiny):
        assert NeoXConfig.from_flat({**tiny, "deepspeed_slurm": True}).runner.launcher == "slurm"
        assert NeoXConfig.from_flat({**tiny, "deepspeed_mpi": True}).runner.launcher == "openmpi"


def test_padded_vocabulary(tiny):
    plan = resolve(NeoXConfig.from_flat({**tiny, "model_parallel_size": 2}), 2, 300)
    assert (plan.vocab_size, plan.padded_vocab_size) == (300, 512)
    plan = resolve(NeoXConfig.from_flat({**tiny, "padded_vocab_size": 304}), 1, 300)
    assert plan.padded_vocab_size == 304
    assert plan.layers.padded_vocab_size == 304


def test_missing_for_training(tiny):
    del tiny["train_iters"]
    missing = missing_for_training(NeoXConfig.from_flat(tiny))
    assert [text.split(" ")[0] for text in missing] == ["`train_iters`"]


def test_every_key_is_read_somewhere():
    """No setting is ignored in silence: each key of a section is named by code outside the sections themselves.

    A key that accepts a single value decides nothing.
    """
    from pathlib import Path

    from neox.config.neox_config import section_classes

    root = Path(__file__).parents[3]
    files = [root / "deepy.py", root / "train.py", *root.glob("neox/**/*.py"), *root.glob("tools/*.py")]
    declaring = {"sections", "validation"}
    described = {"reference.py", "keys.py", "provenance.py"}
    text = "\n".join(
        file.read_text()
        for file in files
        if not (file.parent.name in declaring or (file.parent.name == "config" and file.name in described))
    )
    sections = "\n".join(file.read_text() for file in root.glob("neox/config/sections/*.py"))
    words = set(re.findall(r"\w+", text)) | set(re.findall(r"self\.(\w+)", sections))
    keys = {
        key
        for section in section_classes().values()
        for key, info in section.model_fields.items()
        if not (get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1)
    }
    assert keys - words == set()


def test_num_layers_alone_shortens_a_network_of_one_kind() -> None:
    plan = small_plan(num_layers=2, attention_config=[[["flash"], 80]])
    assert len(plan.architecture.attention) == 2
    assert any("80 layers" in note for note in plan.notes)
