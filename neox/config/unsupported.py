"""gpt-neox's keys that belong to no section here: known by name, each with the reason and the way that works here.

`refused`: an error unless the value means off. `dormant`: read by gpt-neox only with another feature, which is refused;
any value loads. `no effect`: gpt-neox's way of doing something that happens differently here; loads with a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

Since = Literal["v2.0", "later"]
Status = Literal["refused", "dormant", "no effect"]


@dataclass(frozen=True)
class UnsupportedKey:
    """One such key: `default` is gpt-neox's, under which (or None) the feature is off."""

    name: str
    type: str
    default: Any
    section: str
    since: Since
    status: Status
    reason: str

    def is_off(self, value: Any) -> bool:
        """Whether a value asks for nothing: gpt-neox's default, None, or a block that is empty or not enabled."""
        if value is None or value == self.default:
            return True
        return self.type == "dict" and isinstance(value, Mapping) and not value.get("enabled", bool(value))


def _keys(
    section: str, since: Since, status: Status, reason: str, *keys: tuple[str, str, Any]
) -> Iterator[UnsupportedKey]:
    for name, kind, default in keys:
        yield UnsupportedKey(name, kind, default, section, since, status, reason)


def _positions_and_norms() -> Iterator[UnsupportedKey]:
    model = "model"
    yield from _keys(model, "v2.0", "dormant", "used with norm: rmsnorm", ("rms_norm_epsilon", "float", 1e-8))
    yield from _keys(model, "v2.0", "dormant", "used with norm: scalenorm", ("scalenorm_epsilon", "float", 1e-8))
    yield from _keys(
        model,
        "v2.0",
        "dormant",
        "used with pos_emb: rpe",
        ("rpe_num_buckets", "int", 32),
        ("rpe_max_distance", "int", 128),
    )
    yield from _keys(
        model,
        "v2.0",
        "refused",
        "offsets learned positions, not implemented",
        ("opt_pos_emb_offset", "int", 0),
    )
    yield from _keys(model, "v2.0", "dormant", "used with attention kind gmlp or amlp", ("gmlp_attn_dim", "int", 64))


def _network_shapes() -> Iterator[UnsupportedKey]:
    model = "model"
    yield from _keys(model, "v2.0", "refused", "use gpt_j_residual alone", ("gpt_j_tied", "bool", False))
    yield from _keys(
        model,
        "v2.0",
        "refused",
        "sparse attention is not implemented; use attention kind global or flash",
        ("sparsity_config", "dict", None),
    )
    yield from _keys(
        model, "v2.0", "refused", "layers do not share parameters here", ("num_unique_layers", "int", None)
    )
    yield from _keys(model, "v2.0", "dormant", "used with num_unique_layers", ("param_sharing_style", "str", "grouped"))
    yield from _keys(model, "v2.0", "refused", "soft prompts are not implemented", ("soft_prompt_tuning", "dict", None))
    yield from _keys(
        model,
        "later",
        "refused",
        "the MLP is 4 x hidden_size wide, as in v2.0",
        ("intermediate_size", "int", None),
        ("mlp_multiple_of", "int", 1),
        ("expansion_factor", "float", None),
    )
    yield from _keys(
        model, "later", "refused", "every head has keys and values of its own", ("num_kv_heads", "int", None)
    )
    yield from _keys(
        model, "later", "refused", "attention reaches over the whole sequence", ("sliding_window_width", "int", None)
    )
    yield from _keys(
        model, "later", "refused", "queries and keys are not normalised", ("use_qk_layernorm", "bool", False)
    )
    yield from _keys(
        model,
        "later",
        "refused",
        "every norm and linear layer of GPT-NeoX has a bias",
        ("use_bias_in_norms", "bool", True),
        ("use_bias_in_attn_linear", "bool", True),
        ("use_bias_in_mlp", "bool", True),
    )
    yield from _keys(
        model,
        "later",
        "dormant",
        "used with the rwkv architecture",
        ("dim_att", "int", None),
        ("head_size", "int", None),
        ("ffn_dim", "int", None),
    )
    yield from _keys(
        model,
        "later",
        "dormant",
        "used with the mamba architecture",
        ("mamba_selective_scan_fusion", "bool", False),
        ("mamba_causal_conv_fusion", "bool", False),
        ("mamba_inner_func_fusion", "bool", False),
        ("mamba_selective_fp32_params", "bool", True),
        ("mamba_use_bias_in_conv", "bool", True),
        ("mamba_use_bias_in_linears", "bool", False),
    )
    yield from _keys(
        model,
        "later",
        "refused",
        "mixture of experts is not implemented",
        ("moe_num_experts", "int", 1),
    )
    yield from _keys(
        model,
        "later",
        "dormant",
        "used with moe_num_experts",
        ("moe_expert_interval", "int", 1),
        ("moe_top_k", "int", 1),
        ("moe_router_type", "str", "sinkhorn"),
        ("moe_lbl_in_fp32", "bool", False),
        ("moe_jitter_eps", "float", None),
    )


