"""Settings from which random configurations are drawn.

A setting of the model or the training changes the numbers, and stands in both runs of a comparison. A setting of a
layout must not change them: it stands in one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.plans import NETWORKS

Keys = Mapping[str, Any]

LAYERS = 4
SEQ = 16
BATCH = 4
STEPS = 4
SAVED_AT = 2

BASE: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": SEQ,
    "max_position_embeddings": SEQ,
    "pos_emb": "rotary",
    "rotary_pct": 0.5,
    "make_vocab_size_divisible_by": 32,
    "padded_vocab_size": 528,  # divisible by 2 and 3 tensor ranks
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.1,
    "precision": "fp32",
    "tokenizer_type": "CharLevelTokenizer",
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": 1,
    "train_data_paths": ["{text}"],
    "valid_data_paths": ["{text}"],
    "train_iters": STEPS,
    "lr_decay_iters": STEPS,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "eps": 1.0e-5}},
    "eval_interval": 2,
    "eval_iters": 2,
    "checkpoint_factor": SAVED_AT,
    "log_interval": 1,
    "zero_optimization": {"stage": 0},
}
"""A model that trains in a second. The large epsilon keeps Adam from enlarging the rounding of tiny gradients."""


@dataclass(frozen=True)
class Setting:
    """A named choice of keys.

    Attributes:
        name: Name in reports and coverage.
        keys: The keys that it sets.
        group: Settings of one group exclude each other.
        worlds: Numbers of ranks that it is drawn for; none for any.
    """

    name: str
    keys: Keys
    group: str = ""
    worlds: tuple[int, ...] = field(default=())


def _model_settings() -> list[Setting]:
    settings = []
    for name, keys in NETWORKS.items():
        repeated = dict(keys)
        for key in ("attention_config", "moe_layer_freq"):
            if key in repeated:
                repeated[key] = [*repeated[key]] * (LAYERS // 2)
        if "max_position_embeddings" in repeated:  # with an offset of positions
            repeated["max_position_embeddings"] = SEQ + repeated["max_position_embeddings"] - 16
        settings.append(Setting(f"model {name}", repeated, "model"))
    return settings


def _optimizer(name: str, **params: Any) -> Setting:
    return Setting(f"optimizer {name}", {"optimizer": {"type": name, "params": params}}, "optimizer")


MODELS = _model_settings()

# Not here: Lion, whose sign of a gradient that is 0 is that of its rounding.
TRAINING = [
    Setting("untied head", {"no_weight_tying": True}),
    Setting("head split by rows", {"output_layer_parallelism": "row"}),
    Setting("LayerNorm of embeddings", {"embed_layernorm": True}),
    _optimizer("AdamW", lr=0.01, eps=1e-5, betas=[0.8, 0.9]),
    _optimizer("SGD", lr=0.1, momentum=0.9),
    _optimizer("SM3", lr=0.01, momentum=0.9),
    _optimizer("madgrad_wd", lr=0.01, eps=1e-5),
    _optimizer("Adafactor", lr=0.01),
    _optimizer("Muon", lr=0.01, eps=1e-5),
    Setting("weight decay 0", {"weight_decay": 0.0}, "weight decay"),
    Setting("weight decay 0.5", {"weight_decay": 0.5}, "weight decay"),
    Setting("clipping", {"gradient_clipping": 0.3}),
    Setting("cosine", {"lr_decay_style": "cosine", "min_lr": 0.001, "warmup": 0.25}, "schedule"),
    Setting("WSD", {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2}, "schedule"),
    Setting("constant", {"lr_decay_style": "constant"}, "schedule"),
    Setting(
        "OneCycle",
        {
            "scheduler": {
                "type": "OneCycle",
                "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 2},
            }
        },
        "schedule",
    ),
    Setting("ramp-up", {"rampup_batch_size": [4, 4, 8], "train_batch_size": 8}),
    Setting("documents apart", {"reset_attention_mask": True}),
    Setting("no loss at ends", {"eod_mask_loss": True}),
    Setting("unpacked", {"pack_impl": "unpacked"}, "packing"),
    Setting("best fit", {"pack_impl": "best_fit"}, "packing"),
    Setting("labels", {"train_label_data_paths": ["{labels}"], "valid_label_data_paths": ["{labels}"]}),
    Setting("loss by tokens", {"loss_normalization": "tokens"}),
    Setting("z-loss", {"lm_z_loss": 0.001}),
    Setting("mixture", {"train_data_paths": ["{text}", "{other}"], "train_data_weights": [1.0, 2.0]}),
    Setting("EMA", {"ema_decay": 0.5}),
    Setting("multi-token prediction", {"mtp_num_layers": 1}),
    Setting("LoRA", {"lora": {"r": 4, "target": ["query_key_value", "dense_h_to_4h"]}}),
    Setting(
        "curriculum",
        {
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": 8,
                "max_difficulty": 16,
                "schedule_type": "fixed_linear",
                "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 8},
            }
        },
    ),
    Setting("frozen embedding", {"parameter_groups": [{"match": "0.*", "frozen": True}]}, "groups"),
    Setting("group of one block", {"parameter_groups": [{"match": "2.*", "lr_factor": 0.5}]}, "groups"),
    Setting("frozen block", {"parameter_groups": [{"match": "2.*", "frozen": True}]}, "groups"),
]

LAYOUTS = [
    Setting("2 stages", {"pipe_parallel_size": 2}, "stages", (2, 4)),
    Setting("3 stages", {"pipe_parallel_size": 3}, "stages", (3,)),
    Setting("4 stages", {"pipe_parallel_size": 4}, "stages", (4,)),
    Setting("stages by parameters", {"pipe_partition_method": "parameters"}, "partition", (2, 3, 4)),
    Setting("stages by layers", {"pipe_partition_method": "uniform"}, "partition", (2, 3, 4)),
    Setting("interleaved", {"pipeline_schedule": "interleaved"}, "pipeline schedule", (2, 4)),
    Setting("DualPipeV", {"pipeline_schedule": "dualpipev"}, "pipeline schedule", (2, 4)),
    Setting("2 tensor ranks", {"model_parallel_size": 2}, "tensor", (2, 4)),
    Setting("4 tensor ranks", {"model_parallel_size": 4}, "tensor", (4,)),
    Setting("sequence parallelism", {"sequence_parallel": True}, "", (2, 4)),
    Setting("2 context ranks", {"context_parallel_size": 2}, "context", (2, 4)),
    Setting("context by heads", {"context_parallel_size": 2, "context_parallel_kind": "ulysses"}, "context", (2, 4)),
    Setting("divided experts", {"expert_model_parallel_size": 2}, "experts", (2, 4)),
    Setting("ZeRO 1", {"zero_optimization.stage": 1}, "zero"),
    Setting("ZeRO 2", {"zero_optimization.stage": 2}, "zero"),
    Setting("ZeRO 3", {"zero_optimization.stage": 3}, "zero"),
    Setting("offloaded states", {"zero_optimization.offload_optimizer": {"device": "cpu"}}),
    Setting("round robin", {"zero_optimization.round_robin_gradients": True}),
    Setting("no overlap", {"zero_optimization.overlap_comm": False}, "overlap"),
    Setting("overlap", {"zero_optimization.overlap_comm": True}, "overlap"),
    Setting("small buckets", {"zero_optimization.reduce_bucket_size": 1000}),
    Setting("small gathers", {"zero_optimization.allgather_bucket_size": 1000}),
    Setting("gradients apart", {"zero_optimization.contiguous_gradients": False}),
    Setting("all-reduced gradients", {"zero_optimization.reduce_scatter": False}),
    Setting("gathers of weights apart", {"zero_optimization.allgather_partitions": False}),
    Setting("small groups of ZeRO 3", {"zero_optimization.sub_group_size": 500}),
    Setting("prescaled", {"prescale_gradients": True}),
    Setting("predivided", {"prescale_gradients": True, "gradient_predivide_factor": 2.0}),
    Setting("micro batches of 2", {"train_micro_batch_size_per_gpu": 2}, "micro batch"),
    Setting("recomputation", {"checkpoint_activations": True}, "recomputation"),
    Setting(
        "recomputed attention", {"checkpoint_activations": True, "recompute_granularity": "selective"}, "recomputation"
    ),
    Setting("some recomputed", {"checkpoint_activations": True, "no_recompute_layers": [1]}, "recomputation"),
    Setting("tiles", {"mlp_tile_size": 8}),
    Setting("saves in the background", {"async_save": True}),
    Setting("statistics of the optimizer", {"log_optimizer_states": True}),
    Setting("stability", {"log_stability_every": 1}),
    Setting("deterministic", {"deterministic": True}),
]
