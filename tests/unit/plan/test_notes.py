"""Keys that have an effect only with another one: noted when that is off, silent when it is on or they are defaults."""

from __future__ import annotations

from typing import Any

import pytest

from neox.architecture import NORMS
from neox.config import NeoXConfig
from neox.config.neox_config import key_sections, section_classes
from neox.config.reference import blocks_of, page
from neox.config.sections.conditions import Condition, markers, status_of
from neox.config.sections.deepspeed import ZeroSettings
from neox.plan import architecture_of, resolve
from neox.plan.rules import notes_without_effect
from tests.plans import SIZES, SMALL, plan_of, problem_keys


def noted(**keys: Any) -> list[tuple[str, ...]]:
    """Return the keys of each note."""
    return [note.keys for note in notes_without_effect(NeoXConfig.from_flat(keys))]


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("checkpoint_num_layers", {"checkpoint_num_layers": 2}),
        ("rotary_pct", {"pos_emb": "none", "rotary_pct": 0.5}),
        ("zero_optimization.overlap_comm", {"zero_optimization": {"overlap_comm": True}}),
        ("zero_optimization.sub_group_size", {"zero_optimization": {"stage": 2, "sub_group_size": 9}}),
        ("split", {"train_data_paths": ["a"], "split": "9,1,1"}),
        ("valid_data_paths", {"data_path": "a", "valid_data_paths": ["b"]}),
        ("allow_chopped", {"allow_chopped": False}),
        ("comms_logger.verbose", {"comms_logger": {"verbose": True}}),
        ("iteration", {"iteration": 5}),
        ("account", {"account": "me"}),
        ("min_lr", {"lr_decay_style": "constant", "min_lr": 1e-5}),
        ("elastic", {"elastic": True, "launcher": "none"}),
    ],
)
def test_a_condition_that_is_off_is_noted(path: str, keys: dict[str, Any]) -> None:
    assert noted(**keys) == [(path,)]


def test_sets_with_names_are_evaluated_next_to_a_part_of_data_path() -> None:
    assert noted(data_path="a", valid_data_paths={"web": "b"}) == []
    assert noted(valid_data_paths={"web": "b"}) == [("valid_data_paths",)]


def test_warmup_next_to_its_steps_is_noted() -> None:
    assert noted(warmup=0.1, lr_warmup_iters=5) == [("warmup", "lr_warmup_iters")]
    assert noted(warmup=0.1) == noted(lr_warmup_iters=5) == []


@pytest.mark.parametrize(
    ("schedule", "is_noted"),
    [
        ({}, True),
        ({"extra_save_iters": [0]}, True),
        ({"extra_save_iters": [4]}, False),
        ({"checkpoint_factor": 10}, True),
        ({"checkpoint_factor": 9}, False),
        ({"checkpoint_factor": 2, "checkpoint_scale": "log"}, False),
    ],
    ids=str,
)
def test_recovery_without_checkpoints_on_the_way_is_noted(schedule: dict[str, Any], is_noted: bool) -> None:
    keys = {"save": "s", "train_iters": 10, "max_restarts": 1, "loss_spike_action": "rollback", **schedule}
    expected = [("max_restarts", "checkpoint_factor"), ("loss_spike_action", "checkpoint_factor")] if is_noted else []
    assert noted(**keys) == expected
    assert noted(save="s", train_iters=10) == []


