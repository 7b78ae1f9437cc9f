"""Keys of optimizer, schedule, training and data."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.unsupported.key import UnsupportedKey, keys

_SPLITS = ("train", "valid", "test")


def optimizer_and_schedule() -> Iterator[UnsupportedKey]:
    """Yield keys about optimizer and schedule."""
    yield from keys(
        "optimizer",
        "v2.0",
        "refused",
        "bitsandbytes is not used; optimizer.type: Adam works",
        ("use_bnb_optimizer", "bool", False),
    )
    yield from keys(
        "schedule",
        "v2.0",
        "no effect",
        "the schedule always follows the configuration and the iteration",
        ("override_lr_scheduler", "bool", False),
    )
    yield from keys(
        "schedule",
        "v2.0",
        "refused",
        "the schedule follows the configuration, not the checkpoint; give the old run's keys",
        ("use_checkpoint_lr_scheduler", "bool", False),
    )
    yield from keys(
        "schedule",
        "v2.0",
        "refused",
        "the schedule is this project's, not DeepSpeed's; use lr_decay_style, warmup, min_lr",
        ("scheduler", "dict", None),
    )
    yield from keys(
        "optimizer",
        "v2.0",
        "refused",
        "muP is not implemented",
        ("use_mup", "bool", False),
        ("coord_check", "bool", False),
        ("save_base_shapes", "bool", False),
        ("base_shapes_file", "str", None),
    )
    yield from keys(
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


def training() -> Iterator[UnsupportedKey]:
    """Yield keys about training."""
    section = "training"
    yield from keys(
        section,
        "v2.0",
        "no effect",
        "recompute here never needs to synchronise the device",
        ("synchronize_each_layer", "bool", False),
    )
    yield from keys(
        section,
        "v2.0",
        "no effect",
        "kept activations are not divided over tensor ranks; each holds a layer's input whole",
        ("partition_activations", "bool", False),
    )
    yield from keys(
        section,
        "v2.0",
        "no effect",
        "recompute is chosen by checkpoint_activations alone",
        ("deepspeed_activation_checkpointing", "bool", True),
        ("contiguous_checkpointing", "bool", False),
        ("profile_backward", "bool", False),
    )
    yield from keys(
        section,
        "v2.0",
        "refused",
        "kept activations stay on the GPU; lower the micro batch instead",
        ("checkpoint_in_cpu", "bool", False),
    )
    yield from keys(section, "v2.0", "refused", "perplexity is reported per token", ("char_level_ppl", "bool", False))
    yield from keys(section, "v2.0", "refused", "ADLR's scheduler is not known", ("adlr_autoresume", "bool", False))
    yield from keys(section, "v2.0", "dormant", "used with adlr_autoresume", ("adlr_autoresume_interval", "int", 1000))
    yield from keys(
        section, "v2.0", "refused", "models are exported to Hugging Face, not to ONNX", ("onnx_safe", "bool", False)
    )
    yield from keys(
        section, "v2.0", "refused", "process groups are built at the start", ("lazy_mpu_init", "bool", False)
    )
    yield from keys(section, "later", "refused", "is not implemented", ("z_loss", "float", 0.0))
    yield from keys(section, "later", "refused", "give train_iters", ("train_epochs", "int", None))
    yield from keys(
        section,
        "later",
        "refused",
        "the objective is next-token prediction",
        ("train_impl", "str", "normal"),
        ("dataset_impl", "str", "gpt2"),
    )
    yield from keys(
        section,
        "later",
        "refused",
        "weights are not served to other programs while training; tools/serve.py serves a checkpoint",
        ("serve_model_weights", "bool", False),
    )
    yield from keys(
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
        ("weight_server_port", "int", 6000),
        ("online_dataserver_ips", "str", "localhost"),
        ("online_dataserver_ports", "int", 10000),
    )


def data() -> Iterator[UnsupportedKey]:
    """Yield keys about data."""
    section = "data"
    yield from keys(section, "v2.0", "dormant", "used with BERT's data", ("short_seq_prob", "float", 0.1))
    yield from keys(
        section,
        "v2.0",
        "no effect",
        "index maps are built where they are missing, by one process of a file system",
        ("use_shared_fs", "bool", True),
    )
    yield from keys(
        "checkpoint",
        "v2.0",
        "no effect",
        "random streams follow from the seed, the iteration and the rank",
        ("no_load_rng", "bool", False),
    )
    yield from keys(
        section,
        "later",
        "refused",
        "labels are the next tokens of train_data_paths",
        *((f"{split}_{kind}_data_paths", "list", None) for split in _SPLITS for kind in ("label", "reward")),
    )
    yield from keys(
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
    yield from keys(
        section,
        "later",
        "refused",
        "samples are packed from consecutive documents",
        ("pack_impl", "str", "packed"),
        ("allow_chopped", "bool", True),
    )
    yield from keys(
        "checkpoint", "later", "refused", "checkpoints are written to a file system", ("s3_path", "str", None)
    )
    yield from keys("checkpoint", "later", "dormant", "used with s3_path", ("s3_chunk_size", "int", 104857600))
