"""Keys that have an effect only with another one: noted when that is off, silent when it is on or they are defaults."""

from __future__ import annotations

from typing import Any

import pytest

from neox.architecture import NORMS
from neox.config import NeoXConfig
from neox.config.neox_config import key_sections, section_classes
from neox.config.reference import blocks_of, page
from neox.config.sections.base import conditions_of, status_of
from neox.config.sections.deepspeed import ZeroSettings
from neox.plan import architecture_of, resolve
from neox.plan.rules import notes_without_effect
from tests.plans import SMALL


def notes(**keys: Any) -> list[str]:
    return notes_without_effect(
        NeoXConfig.from_flat(keys, {key: f"a.yml:{line}" for line, key in enumerate(keys, start=1)})
    )


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"wandb_group": "a", "wandb_team": "b"}, "have no effect: only with `use_wandb`"),
        ({"checkpoint_num_layers": 2}, "`checkpoint_num_layers: 2` (a.yml:1) has no effect: only with `checkpoint_act"),
        ({"pos_emb": "none", "rotary_pct": 0.5}, "only with `pos_emb: rotary`"),
        ({"zero_optimization": {"overlap_comm": True}}, "only with `zero_optimization.stage: 1, 2, 3`"),
        ({"zero_optimization": {"stage": 2, "sub_group_size": 9}}, "only with `zero_optimization.stage: 3`"),
        ({"train_data_paths": ["a"], "split": "9,1,1"}, "only with `train_data_paths` unset"),
        ({"data_path": "a", "valid_data_paths": ["b"]}, "only with `train_data_paths`"),
        ({"allow_chopped": False}, "only with `pack_impl: pack_until_overflow, unpacked`"),
        ({"comms_logger": {"verbose": True}}, "`comms_logger.verbose: true` (a.yml:1) has no effect"),
        ({"iteration": 5}, "only with `load` or `save`"),
        ({"account": "me"}, "only with `launcher: slurm`"),
        (
            {"lr_decay_style": "constant", "min_lr": 1e-5},
            "only with `lr_decay_style: linear, cosine, exponential, WSD`",
        ),
    ],
)
def test_a_condition_that_is_off_is_noted(keys: dict[str, Any], note: str) -> None:
    (found,) = notes(**keys)
    assert note in found


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_has_an_epsilon_of_its_own(name: str) -> None:
    values = {"layernorm_epsilon": 1e-4, "rms_norm_epsilon": 2e-4, "scalenorm_epsilon": 3e-4}
    used = NORMS[name].epsilon_key
    unused = [key for key in values if any(f"`{key}: " in note for note in notes(norm=name, **values))]
    assert sorted([used, *unused]) == sorted(values)
    assert architecture_of(NeoXConfig.from_flat({**SMALL, **values, "norm": name})).norm_epsilon == values[used]


def test_silent_where_a_key_has_an_effect_or_says_the_default() -> None:
    assert notes(wandb_group="a", use_wandb=True) == []
    assert notes(checkpoint_num_layers=1, wandb_project="neox") == []
    assert notes(zero_optimization={"stage": 1, "overlap_comm": True}) == []
    assert notes(iteration=5, save="x") == []
    assert notes(split="9,1,1", data_path="a") == []
    assert notes(top_p=0.9) == notes(top_k=3) == [], "generation draws at temperature 1 then, and says so"


def test_every_condition_is_a_key(tiny: dict[str, Any]) -> None:
    blocks_to_open = {
        "flops_profiler": {},
        "comms_logger": {},
        "scheduler": {"type": "OneCycle"},
        "curriculum_learning": {},
    }
    config = NeoXConfig.from_flat({**tiny, **blocks_to_open})
    classes = section_classes().values()
    blocks = [block for cls in classes for _, block in blocks_of(cls)]
    conditions = {
        condition
        for cls in (*classes, *blocks)
        for info in cls.model_fields.values()
        for condition in conditions_of(info)
    }
    assert len(conditions) > 10
    for condition in conditions:
        assert condition.key.split(".")[0] in key_sections()
        value = config.value(condition.key)
        assert "." not in condition.key or value is not None, condition
    assert any("no effect" in note for note in resolve(NeoXConfig.from_flat({**tiny, "account": "me"}), 1, 99).notes)


def test_statuses_of_the_zero_block_hold(tiny: dict[str, Any]) -> None:
    statuses = {key: status_of(info) for key, info in ZeroSettings.model_fields.items()}
    assert set(statuses.values()) == {"works", "no effect"}
    for key in (key for key, status in statuses.items() if status == "no effect"):
        config = NeoXConfig.from_flat({**tiny, "zero_optimization": {"stage": 3, key: True}})
        said = [note for note in resolve(config, 1, 100).notes if f"zero_optimization.{key}: true`" in note]
        assert len(said) == 1
    assert "| `buffer_count` | int |  | refused |" in page()
