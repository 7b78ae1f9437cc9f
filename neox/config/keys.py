"""Table of gpt-neox's flat keys: type, default, status here, and alternative spellings.

`neox_keys.tsv` has a row for every key of gpt-neox v2.0 and later, with gpt-neox's own type and default (as JSON), and
the section of `neox.config.sections` that it belongs to; `since` is v2.0, or the date of the change that brought the
key, with the date of the change that removed it. It also has a row for every key of DeepSpeed that is not a
field of a section; a dotted one stands in a block. The column `status` says what happens to the key here:

- `works`: the key is a field of that section.
- `alias`: the key is another spelling of a setting (see `ALIASES`).
- `refused`: the key is an error, with the reason, unless its value means off.
- `dormant`: gpt-neox, or DeepSpeed, reads the key only together with a refused feature. Loads, with a note unless it is
  the default.
- `no effect`: what the key asks for is done differently here. Loads, with a note unless it is the default.

A field of a section that is not in the table is this project's own key.
"""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from neox.config.sections.data import SPLITS

_SWITCHES: Mapping[str, str] = MappingProxyType({"compile": "deepcompile", "tensor_parallel": "autotp_size"})
"""Blocks of DeepSpeed -> the key that switches them on, if its name is not `enabled`."""
_ON_IF_GIVEN = ("zero_optimization.zenflow", "datastates_ckpt")


@dataclass(frozen=True)
class NeoXKey:
    """One row of the table: a flat key of gpt-neox, and what happens to it here."""

    key: str
    section: str
    type: str
    default: Any
    since: str
    status: str
    reason: str

    @property
    def added(self) -> datetime.date | None:
        """Date of the change that brought the key to gpt-neox; None for v2.0, earlier, and other owners."""
        began = self.since.partition(" to ")[0]
        return datetime.date.fromisoformat(began) if began.startswith("20") else None

    @property
    def removed(self) -> datetime.date | None:
        """Date of the change that removed the key from gpt-neox; None if it is still there, and for other owners."""
        end = self.since.partition(" to ")[2]
        return datetime.date.fromisoformat(end) if end else None

    def is_off(self, value: Any) -> bool:
        """Whether a value asks for nothing: the owner's default, None, or a block that is off.

        A block is off if the key that switches it is off, which may be that key's default. A block without such a key
        is off if it is empty, or if all of its keys have their defaults; `_ON_IF_GIVEN` are on even then.
        """
        if value is None or value == self.default:
            return True
        if self.type != "dict" or not isinstance(value, Mapping):
            return False
        switch = _SWITCHES.get(self.key, "enabled")
        if switch in value:
            return value[switch] in (False, 0, None)
        if self.key in _ON_IF_GIVEN:
            return False
        default = NEOX_KEYS.get(f"{self.key}.{switch}")
        if default is not None:
            return not value or not default.default
        inner = {name: NEOX_KEYS.get(f"{self.key}.{name}") for name in value}
        return all(row is not None and row.is_off(value[name]) for name, row in inner.items())


@dataclass(frozen=True)
class Alias:
    """The setting that an alternative spelling stands for.

    gpt-neox derives these keys from their targets and silently overwrites what the user wrote; here they set the
    target, and a contradiction is refused.

    Attributes:
        target: Flat key, or dotted path into a block.
        values: Values of the target that agree with a given value, for a key that implies a value instead of carrying
            it. The first one is set if the target is absent. None for a key that carries the value itself.
        renamed_in: Version that gave a key of ours its present name, as `0.3`. Versions of this number read the old
            name with a note, and later ones refuse it (docs/upgrading.md). None for names of others, which stay.
    """

    target: str
    values: Mapping[Any, tuple[Any, ...]] | None = None
    renamed_in: str | None = None

    def is_over(self, version: str) -> bool:
        """Return whether a version of this library no longer reads the name."""
        return self.renamed_in is not None and _minor(version) > _minor(self.renamed_in)

    def agreeing(self, value: Any) -> tuple[Any, ...]:
        """Return the target's values that agree with a given value; an empty tuple if it implies nothing."""
        if self.values is None:
            return (value,)
        if not isinstance(value, bool):
            return ()
        return self.values.get(value, ())