def _kernels_and_numbers() -> Iterator[UnsupportedKey]:
    model = "model"
    yield from _keys(
        model,
        "v2.0",
        "refused",
        "the fused softmax here is causal: use scaled_upper_triang_masked_softmax_fusion",
        ("scaled_masked_softmax_fusion", "bool", False),
    )
    yield from _keys(
        model,
        "v2.0",
        "refused",
        "bias, dropout and residual are not one kernel; leave it out, the results are the same",
        ("bias_dropout_fusion", "bool", False),
    )
    yield from _keys(
        model,
        "v2.0",
        "refused",
        "the cross entropy is computed in fp32; leave it out",
        ("fp16_lm_cross_entropy", "bool", False),
    )
    yield from _keys(
        model,
        "v2.0",
        "no effect",
        "initial weights are the same on every device and for every degree",
        ("use_cpu_initialization", "bool", False),
    )
    yield from _keys(
        model,
        "v2.0",
        "no effect",
        "every attention here computes its softmax in fp32",
        ("attention_softmax_in_fp32", "bool", False),
    )
    yield from _keys(
        model,
        "later",
        "refused",
        "not a kernel here; leave it out, the results are the same",
        ("layernorm_fusion", "bool", False),
        ("rmsnorm_fusion", "bool", False),
        ("rope_fusion", "bool", False),
        ("use_flashattn_swiglu", "bool", False),
    )
    yield from _keys(
        model,
        "later",
        "no effect",
        "kernels are compiled by Triton into its own cache",
        ("fused_kernels_build_path", "str", None),
    )
    yield from _keys(
        model,
        "later",
        "refused",
        "rotary frequencies are computed, not stored; checkpoints load with and without them",
        ("rotary_save_freqs_buffer", "bool", False),
    )
    yield from _keys(
        model,
        "later",
        "refused",
        "Transformer Engine is not used",
        ("te_columnparallel", "bool", False),
        ("te_rowparallel", "bool", False),
        ("te_layernorm_mlp", "bool", False),
        ("te_mha", "bool", False),
        ("te_fp8_mha", "bool", False),
    )
    yield from _keys(
        model,
        "later",
        "dormant",
        "used with Transformer Engine",
        ("te_fp8_format", "str", "hybrid"),
        ("te_fp8_wgrad", "bool", True),
        ("te_fp8_amax_history_len", "int", 1),
        ("te_fp8_amax_compute_algo", "str", "most_recent"),
        ("te_fp8_margin", "int", 0),
    )
    yield from _keys(
        "parallelism", "later", "refused", "sequences are not divided over ranks", ("sequence_parallel", "bool", False)
    )