@pytest.mark.parametrize(
    ("setting", "keys"),
    [
        (
            "zero_optimization.offload_optimizer.device",
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
        ),
        (
            "bf16.bf16_master_weights_and_grads",
            {
                "zero_optimization": {"stage": 2},
                "bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            },
        ),
    ],
)
def test_nothing_stays_fp32_by_default_without_fp32_weights_in_memory(setting: str, keys: dict[str, Any]) -> None:
    key = "mamba_selective_fp32_params"
    keys = {**SIZES, **keys, "attention_config": [[["mamba", "global"], 2]], "precision": "bf16"}
    assert noted(**keys) == [(key, setting)]
    assert problem_keys(1, **keys) == []
    assert (key, setting) not in noted(**keys, **{key: False})
    assert problem_keys(1, **keys, **{key: True}) == [(key, setting)]
    assert (key, setting) not in noted(**{**keys, "attention_config": [[["global"], 4]]})


def test_a_note_names_keys_with_one_condition_together_and_the_condition() -> None:
    (note,) = notes_without_effect(NeoXConfig.from_flat({"wandb_group": "a", "wandb_team": "b"}))
    assert note.keys == ("wandb_group", "wandb_team")
    assert "`use_wandb`" in note.message


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_has_one_epsilon_or_none(name: str) -> None:
    values = {"layernorm_epsilon": 1e-4, "rms_norm_epsilon": 2e-4, "scalenorm_epsilon": 3e-4}
    used = NORMS[name].epsilon_key
    unused = [key for key in values if (key,) in noted(norm=name, **values)]
    assert sorted({used, *unused} - {None}) == sorted(values)
    assert architecture_of(NeoXConfig.from_flat({**SMALL, **values, "norm": name})).norm_epsilon == values.get(
        used, 0.0
    )


def test_silent_where_a_key_has_an_effect_or_says_the_default() -> None:
    assert noted(wandb_group="a", use_wandb=True) == []
    assert noted(checkpoint_num_layers=1, wandb_project="neox") == []
    assert noted(zero_optimization={"stage": 1, "overlap_comm": True}) == []
    assert noted(iteration=5, save="x") == []
    assert noted(split="9,1,1", data_path="a") == []
    assert noted(top_p=0.9) == noted(top_k=3) == [], "generation draws at temperature 1 then, and says so"


def test_every_condition_is_a_key(tiny: dict[str, Any]) -> None:
    blocks_to_open = {
        "flops_profiler": {},
        "comms_logger": {},
        "scheduler": {"type": "OneCycle"},
        "curriculum_learning": {},
        "soft_prompt_tuning": {},
        "zero_optimization": {
            "stage": 3,
            "reduce_scatter": True,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
            "zero_hpz_partition_size": 2,
        },
    }
    config = NeoXConfig.from_flat({**tiny, **blocks_to_open})
    conditions = set()
    for cls in section_classes().values():
        for block in (cls, *(inner for _, inner in blocks_of(cls))):
            for info in block.model_fields.values():
                for condition in markers(info, Condition):
                    name = condition.key.removeprefix(".")
                    if name == condition.key:
                        conditions.add(name)
                    else:
                        assert name.split(".")[0] in block.model_fields, condition
    assert len(conditions) > 20
    for key in conditions:
        assert key.split(".")[0] in key_sections()
        assert "." not in key or config.value(key) is not None, key
    assert any("`account: me`" in note for note in plan_of(**tiny, account="me").notes)


def test_statuses_of_the_zero_block_hold(tiny: dict[str, Any]) -> None:
    statuses = {key: status_of(info) for key, info in ZeroSettings.model_fields.items()}
    assert set(statuses.values()) == {"works", "no effect", "refused"}
    for key in (key for key, status in statuses.items() if status == "no effect"):
        config = NeoXConfig.from_flat({**tiny, "zero_optimization": {"stage": 3, key: True}})
        said = [note for note in resolve(config, 1, 100).notes if f"zero_optimization.{key}: true`" in note]
        assert len(said) == 1
    assert "| `zero_optimization.offload_optimizer.buffer_count` | int | `4` | DeepSpeed | no effect |" in page()


def test_tokens_that_lora_leaves_untrained_are_noted() -> None:
    """LlamaFactory#6186, peft PR 2376: adapters train neither the embedding nor the head, so no row of a new token."""
    tokens = {"tokenizer_type": "HFTokenizer", "vocab_file": "x", "added_tokens": ["<|new|>"]}
    for keys, is_noted in (({**tokens, "lora": {"r": 2}}, True), (tokens, False), ({"lora": {"r": 2}}, False)):
        assert any("added_tokens" in note for note in plan_of(**{**SMALL, **keys}).notes) is is_noted