def _minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _read_table() -> dict[str, NeoXKey]:
    table = {}
    with Path(__file__).with_name("neox_keys.tsv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            default = json.loads(row.pop("default"))
            table[row["key"]] = NeoXKey(default=default, **row)
    return table


NEOX_KEYS: Mapping[str, NeoXKey] = MappingProxyType(_read_table())

UNSUPPORTED: Mapping[str, NeoXKey] = MappingProxyType(
    {name: key for name, key in NEOX_KEYS.items() if key.status not in ("works", "alias")}
)

UNSUPPORTED_IN_BLOCKS: tuple[str, ...] = tuple(name for name in UNSUPPORTED if "." in name)
"""Dotted paths of the keys inside of blocks that do not work."""

ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        "batch_size": Alias("train_micro_batch_size_per_gpu"),
        "gas": Alias("gradient_accumulation_steps"),
        "clip_grad": Alias("gradient_clipping"),
        "optimizer_type": Alias("optimizer.type"),
        "lr": Alias("optimizer.params.lr"),
        "zero_stage": Alias("zero_optimization.stage"),
        "zero_reduce_scatter": Alias("zero_optimization.reduce_scatter"),
        "zero_contiguous_gradients": Alias("zero_optimization.contiguous_gradients"),
        "zero_reduce_bucket_size": Alias("zero_optimization.reduce_bucket_size"),
        "zero_allgather_bucket_size": Alias("zero_optimization.allgather_bucket_size"),
        "loss_scale": Alias("fp16.loss_scale"),
        "loss_scale_window": Alias("fp16.loss_scale_window"),
        "min_scale": Alias("fp16.min_loss_scale"),
        "hysteresis": Alias("fp16.hysteresis"),
        "dynamic_loss_scale": Alias("fp16.loss_scale", {True: (0, 0.0)}),
        "deepspeed_slurm": Alias("launcher", {True: ("slurm",)}),
        "deepspeed_mpi": Alias("launcher", {True: ("openmpi", "mvapich")}),
        "is_pipe_parallel": Alias("pipe_parallel_size", {}),  # compared by a rule
        "s3_path": Alias("checkpoint_mirror"),
        "s3_chunk_size": Alias("checkpoint_mirror_part_bytes"),
        "save_interval": Alias("checkpoint_factor"),
        "train_epochs": Alias("num_train_epochs"),
        "num_experts": Alias("moe_num_experts"),
        "moe_router_topk": Alias("moe_top_k"),
        "moe_input_jitter_eps": Alias("moe_jitter_eps"),
        "expert_interval": Alias("moe_expert_interval"),
        "moe_expert_parallel_size": Alias("expert_model_parallel_size"),
        "label_data_paths": Alias("train_label_data_paths"),
        "geglu": Alias("activation", {True: ("geglu",)}),
        "openai_gelu": Alias("activation", {True: ("gelu_tanh",)}),
        "rms_norm": Alias("norm", {True: ("rmsnorm_v2.0", "rmsnorm")}),
        "rpe": Alias("pos_emb", {True: ("rpe",)}),
        "genfile": Alias("sample_output_file"),
        "out_seq_length": Alias("maximum_tokens"),
        "slurm_comment": Alias("comment"),
        "zero_contigious_gradients": Alias("zero_optimization.contiguous_gradients"),
    }
)


# DeepSpeed's `activation_checkpointing` block: its keys -> gpt-neox's flat ones.
ACTIVATION_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "partition_activations": "partition_activations",
        "cpu_checkpointing": "checkpoint_in_cpu",
        "contiguous_memory_optimization": "contiguous_checkpointing",
        "synchronize_checkpoint_boundary": "synchronize_each_layer",
        "profile": "profile_backward",
    }
)


TOKENIZER_KEYS = ("tokenizer_type", "vocab_file", "merge_file", "added_tokens")
"""Keys of the tokenizer, which are replaced together; the first two must be given."""

REPLACEABLE = frozenset(
    {
        *TOKENIZER_KEYS,
        *(f"{split}_{what}" for split in SPLITS for what in ("data_paths", "data_weights", "label_data_paths")),
        *("data_path", "save", "load", "log_dir", "tensorboard_dir", "hostfile"),
    }
)
"""Keys that name files and directories of a machine; a later file may give them again."""