def _optimizer_and_schedule() -> Iterator[UnsupportedKey]:
    yield from _keys(
        "optimizer",
        "v2.0",
        "refused",
        "bitsandbytes is not used; optimizer.type: Adam works",
        ("use_bnb_optimizer", "bool", False),
    )
    yield from _keys(
        "schedule",
        "v2.0",
        "no effect",
        "the schedule always follows the configuration and the iteration",
        ("override_lr_scheduler", "bool", False),
    )
    yield from _keys(
        "schedule",
        "v2.0",
        "refused",
        "the schedule follows the configuration, not the checkpoint; give the old run's keys",
        ("use_checkpoint_lr_scheduler", "bool", False),
    )
    yield from _keys(
        "schedule",
        "v2.0",
        "refused",
        "the schedule is this project's, not DeepSpeed's; use lr_decay_style, warmup, min_lr",
        ("scheduler", "dict", None),
    )
    yield from _keys(
        "optimizer",
        "v2.0",
        "refused",
        "muP is not implemented",
        ("use_mup", "bool", False),
        ("coord_check", "bool", False),
        ("save_base_shapes", "bool", False),
        ("base_shapes_file", "str", None),
    )
    yield from _keys(
        "optimizer",
        "v2.0",
        "dormant",
        "used with use_mup",
        ("mup_init_scale", "float", 1.0),
        ("mup_attn_temp", "float", 1.0),
        ("mup_output_temp", "float", 1.0),
        ("mup_embedding_mult", "float", 1.0),
        ("mup_rp_embedding_mult", "float", 1.0),
        ("mup_width_scale", "int", 2),
    )


def _logging() -> Iterator[UnsupportedKey]:
    section = "logging"
    yield from _keys(section, "v2.0", "refused", "one rank reports to wandb", ("wandb_init_all_ranks", "bool", False))
    yield from _keys(
        section,
        "v2.0",
        "refused",
        "not measured here; log_grad_norm is",
        ("log_grad_pct_zeros", "bool", False),
        ("log_param_norm", "bool", False),
        ("log_optimizer_states", "bool", False),
        ("log_gradient_noise_scale", "bool", False),
    )
    yield from _keys(
        section,
        "v2.0",
        "dormant",
        "used with log_gradient_noise_scale",
        ("gradient_noise_scale_n_batches", "int", 5),
        ("gradient_noise_scale_cpu_offload", "bool", False),
    )
    yield from _keys(
        section,
        "later",
        "refused",
        "use use_wandb or tensorboard_dir",
        ("use_comet", "bool", None),
    )
    yield from _keys(
        section,
        "later",
        "dormant",
        "used with use_comet",
        ("comet_workspace", "str", None),
        ("comet_project", "str", None),
        ("comet_experiment_name", "str", None),
        ("comet_tags", "list", None),
        ("comet_others", "dict", None),
        ("comet_experiment", "Any", None),
    )
    yield from _keys(
        section,
        "later",
        "refused",
        "no profiler is built in; flops_profiler and wall_clock_breakdown are DeepSpeed's and work",
        ("memory_profiling", "bool", False),
        ("profile", "bool", False),
    )
    yield from _keys(
        section,
        "later",
        "dormant",
        "used with profile or memory_profiling",
        ("memory_profiling_path", "str", None),
        ("profile_step_start", "int", 10),
        ("profile_step_stop", "int", 12),
    )


def _set_by_the_program() -> Iterator[UnsupportedKey]:
    yield from _keys(
        "runner",
        "v2.0",
        "refused",
        "follows from the hosts; use num_gpus, num_nodes or global_num_gpus",
        ("world_size", "int", None),
        ("rank", "int", None),
        ("local_rank", "int", None),
    )
    yield from _keys("runner", "v2.0", "refused", "is the first argument of deepy.py", ("user_script", "str", None))
    yield from _keys("runner", "v2.0", "refused", "are the arguments of deepy.py", ("config_files", "dict", None))
    yield from _keys("logging", "v2.0", "refused", "is found by the program", ("git_hash", "str", None))
    yield from _keys(
        "checkpoint",
        "v2.0",
        "refused",
        "follows from checkpoint_factor and extra_save_iters",
        ("save_iters", "list", None),
    )
    yield from _keys(
        "training",
        "v2.0",
        "refused",
        "follows from train_iters, eval_iters and the split",
        ("do_train", "int", None),
        ("do_valid", "int", None),
        ("do_test", "int", None),
    )


