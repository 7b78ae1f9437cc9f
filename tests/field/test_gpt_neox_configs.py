"""Configurations of gpt-neox of every year, read as the gpt-neox of their time read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neox.config import NeoXConfig, load_config
from neox.errors import ConfigError
from neox.plan import resolve
from neox.plan.rules.notes import notes_without_effect
from tests.plans import problem_keys

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "output_layer_parallelism": "column",
    "train_micro_batch_size_per_gpu": 1,
    "train_iters": 2,
}
FUSED = "scaled_upper_triang_masked_softmax_fusion"
FLASH = {"attention_config": [[["flash"], 2]], FUSED: True}
WITHOUT_FUSED_SOFTMAX: list[tuple[str, dict[str, Any]]] = [
    ("reset_attention_mask", {"reset_attention_mask": True}),
    (
        "train_impl",
        {"train_impl": "dpo", "dataset_impl": "pairwise", "pos_train_data_paths": ["a"], "neg_train_data_paths": ["b"]},
    ),
    (
        "train_impl",
        {
            "train_impl": "kto",
            "train_data_paths": ["a"],
            "train_label_data_paths": ["b"],
            "train_reward_data_paths": ["c"],
        },
    ),
    ("context_parallel_size", {"context_parallel_size": 2}),
]


@pytest.mark.parametrize(("named", "keys"), WITHOUT_FUSED_SOFTMAX, ids=["documents", "dpo", "kto", "context ranks"])
def test_flash_goes_before_the_fused_softmax(named: str, keys: dict[str, Any]) -> None:
    """gpt-neox builds no fused softmax in flash blocks: its own DPO and KTO files have both keys."""
    world = keys.get("context_parallel_size", 1)
    plan = resolve(NeoXConfig.from_flat({**SMALL, **FLASH, **keys}), world, 100)
    assert plan.attention == ("flash", "flash")
    windows = {**SMALL, "attention_config": [[["sliding_window"], 2]], "sliding_window_width": 8, FUSED: True}
    resolve(NeoXConfig.from_flat({**windows, **keys}), world, 100)
    for kinds in ([[["global", "flash"], 1]], None):  # one block is enough
        (found,) = problem_keys(world, **{**SMALL, FUSED: True, "attention_config": kinds, **keys})
        assert {named, FUSED} <= set(found)


@pytest.mark.parametrize(("given", "width"), [(14336, 14336), (None, 11008)], ids=["Mistral", "Llama"])
def test_the_width_of_mlp_type_llama_is_intermediate_size_itself(given: int | None, width: int) -> None:
    """gpt-neox PR 1131 and #1319: three matrices without biases, of the width that the file gives."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_kv_heads": 8}
    keys = {**SMALL, **sizes, "mlp_type": "llama", "activation": "silu", "intermediate_size": given}
    config = NeoXConfig.from_flat(keys)
    plan = resolve(config, 1, 100)
    mlp = [parameter for parameter in plan.layers.layers[2].parameters if parameter.name.startswith("mlp.")]
    assert sum(parameter.numel for parameter in mlp) == 3 * 4096 * width
    assert NeoXConfig.from_flat(config.to_flat()).model == config.model
    later = {**keys, "mlp_type": None, "activation": "swiglu", "intermediate_size": 3 * width, "use_bias_in_mlp": False}
    assert resolve(NeoXConfig.from_flat(later), 1, 100).architecture == plan.architecture


OLD_NAMES: list[tuple[dict[str, Any], str, Any]] = [
    ({"label_data_paths": ["b"], "train_data_paths": ["a"]}, "train_label_data_paths", ("b",)),
    ({"geglu": True}, "activation", "geglu"),
    ({"openai_gelu": True}, "activation", "gelu_tanh"),
    ({"rms_norm": True}, "norm", "rmsnorm_v2.0"),
    ({"rpe": True}, "pos_emb", "rpe"),
    ({"genfile": "a.txt"}, "sample_output_file", "a.txt"),
    ({"out_seq_length": 9}, "maximum_tokens", 9),
    ({"slurm_comment": "neox"}, "comment", "neox"),
    ({"save_interval": 7}, "checkpoint_factor", 7),
    ({"gas": 3}, "gradient_accumulation_steps", 3),
    ({"clip_grad": 0.5}, "gradient_clipping", 0.5),
    ({"num_experts": 2}, "moe_num_experts", 2),
    ({"num_experts": 2, "expert_interval": 3}, "moe_expert_interval", 3),
    ({"num_experts": 2, "moe_token_dropping": False}, "moe_expert_interval", 2),
    ({"moe_num_experts": 2}, "moe_expert_interval", 1),
    ({"zero_contigious_gradients": True, "zero_stage": 1}, "zero_optimization.contiguous_gradients", True),
]


