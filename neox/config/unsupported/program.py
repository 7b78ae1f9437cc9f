"""Keys of logging, of DeepSpeed, and those that gpt-neox sets itself."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.unsupported.key import UnsupportedKey, keys


def logging() -> Iterator[UnsupportedKey]:
    """Yield keys about logging."""
    section = "logging"
    yield from keys(section, "v2.0", "refused", "one rank reports to wandb", ("wandb_init_all_ranks", "bool", False))
    yield from keys(
        section,
        "v2.0",
        "refused",
        "not measured here; log_grad_norm is",
        ("log_grad_pct_zeros", "bool", False),
        ("log_param_norm", "bool", False),
        ("log_optimizer_states", "bool", False),
        ("log_gradient_noise_scale", "bool", False),
    )
    yield from keys(
        section,
        "v2.0",
        "dormant",
        "used with log_gradient_noise_scale",
        ("gradient_noise_scale_n_batches", "int", 5),
        ("gradient_noise_scale_cpu_offload", "bool", False),
    )
    yield from keys(
        section,
        "later",
        "refused",
        "use use_wandb or tensorboard_dir",
        ("use_comet", "bool", None),
    )
    yield from keys(
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
    yield from keys(
        section,
        "later",
        "refused",
        "no profiler is built in; flops_profiler and wall_clock_breakdown are DeepSpeed's and work",
        ("memory_profiling", "bool", False),
        ("profile", "bool", False),
    )
    yield from keys(
        section,
        "later",
        "dormant",
        "used with profile or memory_profiling",
        ("memory_profiling_path", "str", None),
        ("profile_step_start", "int", 10),
        ("profile_step_stop", "int", 12),
    )


def set_by_the_program() -> Iterator[UnsupportedKey]:
    """Yield keys about set by the program."""
    yield from keys(
        "runner",
        "v2.0",
        "refused",
        "follows from the hosts; use num_gpus, num_nodes or global_num_gpus",
        ("world_size", "int", None),
        ("rank", "int", None),
        ("local_rank", "int", None),
    )
    yield from keys("runner", "v2.0", "refused", "is the first argument of deepy.py", ("user_script", "str", None))
    yield from keys("runner", "v2.0", "refused", "are the arguments of deepy.py", ("config_files", "dict", None))
    yield from keys("logging", "v2.0", "refused", "is found by the program", ("git_hash", "str", None))
    yield from keys(
        "checkpoint",
        "v2.0",
        "refused",
        "follows from checkpoint_factor and extra_save_iters",
        ("save_iters", "list", None),
    )
    yield from keys(
        "training",
        "v2.0",
        "refused",
        "follows from train_iters, eval_iters and the split",
        ("do_train", "int", None),
        ("do_valid", "int", None),
        ("do_test", "int", None),
    )


def deepspeed() -> Iterator[UnsupportedKey]:
    """Yield keys about deepspeed."""
    section = "deepspeed"
    yield from keys(section, "v2.0", "refused", "DeepSpeed is always used", ("deepspeed", "bool", True))
    yield from keys(section, "v2.0", "refused", "gradients are dense here", ("sparse_gradients", "bool", False))
    yield from keys(section, "v2.0", "refused", "Apex's amp is not used; use fp16 or bf16", ("amp", "dict", None))
    yield from keys(
        section,
        "v2.0",
        "refused",
        "every sequence has seq_length tokens",
        ("curriculum_learning", "dict", None),
        ("curriculum_seqlen", "int", 0),
    )
    yield from keys(
        section,
        "v2.0",
        "refused",
        "DeepSpeed's autotuning is not used; `--dry-run` says what fits",
        ("autotuning", "dict", None),
        ("autotuning_run", "str", None),
    )
    yield from keys(
        section,
        "v2.0",
        "refused",
        "DeepScale is not used",
        ("deepscale", "bool", False),
        ("deepscale_config", "str", None),
    )
    yield from keys(
        section,
        "v2.0",
        "refused",
        "use CUDA_VISIBLE_DEVICES or include to choose devices",
        ("detect_nvlink_pairs", "bool", False),
    )
    yield from keys(
        section,
        "later",
        "refused",
        "use checkpoint_activations and checkpoint_num_layers",
        ("activation_checkpointing", "dict", None),
    )
    yield from keys(
        section,
        "later",
        "refused",
        "use log_dir, tensorboard_dir or use_wandb",
        ("tensorboard", "dict", None),
        ("wandb", "dict", None),
        ("csv_monitor", "dict", None),
    )
    yield from keys(
        section,
        "later",
        "refused",
        "is not supported by this training loop",
        ("sparse_attention", "dict", None),
        ("data_efficiency", "dict", None),
        ("elasticity", "dict", None),
        ("compression_training", "dict", None),
    )
    yield from keys(
        section, "later", "refused", "checkpoints are written by this project", ("checkpoint", "dict", None)
    )