def _training() -> Iterator[UnsupportedKey]:
    section = "training"
    yield from _keys(
        section,
        "v2.0",
        "no effect",
        "recompute here never needs to synchronise the device",
        ("synchronize_each_layer", "bool", False),
    )
    yield from _keys(
        section,
        "v2.0",
        "no effect",
        "kept activations are not divided over tensor ranks; each holds a layer's input whole",
        ("partition_activations", "bool", False),
    )
    yield from _keys(
        section,
        "v2.0",
        "no effect",
        "recompute is chosen by checkpoint_activations alone",
        ("deepspeed_activation_checkpointing", "bool", True),
        ("contiguous_checkpointing", "bool", False),
        ("profile_backward", "bool", False),
    )
    yield from _keys(
        section,
        "v2.0",
        "refused",
        "kept activations stay on the GPU; lower the micro batch instead",
        ("checkpoint_in_cpu", "bool", False),
    )
    yield from _keys(section, "v2.0", "refused", "perplexity is reported per token", ("char_level_ppl", "bool", False))
    yield from _keys(
        section,
        "v2.0",
        "no effect",
        "every checkpoint is verified by its manifest's checksums",
        ("checkpoint_validation_with_forward_pass", "bool", False),
    )
    yield from _keys(section, "v2.0", "refused", "ADLR's scheduler is not known", ("adlr_autoresume", "bool", False))
    yield from _keys(section, "v2.0", "dormant", "used with adlr_autoresume", ("adlr_autoresume_interval", "int", 1000))
    yield from _keys(
        section, "v2.0", "refused", "models are exported to Hugging Face, not to ONNX", ("onnx_safe", "bool", False)
    )
    yield from _keys(
        section, "v2.0", "refused", "process groups are built at the start", ("lazy_mpu_init", "bool", False)
    )
    yield from _keys(section, "later", "refused", "is not implemented", ("z_loss", "float", 0.0))
    yield from _keys(section, "later", "refused", "give train_iters", ("train_epochs", "int", None))
    yield from _keys(
        section,
        "later",
        "refused",
        "the objective is next-token prediction",
        ("train_impl", "str", "normal"),
        ("dataset_impl", "str", "gpt2"),
    )
    yield from _keys(
        section,
        "later",
        "dormant",
        "used with train_impl other than normal",
        ("dpo_fp32", "bool", True),
        ("dpo_reference_free", "bool", False),
        ("dpo_beta", "float", 0.1),
        ("kto_fp32", "bool", True),
        ("kto_desirable_weight", "float", 1.0),
        ("kto_undesirable_weight", "float", 1.0),
        ("kto_beta", "float", 0.1),
        ("fp32_reinforce", "bool", True),
        ("kl_impl", "str", "mse"),
        ("kl_div_beta", "float", 0.1),
        ("reinforce_leave_one_out", "bool", False),
        ("precompute_model_name", "str", None),
        ("serve_model_weights", "bool", False),
        ("weight_server_port", "int", 6000),
        ("online_dataserver_ips", "str", "localhost"),
        ("online_dataserver_ports", "int", 10000),
    )