@pytest.mark.parametrize(("given", "key", "value"), OLD_NAMES, ids=lambda value: str(value)[:40])
def test_names_that_gpt_neox_has_changed_or_removed(given: dict[str, Any], key: str, value: Any) -> None:
    sizes = {name: size for name, size in SMALL.items() if name != "pos_emb"}
    config = NeoXConfig.from_flat({**sizes, **given})
    assert config.value(key) == value
    assert NeoXConfig.from_flat(config.to_flat()).value(key) == value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_data_path", "a"),
        ("sparsity", "interspersed"),
        ("reset_position_ids", True),
        ("apply_residual_connection_post_layernorm", True),
        ("greedy", True),
        ("moe_type", "deepspeed"),
        ("moe_token_dropping", True),
        ("moe_use_residual", True),
        ("moe_loss_coeff", 0.1),
        ("moe_glu", True),
        ("use_tutel", True),
    ],
)
def test_keys_that_gpt_neox_has_removed_are_refused_by_name(key: str, value: Any) -> None:
    (found,) = problem_keys(1, **{**SMALL, key: value})
    assert found == (key,)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("max_positon_embeddings", "max_position_embeddings"),
        ("hidden_dropuot", "hidden_dropout"),
        ("gsa", "gas"),
        ("attention_heads", "num_attention_heads"),
        ("sliding_window", "sliding_window_width"),
        ("rope_pct", "rotary_pct"),
        ("attention_type", "num_kv_heads"),
        ("decay_lr_to", "min_lr"),
        ("eval_step", None),
        ("ga_dataset_impl", None),
        ("hyena_filter_order", None),
        ("proj_groups", None),
        ("stop_interval", None),
        ("use_slow_heads", None),
    ],
)
def test_hints_at_keys_are_of_meaning_and_not_of_spelling(key: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        NeoXConfig.from_flat({**SMALL, key: 1})
    message = str(caught.value)
    assert f"unknown key `{key}`" in message
    if hint is None:
        assert "mean" not in message
    else:
        assert f"`{hint}" in message


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("pos_emb", "rotray", "rotary"),
        ("tokenizer_type", "HFT5Tokenizer", None),
        ("tokenizer_type", "hftokenizer", "HFTokenizer"),
    ],
)
def test_hints_at_values_are_of_meaning_too(key: str, value: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        NeoXConfig.from_flat({**SMALL, key: value})
    message = str(caught.value)
    assert value in message
    assert ("mean" in message) == (hint is not None)
    assert hint is None or f"mean `{hint}`" in message


def dated(day: str | None, **keys: Any) -> NeoXConfig:
    return NeoXConfig.from_flat({**SMALL, "gpt_neox_version": day, **keys})


@pytest.mark.parametrize(
    ("day", "keys", "norm"),
    [
        (None, {}, "rmsnorm"),
        ("2025-05-09", {}, "rmsnorm"),
        ("2025-05-08", {}, "rmsnorm_v2.0"),
        ("v2.0", {}, "rmsnorm_v2.0"),
        (None, {"mlp_type": "llama"}, "rmsnorm_v2.0"),
        (None, {"label_data_paths": ["b"], "train_data_paths": ["a"]}, "rmsnorm_v2.0"),
    ],
)
def test_where_rmsnorm_adds_its_epsilon(day: str | None, keys: dict[str, Any], norm: str) -> None:
    """gpt-neox PR 1345."""
    config = dated(day, norm="rmsnorm", **keys)
    assert config.model.norm == norm
    assert NeoXConfig.from_flat(config.to_flat()).model == config.model
    notes = [note for note in notes_without_effect(config) if "norm" in note.keys]
    assert bool(notes) == (day is None and bool(keys))
    loads = notes_without_effect(dated(day, norm="rmsnorm", load="a", **keys))
    assert any("norm" in note.keys for note in loads) == (day is None)


@pytest.mark.parametrize(
    ("day", "width"),
    [(None, 170), ("v2.0", 170), ("2023-04-02", 170), ("2023-04-03", 128), ("2024-09-08", 256), ("2024-09-10", 85)],
)
def test_the_width_of_geglu(day: str | None, width: int) -> None:
    """gpt-neox PR 868 and 1212."""
    plan = resolve(dated(day, activation="geglu"), 1, 100)
    (projection,) = [part for part in plan.layers.layers[2].parameters if part.name == "mlp.dense_4h_to_h.weight"]
    assert projection.shape[1] == width
    notes = [note for note in notes_without_effect(dated(day, activation="geglu")) if "activation" in note.keys]
    assert bool(notes) == (day is None)


def test_defaults_are_those_of_the_date() -> None:
    """gpt-neox PR 1107 and 1008."""
    old, new = dated("2023-12-25"), dated("2023-12-26")
    keys = ("hidden_dropout", "attention_dropout", "weight_decay")
    assert [old.value(key) for key in keys] == [0.1, 0.1, 0.01]
    assert [new.value(key) for key in keys] == [0.0, 0.0, 0.1]
    for day, alpha in (("2023-12-25", 0.3), ("2023-12-26", 1.0)):
        assert dated(day, weight_by_num_documents=True).data.weighted_sampler_alpha == alpha
    assert dated("2024-01-01", hidden_dropout=0.2).training.hidden_dropout == 0.2
    in_block = {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.3}}}
    assert not dated("2024-01-01", **in_block).given("weight_decay")
    assert dated("2023-08-06").schedule.lr_schedule_version == "v2.0"
    assert dated("2023-08-07").schedule.lr_schedule_version == "later"
    assert new.deepspeed.gradient_clipping == 0.0


