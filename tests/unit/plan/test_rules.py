"""Rules of a configuration: each violation is one problem with its keys and place, and all are listed together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from neox.config import NeoXConfig
from neox.config.neox_config import section_classes
from neox.errors import ConfigError
from neox.plan import config_from_files, resolve
from neox.plan.rules import missing_for_training
from neox.problems import COMMAND_LINE, Problem
from tests.plans import SIZES, plan_of, problem_keys, problems_of, small_plan


def test_the_smallest_configuration_breaks_no_rule() -> None:
    assert problems_of(**SIZES) == ()


CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
ZERO = "zero_optimization"
PAIRS = {"train_impl": "dpo", "pos_train_data_paths": ["a"], "neg_train_data_paths": ["b"]}
JUDGED = {
    "train_impl": "kto",
    "train_data_paths": ["a"],
    "train_label_data_paths": ["b"],
    "train_reward_data_paths": ["c"],
}
# The key that a problem points to, others that it must name, and the keys that cause it.
RESTARTS = {"save": "s", "max_restarts": 3}
ROLLBACK = {"save": "s", "loss_spike_action": "rollback"}
BF16_STATES: dict[str, Any] = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
BF16_ZERO_2: dict[str, Any] = {"precision": "bf16", "bf16": BF16_STATES, "zero_optimization": {"stage": 2}}
MIXTURE: dict[str, Any] = {"moe_num_experts": 8, "moe_router_type": "topk"}

LATENT = {"attention_config": [[["latent"], "all"]], "kv_lora_rank": 8, "use_bias_in_qkv": False}
VIOLATIONS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("attention_config", ("kv_lora_rank",), {**LATENT, "kv_lora_rank": None}),
    ("pos_emb", ("attention_config",), {**LATENT, "pos_emb": "alibi", "rotary_pct": 1.0}),
    ("use_bias_in_attn_linear", ("use_bias_in_qkv", "attention_config"), {**LATENT, "use_bias_in_qkv": None}),
    ("num_kv_heads", ("attention_config",), {**LATENT, "num_kv_heads": 2}),
    ("qk_norm", ("attention_config",), {**LATENT, "qk_norm": "head"}),
    ("lora", ("attention_config",), {**LATENT, "lora": {"r": 2}}),  # has no query_key_value
    ("hidden_size", ("num_attention_heads",), {"hidden_size": 66}),
    ("num_attention_heads", ("model_parallel_size",), {"num_attention_heads": 2, "model_parallel_size": 4}),
    ("log_gradient_noise_scale", ("zero_optimization.stage",), {"log_gradient_noise_scale": True, ZERO: {"stage": 1}}),
    (
        "log_gradient_noise_scale",
        ("pipe_parallel_size", "bf16"),
        {"log_gradient_noise_scale": True, "pipe_parallel_size": 2, "bf16": {"enabled": True}},
    ),
    (
        "log_gradient_noise_scale",
        ("rampup_batch_size",),
        {"log_gradient_noise_scale": True, "rampup_batch_size": [16, 16, 64], "train_batch_size": 32},
    ),
    ("log_style", (), {"log_style": "megatron"}),
    ("no_recompute_layers", ("num_layers",), {"checkpoint_activations": True, "no_recompute_layers": [0, 4]}),
    (
        "checkpoint_num_layers",
        ("recompute_granularity",),
        {"checkpoint_activations": True, "recompute_granularity": "selective", "checkpoint_num_layers": 2},
    ),
    (
        "checkpoint_in_cpu",
        ("recompute_granularity",),
        {"checkpoint_activations": True, "recompute_granularity": "full_attn", "checkpoint_in_cpu": True},
    ),
    (
        "partition_activations",
        ("hidden_size", "model_parallel_size"),
        {
            "checkpoint_activations": True,
            "partition_activations": True,
            "model_parallel_size": 4,
            "hidden_size": 66,
            "head_dim": 16,
            "mlp_width": 64,
        },
    ),
    (
        "recompute_granularity",
        ("attention_config",),
        {"checkpoint_activations": True, "recompute_granularity": "full_attn", "attention_config": ["gmlp"] * 4},
    ),
    (
        "compile_layers",
        ("recompute_granularity",),
        {"checkpoint_activations": True, "recompute_granularity": "full_attn", "compile_layers": True},
    ),
    ("recompute_granularity", (), {"recompute_granularity": "half"}),
    (
        "ema_decay",
        ("zero_optimization.offload_optimizer.device",),
        {"ema_decay": 0.9, ZERO: {"stage": 3, "offload_optimizer": NVME}},
    ),
    ("ema_decay", (), {"ema_decay": 1.0}),
    ("num_train_epochs", ("train_iters",), {"num_train_epochs": 2}),
    ("num_train_epochs", ("train_iters",), {"train_epochs": 2}),
    (
        "valid_data_weights",
        ("valid_data_paths",),
        {"train_data_paths": ["a"], "valid_data_paths": {"x": "a"}, "valid_data_weights": [1]},
    ),
    (
        "valid_label_data_paths",
        ("valid_data_paths",),
        {"train_data_paths": ["a"], "valid_data_paths": {"x": "a"}, "valid_label_data_paths": ["b"]},
    ),
    ("valid_data_paths", (), {"train_data_paths": ["a"], "valid_data_paths": {}}),
    (
        "eval_iters",
        ("valid_data_paths",),
        {"train_data_paths": ["a"], "valid_data_paths": ["a", "b"], "eval_iters": "all"},
    ),
    ("eval_order", ("eval_iters",), {"eval_order": "gpt-neox", "eval_iters": "all"}),
    ("eval_iters", (), {"eval_iters": "some"}),
    (
        "valid_data_paths.x.weight",
        (),
        {"train_data_paths": ["a"], "valid_data_paths": {"x": {"path": "a", "weight": 0}}},
    ),
    ("valid_data_paths.x.size", (), {"train_data_paths": ["a"], "valid_data_paths": {"x": {"path": "a", "size": 1}}}),
    ("valid_data_paths.x", (), {"train_data_paths": ["a"], "valid_data_paths": {"x": {"weight": 1}}}),
    ("valid_data_paths.x/y", (), {"train_data_paths": ["a"], "valid_data_paths": {"x/y": "a"}}),
    ("valid_data_paths", (), {"train_data_paths": ["a"], "valid_data_paths": "a"}),
    ("num_layers", (), {"num_layers": None}),
    ("seq_length", ("max_position_embeddings",), {"seq_length": 64, "max_position_embeddings": 32}),
    ("pipe_parallel_size", ("num_layers",), {"pipe_parallel_size": 8}),
    ("is_pipe_parallel", ("pipe_parallel_size",), {"is_pipe_parallel": True}),
    ("pipe_partition_method", (), {"pipe_partition_method": "best"}),
    ("pipe_partition_method", (), {"pipe_partition_method": "type:("}),
    ("pipe_partition_method", (), {"pipe_partition_method": "type:conv"}),
    ("rotary_pct", ("hidden_size", "num_attention_heads"), {"rotary_pct": 0.2}),
    ("rotary_pct", ("head_dim",), {"rotary_pct": 0.05}),
    ("norm", (), {"norm": "batchnorm"}),
    ("pos_emb", (), {"pos_emb": "relative"}),
    ("opt_pos_emb_offset", ("seq_length", "max_position_embeddings"), {"pos_emb": "learned", "opt_pos_emb_offset": 2}),
    ("rope_scaling", (), {"rope_scaling": {"type": "dynamic", "factor": 2}}),
    ("hidden_size", ("pos_emb",), {"pos_emb": "sinusoidal", "hidden_size": 65, "num_attention_heads": 5}),
    ("rpe_max_distance", ("rpe_num_buckets",), {"pos_emb": "rpe", "rpe_num_buckets": 32, "rpe_max_distance": 16}),
    ("activation", (), {"activation": "tanh"}),
    (
        "activation_memory_budget",
        ("checkpoint_activations",),
        {"activation_memory_budget": 0, "checkpoint_activations": True},
    ),
    ("bias_gelu_fusion", ("activation",), {"activation": "relu", "bias_gelu_fusion": True}),
    ("num_kv_heads", ("num_attention_heads",), {"num_kv_heads": 3}),
    ("num_kv_heads", ("model_parallel_size",), {"num_kv_heads": 2, "model_parallel_size": 4}),
    ("expansion_factor", ("intermediate_size",), {"intermediate_size": 64, "expansion_factor": 2.0}),
    ("mlp_width", ("mlp_multiple_of",), {"mlp_width": 64, "mlp_multiple_of": 8}),
    ("mlp_width", ("model_parallel_size",), {"mlp_width": 63, "model_parallel_size": 2}),
    ("norm_placement", ("gpt_j_residual",), {"norm_placement": "output", "gpt_j_residual": True}),
    ("use_qk_layernorm", ("qk_norm",), {"use_qk_layernorm": True, "qk_norm": "head"}),
    ("use_qk_layernorm", ("norm",), {"use_qk_layernorm": True, "norm": "scalenorm"}),
    ("attention_config", ("sliding_window_width",), {"attention_config": ["sliding_window"] * 4}),
    ("sliding_window_width", ("attention_config",), {"attention_config": ["global"] * 4, "sliding_window_width": 8}),
    (
        "sliding_window_width",
        ("seq_length", "max_position_embeddings"),
        {
            "attention_config": ["flash"] * 4,
            "sliding_window_width": 65,
            "seq_length": 64,
            "max_position_embeddings": 64,
        },
    ),
    ("te_mha", (), {"te_mha": True}),
    ("attention_config", (), {"attention_config": [[["retnet"], 4]]}),
    ("attention_config", ("num_layers",), {"attention_config": [[["flash"], 3]]}),
    ("attention_config", ("num_layers",), {"attention_config": [[["flash", "global", "flash"], "all"]]}),
    ("attention_config", (), {"attention_config": [["flash", 4]]}),
    ("moe_top_k", ("moe_num_experts",), {**MIXTURE, "moe_top_k": 9}),
    (
        "moe_router_num_groups",
        ("moe_num_experts",),
        {**MIXTURE, "moe_router_num_groups": 3, "moe_router_group_topk": 1},
    ),
    ("moe_router_num_groups", ("moe_router_group_topk",), {**MIXTURE, "moe_router_num_groups": 4}),
    (
        "moe_router_group_topk",
        ("moe_router_num_groups",),
        {**MIXTURE, "moe_router_num_groups": 2, "moe_router_group_topk": 3},
    ),
    (
        "moe_router_group_score_topk",
        ("moe_router_num_groups", "moe_num_experts"),
        {**MIXTURE, "moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_group_score_topk": 7},
    ),
    (
        "moe_top_k",
        ("moe_router_group_topk",),
        {**MIXTURE, "moe_top_k": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 1},
    ),
    ("moe_layer_freq", ("num_layers",), {**MIXTURE, "moe_layer_freq": [1, 0]}),
    ("moe_layer_freq", ("moe_expert_interval",), {**MIXTURE, "moe_layer_freq": 2, "moe_expert_interval": 2}),
    ("moe_num_experts", ("moe_first_k_dense",), {**MIXTURE, "moe_first_k_dense": 4}),
    ("use_bias_in_mlp", ("moe_num_experts",), {**MIXTURE, "use_bias_in_mlp": True}),
    (
        "moe_ffn_hidden_size",
        ("model_parallel_size",),
        {**MIXTURE, "moe_ffn_hidden_size": 9, "model_parallel_size": 2},
    ),
    ("moe_norm_topk_prob", ("moe_router_type",), {"moe_num_experts": 8, "moe_norm_topk_prob": True}),
    ("moe_aux_loss_coeff", ("moe_router_type",), {"moe_num_experts": 8, "moe_aux_loss_coeff": 0.1}),
    ("moe_router_enable_expert_bias", ("moe_router_type",), {**MIXTURE, "moe_router_enable_expert_bias": True}),
    ("moe_shared_expert_gate", ("moe_shared_expert_intermediate_size",), {**MIXTURE, "moe_shared_expert_gate": True}),
    (
        "moe_jitter_eps",
        ("sequence_parallel",),
        {**MIXTURE, "moe_jitter_eps": 0.1, "sequence_parallel": True, "model_parallel_size": 2},
    ),
    ("moe_num_experts", ("fp8",), {**MIXTURE, "fp8": "tensorwise", "precision": "bf16"}),
    ("lora.dropout", ("moe_num_experts",), {**MIXTURE, "lora": {"dropout": 0.1, "target": ["dense_h_to_4h"]}}),
    ("moe_num_experts", ("attention_config",), {**MIXTURE, "attention_config": ["gmlp", "global", "global", "global"]}),
    ("max_restarts", ("no_save_optim",), {**RESTARTS, "no_save_optim": True}),
    ("max_restarts", ("launcher",), {**RESTARTS, "launcher": "none"}),
    ("preemption_command", (), {"preemption_command": ""}),
    ("preemption_command", (), {"preemption_command": " "}),
    ("preemption_file", (), {"preemption_file": ""}),
    ("preemption_seconds", (), {"preemption_file": "a", "preemption_seconds": 1e300}),
    ("loss_spike_action", ("pack_impl",), {**ROLLBACK, "train_data_paths": ["a"], "pack_impl": "best_fit"}),
    ("loss_spike_action", ("teacher_logits",), {**ROLLBACK, "train_data_paths": ["a"], "teacher_logits": "t"}),
    ("num_experts", ("moe_num_experts",), {"moe_num_experts": 8, "num_experts": 4}),
    ("expert_model_parallel_size", ("moe_num_experts",), {"moe_num_experts": 9, "expert_model_parallel_size": 2}),
    (
        "expert_model_parallel_size",
        ("pipe_parallel_size",),
        {**MIXTURE, "moe_num_experts": 9, "expert_model_parallel_size": 3},
    ),
    (
        "expert_model_parallel_size",
        ("optimizer.type",),
        {**MIXTURE, "expert_model_parallel_size": 2, "optimizer": {"type": "Adafactor"}},
    ),
    ("use_mup", ("mup_base_hidden_size",), {"use_mup": True}),
    ("init_method", ("use_mup",), {"use_mup": True, "mup_base_hidden_size": 32, "init_method": "xavier_normal"}),
    ("bf16", ("precision",), {"precision": "fp16", "bf16": {"enabled": True}}),
    ("bf16", ("fp16",), {"fp16": {"enabled": True}, "bf16": {"enabled": True}}),
    ("fp16", ("precision",), {"precision": "fp32", "fp16": {"enabled": True}}),
    ("fp16", ("precision",), {"precision": "fp16", "fp16": {"enabled": False}}),
    ("fp16", ("precision",), {"precision": "fp16", "fp16": {"type": "bfloat16", "enabled": True}}),
    ("fp16.fp16", ("fp16.enabled",), {"fp16": {"enabled": True, "fp16": False}}),
    ("dynamic_loss_scale", ("fp16.loss_scale",), {"fp16": {"enabled": True}, "dynamic_loss_scale": False}),
    ("zero_optimization.stage", ("pipe_parallel_size",), {ZERO: {"stage": 3}, "pipe_parallel_size": 2}),
    ("zero_optimization.cpu_offload", ("zero_optimization.stage",), {ZERO: {"stage": 0, "cpu_offload": True}}),
    ("zero_optimization.offload_optimizer.device", ("zero_optimization.stage",), {ZERO: {"offload_optimizer": CPU}}),
    (
        "zero_optimization.offload_optimizer.device",
        ("zero_optimization.stage",),
        {ZERO: {"stage": 1, "offload_optimizer": NVME}},
    ),
    (
        "zero_optimization.offload_optimizer.device",
        ("zero_optimization.offload_optimizer.nvme_path",),
        {ZERO: {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
    ),
    (
        "zero_optimization.offload_param.pin_memory",
        ("zero_optimization.offload_param.device",),
        {ZERO: {"stage": 3, "offload_optimizer": CPU, "offload_param": {**NVME, "pin_memory": True}}},
    ),
    (
        "zero_optimization.cpu_offload",
        ("zero_optimization.offload_optimizer",),
        {ZERO: {"stage": 3, "cpu_offload": True, "offload_optimizer": NVME}},
    ),
    (
        "zero_optimization.cpu_offload",
        ("zero_optimization.offload_optimizer",),
        {ZERO: {"stage": 1, "cpu_offload": True, "offload_optimizer": {"device": "none"}}},
    ),
    (
        "zero_optimization.offload_param.device",
        ("zero_optimization.stage",),
        {ZERO: {"stage": 2, "offload_optimizer": CPU, "offload_param": CPU}},
    ),
    (
        "zero_optimization.offload_param.nvme_path",
        ("zero_optimization.offload_param.device",),
        {ZERO: {"stage": 3, "offload_optimizer": CPU, "offload_param": {**CPU, "nvme_path": "/nvme"}}},
    ),
    (
        "prescale_gradients",
        ("zero_optimization.stage", "zero_optimization.reduce_scatter"),
        {"prescale_gradients": True, ZERO: {"stage": 2}},
    ),
    (
        "gradient_predivide_factor",
        ("zero_optimization.stage", "zero_optimization.reduce_scatter"),
        {"gradient_predivide_factor": 2.0, ZERO: {"stage": 3, "reduce_scatter": True}},
    ),
    (
        "zero_optimization.zero_quantized_gradients",
        ("zero_optimization.reduce_scatter",),
        {ZERO: {"stage": 3, "zero_quantized_gradients": True, "reduce_scatter": False}},
    ),
    (
        "flops_profiler.enabled",
        ("pipe_parallel_size",),
        {"flops_profiler": {"enabled": True}, "pipe_parallel_size": 2},
    ),
    (
        "data_types.grad_accum_dtype",
        ("zero_optimization.stage", "fp16"),
        {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    (
        "data_types.grad_accum_dtype",
        ("pipe_parallel_size", "fp16"),
        {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "pipe_parallel_size": 2},
    ),
    (
        "data_types.grad_accum_dtype",
        ("zero_optimization.stage", "bf16"),
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    ("data_types.grad_accum_dtype", ("bf16",), {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}}),
    (
        "bf16.bf16_master_weights_and_grads",
        ("zero_optimization.stage",),
        {"precision": "bf16", "bf16": BF16_STATES},
    ),
    (
        "bf16.bf16_master_weights_and_grads",
        ("bf16.bf16_optimizer_states",),
        {**BF16_ZERO_2, "bf16": {"bf16_master_weights_and_grads": True}},
    ),
    (
        "bf16.bf16_optimizer_states",
        ("bf16.bf16_master_weights_and_grads",),
        {**BF16_ZERO_2, "bf16": {"bf16_optimizer_states": True}},
    ),
    (
        "bf16.bf16_master_weights_and_grads",
        ("zero_optimization.offload_optimizer.device",),
        {**BF16_ZERO_2, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ),
    ("bf16.bf16_master_weights_and_grads", ("ema_decay",), {**BF16_ZERO_2, "ema_decay": 0.9}),
    ("bf16.bf16_master_weights_and_grads", ("precision",), {**BF16_ZERO_2, "precision": "fp32"}),
    ("bf16.bf16_master_weights_and_grads", ("optimizer.type",), {**BF16_ZERO_2, "optimizer": {"type": "Lion"}}),
    (
        "bf16.bf16_master_weights_and_grads",
        ("data_types.grad_accum_dtype",),
        {**BF16_ZERO_2, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    ("fp32_allreduce", ("communication_data_type",), {"fp32_allreduce": True, "communication_data_type": "bf16"}),
    ("te_columnparallel", (), {"te_columnparallel": True}),
    ("min_lr", ("optimizer.params.lr",), {"min_lr": 0.01}),
    ("lr_decay_fraction", ("lr_decay_iters",), {"lr_decay_iters": 5, "lr_decay_fraction": 0.5}),
    ("warmup", (), {"warmup": 1.0}),
    ("warmup", ("lr_schedule_version",), {"warmup": 0.6, "lr_schedule_version": "v2.0"}),
    ("checkpoint_factor", ("checkpoint_scale",), {"checkpoint_factor": 1, "checkpoint_scale": "log"}),
    ("checkpoint_scale", ("checkpoint_factor",), {"checkpoint_scale": "log"}),
    ("train_iters", (), {"train_iters": 10**20}),
    ("seed", (), {"seed": 2**32}),
    ("checkpoint_factor", ("train_iters",), {"checkpoint_factor": 1, "train_iters": 10**9}),
    ("serve_model_weights", (), {"serve_model_weights": True}),
    ("checkpoint_mirror", (), {"save": "s", "checkpoint_mirror": "file:///x"}),
    ("checkpoint_mirror", (), {"save": "s", "checkpoint_mirror": "hf://a/b"}),
    ("checkpoint_mirror", (), {"save": "s", "checkpoint_mirror": "x/y"}),
    ("checkpoint_mirror", (), {"save": "s", "checkpoint_mirror": "s3://"}),
    ("checkpoint_mirror", (), {"save": "s", "checkpoint_mirror": "s3://bucket/run/global_step3"}),
    ("extra_save_iters", (), {"extra_save_iters": [3, -1]}),
    ("finetune", ("load",), {"finetune": True}),
    ("data_path", ("train_data_paths",), {"data_path": "a", "train_data_paths": ["b"]}),
    ("train_data_weights", ("train_data_paths",), {"train_data_paths": ["a", "b"], "train_data_weights": [1]}),
    ("train_data_weights", (), {"train_data_paths": ["a", "b"], "train_data_weights": [0, 0]}),
    (
        "train_data_weights",
        ("weight_by_num_documents",),
        {"train_data_paths": ["a"], "train_data_weights": [1], "weight_by_num_documents": True},
    ),
    (
        "train_label_data_paths",
        ("train_data_paths",),
        {"train_data_paths": ["a"], "train_label_data_paths": ["b", "c"]},
    ),
    ("train_label_data_paths", ("train_data_paths",), {"data_path": "a", "train_label_data_paths": ["b"]}),
    ("fim_rate", (), {"fim_rate": 1.5}),
    ("fim_rate", ("train_data_paths",), {"train_data_paths": ["a", "b"], "fim_rate": [0.5]}),
    ("fim_rate", ("train_data_paths",), {"data_path": "a", "fim_rate": [0.5, 0.5]}),
    ("fim_rate", ("pack_impl",), {"data_path": "a", "fim_rate": 0.5, "pack_impl": "unpacked"}),
    (
        "fim_rate",
        ("train_label_data_paths",),
        {"train_data_paths": ["a"], "train_label_data_paths": ["b"], "fim_rate": 0.5},
    ),
    ("split", (), {"split": "a,b"}),
    ("split", (), {"split": "0,0,0"}),
    ("split", (), {"split": "9,1,1,1"}),
    ("profile", ("log_dir",), {"profile": True}),
    ("profile_step_start", ("profile_step_stop",), {"profile": True, "log_dir": "a", "profile_step_start": 12}),
    ("num_nodes", (), {"num_nodes": 0}),
    ("include", ("exclude",), {"include": "a:0", "exclude": "b"}),
    ("te_rowparallel", (), {"te_rowparallel": True}),
    (
        "train_batch_size",
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        {"train_micro_batch_size_per_gpu": None},
    ),
    ("autotuning", (), {"autotuning": {"enabled": True}}),
    ("padded_vocab_size", ("vocab_file",), {"padded_vocab_size": 90}),
    ("train_impl", (), {**PAIRS, "train_impl": "reinforce"}),
    ("train_impl", ("eval_tasks",), {**PAIRS, "train_impl": "rm", "eval_tasks": ["lambada_openai"]}),
    ("train_impl", ("use_mup",), {**PAIRS, "train_impl": "rm", "use_mup": True, "mup_base_hidden_size": 16}),
    ("neg_train_data_paths", ("train_impl",), {**PAIRS, "train_impl": "rm", "neg_train_data_paths": None}),
    ("pack_impl", ("train_impl",), {**PAIRS, "pack_impl": "best_fit"}),
    ("train_impl", ("soft_prompt_tuning.enabled",), {**PAIRS, "soft_prompt_tuning": {"enabled": True}}),
    ("train_impl", ("data_path",), {**PAIRS, "data_path": "x"}),
    ("dataset_impl", ("train_impl",), {**PAIRS, "dataset_impl": "gpt2"}),
    ("dataset_impl", ("train_impl",), {"dataset_impl": "pairwise"}),
    ("neg_train_data_paths", ("train_impl",), {**PAIRS, "neg_train_data_paths": None}),
    ("pos_train_data_paths", ("neg_train_data_paths",), {**PAIRS, "neg_train_data_paths": ["b", "c"]}),
    ("pos_train_label_data_paths", (), {**PAIRS, "pos_train_label_data_paths": ["b", "c"]}),
    ("neg_valid_data_paths", ("train_impl",), {**PAIRS, "pos_valid_data_paths": ["a"]}),
    ("train_data_paths", ("train_impl",), {**PAIRS, "train_data_paths": ["a"]}),
    ("dpo_label_smoothing", ("dpo_loss",), {**PAIRS, "dpo_loss": "ipo", "dpo_label_smoothing": 0.1}),
    ("dpo_fp32", (), {**PAIRS, "dpo_fp32": False}),
    ("train_reward_data_paths", ("train_impl",), {**JUDGED, "train_reward_data_paths": None}),
    ("train_data_weights", ("train_impl",), {**JUDGED, "train_data_weights": [2]}),
    ("valid_data_paths", ("train_impl",), {**JUDGED, "valid_data_paths": {"a": "b"}, "valid_reward_data_paths": ["a"]}),
    (
        "reset_attention_mask",
        ("scaled_upper_triang_masked_softmax_fusion",),
        {"reset_attention_mask": True, "scaled_upper_triang_masked_softmax_fusion": True},
    ),
]


@pytest.mark.parametrize(("key", "others", "change"), VIOLATIONS, ids=lambda value: str(value)[:50])
def test_violation(key: str, others: tuple[str, ...], change: dict[str, Any]) -> None:
    (keys,) = problem_keys(8, **{**SIZES, **change})
    assert keys[0] == key
    assert set(others) <= set(keys)


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


NO_EFFECT: list[tuple[str, dict[str, Any]]] = [
    ("moe_jitter_eps: 0.1", {"moe_jitter_eps": 0.1}),
    ("moe_top_k: 2", {"moe_top_k": 2}),
    ("mamba_use_bias_in_conv: false", {"mamba_use_bias_in_conv": False}),
    ("fp16.hysteresis", {"hysteresis": 4}),
    ("fp16.initial_scale_power", {"fp16": {"loss_scale": 0, "initial_scale_power": 12}}),
    ("fp16.loss_scale", {"fp16": {"loss_scale": 0}, "precision": "bf16"}),
    (f"{ZERO}.load_from_fp32_weights: true", {ZERO: {"stage": 1, "load_from_fp32_weights": True}}),
    (f"{ZERO}.elastic_checkpoint: true", {ZERO: {"stage": 1, "elastic_checkpoint": True}}),
    (f"{ZERO}.offload_optimizer.fast_init: true", {ZERO: {"offload_optimizer": {"fast_init": True}}}),
    ("bf16.check_grad_overflow: false", {"bf16": {"enabled": True, "check_grad_overflow": False}}),
    ("activation_checkpointing.number_checkpoints: 4", {"activation_checkpointing": {"number_checkpoints": 4}}),
]


@pytest.mark.parametrize(("setting", "change"), NO_EFFECT, ids=str)
def test_what_changes_nothing_is_noted(setting: str, change: dict[str, Any]) -> None:
    assert len([note for note in plan_of(**{**SIZES, **change}).notes if setting in note]) == 1


def test_every_violation_is_listed() -> None:
    flat = {
        **SIZES,
        "hidden_size": 66,
        "min_lr": 1.0,
        "pos_emb": "learned",
        "opt_pos_emb_offset": 2,
        "split": "x",
        "pipe_parallel_size": 3,
    }
    first = {keys[0] for keys in problem_keys(7, **flat)}
    assert first == {"hidden_size", "min_lr", "opt_pos_emb_offset", "split", "pipe_parallel_size"}


def problems_of_files(*files: Path, overrides: tuple[str, ...] = ()) -> dict[str, tuple[str, int]]:
    """Return the first key of each problem of files, and the name and line of the file it points to."""
    with pytest.raises(ConfigError) as caught:
        config_from_files(files, overrides=overrides)
    return {problem.keys[0]: place(problem) for problem in caught.value.problems}


def place(problem: Problem) -> tuple[str, int]:
    """Return the name of the file that a problem points to, and the line."""
    return Path(problem.source.file).name, problem.source.line


def test_deepspeed_extra_args_are_checked_like_all_others(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_text(
        "num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 8\npos_emb: rotary\nbatch_size: 1\n"
        "deepspeed_extra_args:\n  comms_logger: {enabled: true}\n"
    )
    config = config_from_files([path])
    assert resolve(config, 1, 100).deepspeed["comms_logger"] == {"enabled": True}
    assert config.source("comms_logger").line == 8
    path.write_text(
        "dump_state: true\ndeepspeed_extra_args: {dump_state: false, comms_loger: {}, elasticity: {enabled: true}}\n"
    )
    found = problems_of_files(path)
    assert (
        found.items() >= {"dump_state": ("a.yml", 1), "comms_loger": ("a.yml", 2), "elasticity": ("a.yml", 2)}.items()
    )
    path.write_text("deepspeed_extra_args: 5\n")
    assert "deepspeed_extra_args" in problems_of_files(path)


def test_a_wrong_type_does_not_hide_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_text("num_layers: four\nhidden_size: 66\nnum_attention_heads: 4\nsed: 3\nmin_lr: 1\nseq_length: 8\n")
    found = problems_of_files(path)
    assert {key: line for key, (_, line) in found.items()} == {"num_layers": 1, "hidden_size": 2, "sed": 4, "min_lr": 5}


def test_duplicates_and_bad_overrides_do_not_hide_the_rest(tmp_path: Path) -> None:
    a, b = tmp_path / "a.yml", tmp_path / "b.yml"
    a.write_text("seed: 1\nseed: 2\nhidden_size: 66\nnum_attention_heads: 4\nzero_optimization: {stage: 3, x: 1}\n")
    b.write_text("seed: 3\npipe_parallel_size: 2\nnum_layers: 4\nseq_length: 8\npos_emb: rotary\n")
    with pytest.raises(ConfigError) as caught:
        config_from_files([a, b], overrides=["nonsense", "min_lr=1"])
    found = [(problem.keys[0], *place(problem)) for problem in caught.value.problems]
    assert found == [
        ("seed", "a.yml", 2),
        ("hidden_size", "a.yml", 3),
        (f"{ZERO}.x", "a.yml", 5),
        (f"{ZERO}.stage", "a.yml", 5),
        ("seed", "b.yml", 1),
        ("nonsense", "", 0),
        ("min_lr", "", 0),
    ]
    assert caught.value.problems[-1].source == COMMAND_LINE


def test_messages_name_the_places_of_all_values(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("hidden_size: 66\nnum_layers: 2\nseq_length: 8\npos_emb: rotary\nbatch_size: 1\n")
    (tmp_path / "b.yml").write_text("\nnum_attention_heads: 4\n")
    config = config_from_files(["a", "b"], conf_dir=tmp_path, overrides=["model_parallel_size=3"])
    with pytest.raises(ConfigError) as caught:
        resolve(config, 3, 100)
    text = str(caught.value)
    assert f"{tmp_path}/a.yml:1: `hidden_size: 66`" in text
    assert f"`num_attention_heads: 4` ({tmp_path}/b.yml:2)" in text
    assert "`model_parallel_size: 3` (--set)" in text


def test_padded_vocabulary(tiny):
    plan = resolve(NeoXConfig.from_flat({**tiny, "model_parallel_size": 2}), 2, 300)
    assert (plan.vocab_size, plan.padded_vocab_size) == (300, 512)
    plan = resolve(NeoXConfig.from_flat({**tiny, "padded_vocab_size": 304}), 1, 300)
    assert plan.padded_vocab_size == 304
    assert plan.layers.padded_vocab_size == 304


def test_missing_for_training(tiny):
    del tiny["train_iters"]
    missing = missing_for_training(NeoXConfig.from_flat(tiny))
    assert [problem.keys[0] for problem in missing] == ["train_iters"]


def test_every_key_is_read_somewhere():
    """No setting is ignored in silence: each key of a section is named by code outside the sections themselves.

    A key that accepts a single value decides nothing.
    """
    root = Path(__file__).parents[3]
    files = [root / "deepy.py", root / "train.py", *root.glob("neox/**/*.py"), *root.glob("tools/*.py")]
    declaring = {"sections", "rules"}
    described = {"reference.py", "keys.py"}
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