def _data() -> Iterator[UnsupportedKey]:
    section = "data"
    yield from _keys(section, "v2.0", "dormant", "used with BERT's data", ("short_seq_prob", "float", 0.1))
    yield from _keys(
        section,
        "v2.0",
        "no effect",
        "index maps are built where they are missing, by one process of a file system",
        ("use_shared_fs", "bool", True),
    )
    yield from _keys(
        "checkpoint",
        "v2.0",
        "no effect",
        "random streams follow from the seed, the iteration and the rank",
        ("no_load_rng", "bool", False),
    )
    yield from _keys(
        section,
        "later",
        "refused",
        "labels are the next tokens of train_data_paths",
        *((f"{split}_{kind}_data_paths", "list", None) for split in _SPLITS for kind in ("label", "reward")),
    )
    yield from _keys(
        section,
        "later",
        "refused",
        "pairs of texts are for preference training, which is not implemented",
        *(
            (f"{sign}_{split}{kind}_data_paths", "list", None)
            for sign in ("pos", "neg")
            for split in _SPLITS
            for kind in ("", "_label")
        ),
    )
    yield from _keys(
        section,
        "later",
        "refused",
        "samples are packed from consecutive documents",
        ("pack_impl", "str", "packed"),
        ("allow_chopped", "bool", True),
    )
    yield from _keys(
        "checkpoint", "later", "refused", "checkpoints are written to a file system", ("s3_path", "str", None)
    )
    yield from _keys("checkpoint", "later", "dormant", "used with s3_path", ("s3_chunk_size", "int", 104857600))


_SPLITS = ("train", "valid", "test")


def _deepspeed() -> Iterator[UnsupportedKey]:
    section = "deepspeed"
    yield from _keys(section, "v2.0", "refused", "DeepSpeed is always used", ("deepspeed", "bool", True))
    yield from _keys(section, "v2.0", "refused", "gradients are dense here", ("sparse_gradients", "bool", False))
    yield from _keys(section, "v2.0", "refused", "Apex's amp is not used; use fp16 or bf16", ("amp", "dict", None))
    yield from _keys(
        section,
        "v2.0",
        "refused",
        "every sequence has seq_length tokens",
        ("curriculum_learning", "dict", None),
        ("curriculum_seqlen", "int", 0),
    )
    yield from _keys(
        section,
        "v2.0",
        "refused",
        "DeepSpeed's autotuning is not used; `--dry-run` says what fits",
        ("autotuning", "dict", None),
        ("autotuning_run", "str", None),
    )
    yield from _keys(
        section,
        "v2.0",
        "refused",
        "DeepScale is not used",
        ("deepscale", "bool", False),
        ("deepscale_config", "str", None),
    )
    yield from _keys(
        section,
        "v2.0",
        "refused",
        "use CUDA_VISIBLE_DEVICES or include to choose devices",
        ("detect_nvlink_pairs", "bool", False),
    )
    yield from _keys(
        section,
        "later",
        "refused",
        "use checkpoint_activations and checkpoint_num_layers",
        ("activation_checkpointing", "dict", None),
    )
    yield from _keys(
        section,
        "later",
        "refused",
        "use log_dir, tensorboard_dir or use_wandb",
        ("tensorboard", "dict", None),
        ("wandb", "dict", None),
        ("csv_monitor", "dict", None),
    )
    yield from _keys(
        section,
        "later",
        "refused",
        "is not supported by this training loop",
        ("sparse_attention", "dict", None),
        ("data_efficiency", "dict", None),
        ("elasticity", "dict", None),
        ("compression_training", "dict", None),
    )
    yield from _keys(
        section, "later", "refused", "checkpoints are written by this project", ("checkpoint", "dict", None)
    )
    yield from _keys(
        section,
        "later",
        "refused",
        "write DeepSpeed's keys at the top level; those that are known work",
        ("deepspeed_extra_args", "dict", None),
    )


def _all() -> Iterator[UnsupportedKey]:
    yield from _positions_and_norms()
    yield from _network_shapes()
    yield from _kernels_and_numbers()
    yield from _optimizer_and_schedule()
    yield from _logging()
    yield from _set_by_the_program()
    yield from _training()
    yield from _data()
    yield from _deepspeed()


UNSUPPORTED: Mapping[str, UnsupportedKey] = MappingProxyType({key.name: key for key in _all()})