# Keys of Megatron, OneFlow (LiBai), FleetX, Colossal-AI, torchtitan and Hugging Face's Trainer -> what does it here.
OTHER_SYSTEMS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("pipeline_model_parallel_size", "pipeline_parallel_size", "pp_degree", "pipeline_parallel_degree"),
            "`pipe_parallel_size`",
        ),
        **dict.fromkeys(
            ("tensor_model_parallel_size", "tensor_parallel_size", "mp_degree", "tensor_parallel_degree", "tp_size"),
            "`model_parallel_size`",
        ),
        **dict.fromkeys(
            ("data_parallel_size", "dp_degree", "data_parallel_degree", "data_parallel_shard_degree"),
            "nothing: it is the number of ranks / (pipe_parallel_size x model_parallel_size)",
        ),
        **dict.fromkeys(("sharding_degree", "sharding_stage", "zero"), "`zero_optimization: {stage: 1}`"),
        **dict.fromkeys(
            ("micro_batch_size", "per_device_train_batch_size", "local_batch_size"), "`train_micro_batch_size_per_gpu`"
        ),
        **dict.fromkeys(("global_batch_size", "train_global_batch_size"), "`train_batch_size`"),
        **dict.fromkeys(
            ("gradient_accumulation", "accumulate_steps", "num_accumulation_steps"), "`gradient_accumulation_steps`"
        ),
        **dict.fromkeys(
            ("lr_warmup_fraction", "warmup_ratio", "warmup_rate"), "`warmup`, the same fraction of lr_decay_iters"
        ),
        **dict.fromkeys(
            ("warmup_steps", "warmup_iters"), "`lr_warmup_iters`, or `warmup`, their fraction of lr_decay_iters"
        ),
        **dict.fromkeys(("max_steps", "train_steps", "num_train_steps", "train_iter"), "`train_iters`"),
        **dict.fromkeys(("train_epoch", "num_epochs", "max_epochs", "epochs"), "`num_train_epochs`"),
        **dict.fromkeys(("encoder_num_layers", "num_hidden_layers", "n_layers"), "`num_layers`"),
        **dict.fromkeys(("n_heads", "num_heads", "num_attention_head"), "`num_attention_heads`"),
        **dict.fromkeys(("ffn_hidden_size",), "`intermediate_size`, or 4 x hidden_size if it is left out"),
        **dict.fromkeys(("dim", "n_embd", "d_model"), "`hidden_size`"),
        **dict.fromkeys(("max_seq_len", "seq_len", "max_seq_length", "encoder_seq_length"), "`seq_length`"),
        **dict.fromkeys(("learning_rate", "max_lr"), "`optimizer.params.lr`"),
        **dict.fromkeys(
            ("beta1", "beta2", "betas", "adam_beta1", "adam_beta2"), "`optimizer.params.betas: [BETA1, BETA2]`"
        ),
        **dict.fromkeys(("adam_eps", "adam_epsilon"), "`optimizer.params.eps`"),
        **dict.fromkeys(("max_grad_norm", "grad_clip", "max_norm"), "`gradient_clipping`"),
        **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_decay"), "`lr_decay_style`"),
        **dict.fromkeys(("eval_steps", "eval_freq"), "`eval_interval`"),
        **dict.fromkeys(("save_steps", "save_freq", "checkpoint_interval"), "`checkpoint_factor`"),
        **dict.fromkeys(("logging_steps", "logging_freq", "log_freq"), "`log_interval`"),
        **dict.fromkeys(("output_dir", "save_dir", "dump_folder"), "`save`"),
        **dict.fromkeys(("resume_from_checkpoint", "load_dir"), "`load`"),
        **dict.fromkeys(
            ("recompute_activations", "activations_checkpoint", "use_recompute", "gradient_checkpointing"),
            "`checkpoint_activations: true`",
        ),
        **dict.fromkeys(
            ("recompute_num_layers", "recompute_method"), "`checkpoint_num_layers`, neighbours recomputed together"
        ),
        **dict.fromkeys(("use_flash_attn", "use_flash_attention"), '`attention_config: [[["flash"], "all"]]`'),
        **dict.fromkeys(
            ("use_rdma", "nccl_socket_ifname", "use_infiniband"),
            "the environment: NCCL_IB_DISABLE, NCCL_IB_HCA and NCCL_SOCKET_IFNAME reach every rank",
        ),
        **dict.fromkeys(("nproc_per_node", "num_gpus_per_node", "gpus_per_node"), "`num_gpus`, or a hostfile's slots"),
        **dict.fromkeys(("tokenizer_model", "tokenizer_name_or_path", "tokenizer_path"), "`vocab_file`"),
        "rope_pct": "`rotary_pct`",
        "rotary_percentage": "`rotary_pct`",
        "attention_type": "`num_kv_heads` for grouped queries, and `attention_config` for kinds of attention",
        "attention_head_type": "`num_kv_heads`, which is num_attention_heads for `multihead`",
        "decay_lr_to": "`min_lr`, the learning rate itself: this fraction of optimizer.params.lr",
        "cooldown": "`lr_decay_style: WSD` with lr_wsd_decay_iters",
        "prenorm": "`norm_placement: input`, which is the default",
        "postnorm": "`norm_placement: output`, or `both`",
        "rotary_interleaved": "nothing: dimensions are rotated in halves, as in gpt-neox; false is that",
        "use_bias_in_qk_norm": "nothing: norms of queries and keys have no bias, but layernorm's with use_qk_layernorm",
        "use_separate_qk_norms": "`qk_norm: head` or `qk_norm: full`",
        "full_precision_lm_cross_entropy": "nothing: the cross entropy is always computed in fp32",
        "use_flash_cross_entropy": "nothing: the cross entropy is always computed in pieces",
        "no_checkpoint_arg_validation": "nothing: a checkpoint of another network is always refused",
        "s3_sync_interval": "nothing: each checkpoint is copied to checkpoint_mirror as soon as it is saved",
        "iteration_offset": "`iteration`, which names the checkpoint, or `finetune: true` to start from 0",
        "eval_batch_size": "nothing: evaluation has train_micro_batch_size_per_gpu",
        "wandb_name": "`wandb_run_name`",
        "loss_type": "`train_impl`, and `dpo_loss` with `train_impl: dpo`",
        "label_smoothing": "`dpo_label_smoothing`",
        "reference_free": "`dpo_reference_free`",
        "precompute_ref_log_probs": "nothing: they are always computed before training (`precompute_model_name`)",
        "desirable_weight": "`kto_desirable_weight`",
        "undesirable_weight": "`kto_undesirable_weight`",
        **dict.fromkeys(("report_to",), "`use_wandb: true` or `tensorboard_dir`"),
        **dict.fromkeys(("untie_embeddings_and_output_weights",), "`no_weight_tying: true`"),
        **dict.fromkeys(("position_embedding_type",), "`pos_emb`"),
        **dict.fromkeys(("rope_theta", "rotary_base"), "`rotary_emb_base`"),
        **dict.fromkeys(("hidden_act", "activation_function"), "`activation`"),
        **dict.fromkeys(("vocab_size",), "nothing: the tokenizer has it (`vocab_file`)"),
        **dict.fromkeys(
            ("Global", "Engine", "Model", "Distributed", "Optimizer", "Data", "parallel"),
            "its keys at the top of the file, without a block around them",
        ),
        "<<": "several files given together, which are merged",
        **dict.fromkeys(("normalization",), "`norm`"),
        **dict.fromkeys(("torch_compile",), "`compile_layers: true`"),
        **dict.fromkeys(
            ("fp8_format", "fp8_recipe", "fp8_recipe_name", "fp8_hybrid", "enable_fp8", "use_fp8"),
            "`fp8: tensorwise` (e4m3 and, for gradients, e5m2: Transformer Engine's hybrid) or `fp8: rowwise`",
        ),
    }
)


def alias_target(key: str) -> str:
    """Return the dotted path that a key sets: another one than its name if it is an alias."""
    return ALIASES[key].target if key in ALIASES else key