def test_no_note_is_about_a_default_of_the_date() -> None:
    for keys in ({}, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}):
        for day in ("2023-08-06", "2024-01-01"):
            assert not notes_without_effect(dated(day, **keys)), (day, keys)


def test_a_file_with_younger_keys_is_told_about_older_defaults() -> None:
    said = [note.message for note in notes_without_effect(dated(None, num_kv_heads=2))]
    assert any("num_kv_heads" in message and "hidden_dropout" in message for message in said)
    for keys in (
        {"gpt_neox_version": "2024-03-01"},
        {"hidden_dropout": 0.0, "attention_dropout": 0, "weight_decay": 0},
    ):
        config = NeoXConfig.from_flat({**SMALL, "num_kv_heads": 2, **keys})
        assert not [note for note in notes_without_effect(config) if "num_kv_heads" in note.message]


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        (
            {"bf16": {"bf16": True, "enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 2}},
            "bf16",
        ),
        ({"fp16": {"enabled": True, "type": "bfloat16", "loss_scale": 0}, "fp32_allreduce": True}, "bf16"),
        (
            {
                "fp16": {"fp16": False, "enabled": False, "loss_scale": 0},
                "precision": "bfloat16",
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                "zero_optimization": {"stage": 1},
            },
            "bf16",
        ),
        ({"fp16": {"enabled": True}, "hysteresis": 4, "min_scale": 2, "loss_scale_window": 500}, "fp16"),
    ],
    ids=["gpt-neox#1305", "gpt-neox#939", "gpt-neox#991", "gpt-neox#1420"],
)
def test_forms_of_precision(keys: dict[str, Any], precision: str) -> None:
    plan = resolve(NeoXConfig.from_flat({**SMALL, **keys}), 1, 100)
    assert plan.precision == precision
    if precision == "fp16":
        block = plan.deepspeed["fp16"]
        assert (block["hysteresis"], block["min_loss_scale"], block["loss_scale_window"]) == (4, 2, 500)
    else:
        assert plan.deepspeed["bf16"]["enabled"]
        assert "fp16" not in plan.deepspeed


def test_a_clipping_that_is_given_reaches_deepspeed() -> None:
    """gpt-neox#1432: 1.0 was not handed on, and `clip_grad` was overwritten."""
    for key, value in (("gradient_clipping", 1.0), ("clip_grad", 0.5)):
        assert resolve(NeoXConfig.from_flat({**SMALL, key: value}), 1, 100).deepspeed["gradient_clipping"] == value
    assert resolve(NeoXConfig.from_flat(SMALL), 1, 100).deepspeed["gradient_clipping"] == 0.0


def test_numbers_with_exponents_are_numbers(tmp_path: Path) -> None:
    """accelerate#1828, LlamaFactory#4014, yacs#46: YAML 1.1 reads 1e-5 as text."""
    file = tmp_path / "a.yml"
    file.write_text(
        'optimizer: {type: Adam, params: {lr: 2e-5, eps: "1e-8"}}\nmin_lr: 1E-6\nzero_optimization: {stage: 1, '
        "reduce_bucket_size: 5e8}\nuse_wandb: False\nlr_decay_iters: None\n"
    )
    loaded = load_config([file])
    assert not loaded.problems
    params = loaded.config.optimizer.optimizer.params
    assert (params.lr, params.eps, loaded.config.schedule.min_lr) == (2e-5, 1e-8, 1e-6)
    assert loaded.config.deepspeed.zero_optimization.reduce_bucket_size == 500_000_000
    assert loaded.config.schedule.lr_decay_iters is None


def test_the_block_of_activation_checkpointing_is_read() -> None:
    """Megatron-DeepSpeed PR 452: the block was ignored in silence."""
    block = {"partition_activations": True, "cpu_checkpointing": True}
    config = NeoXConfig.from_flat({**SMALL, "checkpoint_activations": True, "activation_checkpointing": block})
    assert (config.value("partition_activations"), config.value("checkpoint_in_cpu")) == (True, True)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"zero_optimization": {"stge": 1}}, "stage"),
        ({"gradient_cliping": 1.0}, "gradient_clipping"),
        ({"zero_optimisation": {"stage": 1}}, "zero_optimization"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "Hugging Face Trainer"),
    ],
    ids=["DeepSpeed#774", "DeepSpeed#1809", "DeepSpeed#1809 British", "accelerate#1644"],
)
def test_misspelled_and_foreign_settings_are_never_ignored(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NeoXConfig.from_flat({**SMALL, **keys})
    assert named in str(caught.value)


def test_no_tensor_ranks_are_one() -> None:
    """gpt-neox#1354: `model_parallel_size: 0` counts as 1, as 0 stages do."""
    config = NeoXConfig.from_flat({"model_parallel_size": 0, "pipe_parallel_size": 0})
    assert config.parallelism.model_parallel_size == 1
