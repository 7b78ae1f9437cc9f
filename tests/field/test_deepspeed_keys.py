"""Every key that the installed DeepSpeed reads works, changes nothing with a note, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import inf
from typing import Any, get_args

import pytest
from annotated_types import Ge, Le
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from neox.config import NeoXConfig
from neox.config.keys import ACTIVATION_KEYS, NEOX_KEYS
from neox.config.neox_config import section_classes
from neox.config.reference import blocks_of
from neox.errors import ConfigError
from neox.plan import RunPlan, resolve
from tests.field.deepspeed_keys import deepspeed_keys
from tests.plans import SMALL

BLOCKS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "bf16": (DeepSpeedBF16Config, {"enabled": True}),
    "fp16": (DeepSpeedFP16Config, {"enabled": True}),
    "comms_logger": (CommsLoggerConfig, {"enabled": True}),
    "zero_optimization": (DeepSpeedZeroConfig, {"stage": 3}),
    "zero_optimization.offload_optimizer": (DeepSpeedZeroOffloadOptimizerConfig, {"device": "cpu"}),
    "zero_optimization.offload_param": (DeepSpeedZeroOffloadParamConfig, {"device": "cpu"}),
}


def keys_of_blocks() -> Iterator[tuple[str, str, FieldInfo]]:
    for block, (model, _) in BLOCKS.items():
        for name, info in model.model_fields.items():
            if f"{block}.{name}" in BLOCKS:
                continue
            for spelling in dict.fromkeys((name, info.alias or name)):
                yield block, spelling, info


def another_value(info: FieldInfo) -> Any:
    """Return a value of a field that is not its default."""
    default = info.get_default(call_default_factory=True)
    kinds = (info.annotation, *get_args(info.annotation))
    if bool in kinds:
        return not default
    if int in kinds or float in kinds:
        return 1 if default in (None, 0) else default / 2
    return {"a": 1}


def with_key(block: str, name: str, value: Any) -> dict[str, Any]:
    """Return a configuration with one key in a block of DeepSpeed that is on."""
    outer, _, inner = block.partition(".")
    given = {**BLOCKS[block][1], name: value}
    if inner:
        given = {**BLOCKS[outer][1], inner: given}
        if inner == "offload_param":
            given["offload_optimizer"] = {"device": "cpu"}
    return {**SMALL, "precision": None, outer: given}


def answer(keys: dict[str, Any]) -> tuple[RunPlan | None, str]:
    """Return the plan, or None and what is wrong."""
    try:
        return resolve(NeoXConfig.from_flat(keys), 1, 100), ""
    except ConfigError as error:
        return None, str(error)


@pytest.mark.parametrize(
    ("block", "name", "info"), list(keys_of_blocks()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_key_of_deepspeeds_models_is_known(block: str, name: str, info: FieldInfo) -> None:
    """DeepSpeed PR 6976, 8035: `bf16.check_grad_overflow` and what follows."""
    plan, wrong = answer(with_key(block, name, another_value(info)))
    assert "has no key" not in wrong
    assert "unknown" not in wrong
    if plan is None:
        assert name.removeprefix("stage3_") in wrong
    for off in (info.get_default(call_default_factory=True), "auto"):
        if isinstance(off, BaseModel):
            continue
        plan, wrong = answer(with_key(block, name, off))
        assert plan is not None, wrong


KEYS = deepspeed_keys()
STAGE_3 = "zero_optimization.stage3_"
OLDER = (  # keys that DeepSpeed read once
    "allgather_size",
    "sequence_parallel_size",
    *(f"zero_optimization.{name}" for name in ("mics_shard_size", "mics_hierarchical_params_gather")),
    *(f"zero_optimization.offload_optimizer.{name}" for name in ("buffer_size", "max_in_cpu")),
    "zero_optimization.zeropp_loco_param",
    *(f"bf16.{name}" for name in ("bf16", "type", "loss_scale", "loss_scale_window", "initial_scale_power")),
    *(f"bf16.{name}" for name in ("hysteresis", "min_loss_scale")),
)


def our_name(path: str) -> str:
    """Return the name that a key of DeepSpeed with two spellings has here."""
    path = re.sub(r"^bfloat16\b", "bf16", path)
    documented = re.sub(r"^zero_optimization\.", STAGE_3, path)
    return documented if documented in KEYS else path


def known_here() -> set[str]:
    """Return the keys of sections, of their blocks, and of the table."""
    known = {*NEOX_KEYS, *(f"activation_checkpointing.{name}" for name in ACTIVATION_KEYS)}
    for section in section_classes().values():
        known |= set(section.model_fields)
        for path, block in blocks_of(section):
            known |= {f"{path}.{name}" for name in block.model_fields}
    return known


def test_every_key_that_deepspeed_reads_has_a_field_or_a_row() -> None:
    """The keys come from the installed DeepSpeed, so that a new one fails here until someone decides about it."""
    assert len(KEYS) > 300
    assert [path for path in KEYS if our_name(path) not in known_here()] == []


def test_the_table_has_no_key_that_deepspeed_does_not_read() -> None:
    of_deepspeed = {path for path, row in NEOX_KEYS.items() if row.since == "DeepSpeed"}
    assert of_deepspeed - {our_name(path) for path in KEYS} == set(OLDER)


@pytest.mark.parametrize("path", [path for path, row in NEOX_KEYS.items() if row.since == "DeepSpeed"])
def test_the_default_of_a_row_asks_for_nothing(path: str) -> None:
    """DeepSpeed's own default loads without a word. If it changes, a row's default is not DeepSpeed's any more."""
    row = NEOX_KEYS[path]
    default = row.default
    if path in KEYS and isinstance(KEYS[path].default, bool | int | float | str):
        default = KEYS[path].default
        default = getattr(default, "value", default)
    assert row.is_off(default)


def test_every_top_level_key_that_deepspeed_reads_is_known() -> None:
    values: dict[str, Any] = {"zero_optimization": True, "scheduler": {"type": "WarmupLR"}}
    for key in [path for path in KEYS if "." not in path and path not in values]:
        values[key] = {"type": "Adam"} if key == "optimizer" else {"enabled": True}
    for key, value in values.items():
        _, wrong = answer({**SMALL, key: value})
        assert "unknown key" not in wrong, key
        assert not wrong or key in wrong, key
        assert "unknown key" not in answer({**SMALL, key: None})[1]


def test_what_deepspeed_takes_for_off_is_off() -> None:
    for keys in (
        {"hybrid_engine": {"enabled": False, "max_out_tokens": 512}, "compile": {"deepcompile": False}, "wandb": {}},
        {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0}},
        {"steps_per_print": inf, "gradient_clipping": inf, "num_nodes": -1, "zero_optimization": False},
        {"flops_profiler": {"enabled": False, "module_depth": -1}},
        {"zero_optimization": {"offload_optimizer": {"device": "none", "ratio": 0.5}}},
        {"zero_optimization": {"mics_shard_size": -1, "zero_hpz_partition_size": 0}},
        {"comms_logger": {"enabled": False, "prof_ops": ["all_reduce"]}},
        {"bf16": {"enabled": False, "bf16_optimizer_states": True}, "expert_parallel": {"autoep_size": 2}},
        {"tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}}, "tensorboard": {"output_path": "x"}},
        {"pipeline": {"pipe_partitioned": True, "grad_partitioned": True}, "checkpoint": {"load_universal": False}},
    ):
        plan, wrong = answer({**SMALL, **keys})
        assert plan is not None, wrong
        assert plan.deepspeed["gradient_clipping"] == 0.0
        assert plan.precision == "fp32"


def test_older_forms_of_deepspeed() -> None:
    plan, wrong = answer({**SMALL, "bfloat16": {"enabled": True}, "zero_optimization": True})
    assert plan is not None, wrong
    assert plan.precision == "bf16"
    assert plan.deepspeed["zero_optimization"]["stage"] == 1
    plan, wrong = answer({**SMALL, "zero_optimization": {"stage": 3, "prefetch_bucket_size": 5}})
    assert plan is not None, wrong
    assert plan.deepspeed["zero_optimization"]["stage3_prefetch_bucket_size"] == 5
    for name in ("bfloat16", "float32", "torch.float32"):
        _, wrong = answer(
            {**SMALL, "bf16": {"enabled": True}, "zero_optimization": True, "data_types": {"grad_accum_dtype": name}}
        )
        assert not wrong


def test_a_block_that_deepspeed_switches_on_by_its_presence_is_refused() -> None:
    for keys in ({"zero_optimization": {"zenflow": {}}}, {"datastates_ckpt": {}}):
        _, wrong = answer({**SMALL, **keys})
        assert re.search("zenflow|datastates_ckpt", wrong)


def test_auto_is_what_the_plan_derives() -> None:
    """accelerate#514 and others: the Hugging Face Trainer fills `auto` in, so published files are full of it."""
    derived = ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print")
    automatic: dict[str, Any] = {
        **dict.fromkeys((*derived, "wall_clock_breakdown", "communication_data_type"), "auto"),
        "bf16": {"enabled": "auto", "immediate_grad_update": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "auto"}},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": "auto"}},
        "activation_checkpointing": {"partition_activations": "auto"},
    }
    absent: dict[str, Any] = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}},
    }
    given, wrong = answer({**SMALL, **automatic})
    assert given is not None, wrong
    plan, _ = answer({**SMALL, **absent})
    assert plan is not None
    assert given.deepspeed == plan.deepspeed
    assert not given.config.given("train_batch_size")
    assert given.batch == plan.batch


def test_auto_of_what_nothing_derives_is_refused() -> None:
    for keys in (
        {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
    ):
        _, wrong = answer({**SMALL, **keys})
        assert "Hugging Face Trainer" in wrong
    _, wrong = answer({**SMALL, "train_micro_batch_size_per_gpu": "auto"})
    assert "train_micro_batch_size_per_gpu" in wrong


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.bounds])
def test_what_a_model_of_deepspeed_refuses_is_refused_before_the_start(path: str) -> None:
    """A number below the bound of DeepSpeed's field would end the ranks instead of the launcher."""
    block, _, name = our_name(path).rpartition(".")
    if our_name(path) in NEOX_KEYS or block not in BLOCKS:
        return
    for bound in KEYS[path].bounds:
        below = bound.ge - 1 if isinstance(bound, Ge) else getattr(bound, "gt", None)
        above = bound.le + 1 if isinstance(bound, Le) else None
        for value in (below, above):
            if value is not None:
                assert name in answer(with_key(block, name, value))[1]
