"""Every key that the installed DeepSpeed reads works, changes nothing with a note, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import inf
from typing import Any, get_args

import pytest
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime import constants
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.plan import RunPlan, resolve
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


class Recorder(dict[str, Any]):
    """A configuration that remembers which keys DeepSpeed asks for."""

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self.asked: set[str] = set()

    def __copy__(self) -> Recorder:
        return self

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


def test_every_top_level_key_that_deepspeed_reads_is_known() -> None:
    recorder = Recorder({"train_batch_size": 1})
    DeepSpeedConfig(recorder)
    assert len(recorder.asked) > 50
    values: dict[str, Any] = {"zero_optimization": True, "scheduler": {"type": "WarmupLR"}}
    for key in recorder.asked - {"zero_optimization", "scheduler"}:
        values[key] = {"type": "Adam"} if key == "optimizer" else {"enabled": True}
    for key, value in values.items():
        _, wrong = answer({**SMALL, key: value})
        assert "unknown key" not in wrong, key
        assert not wrong or key in wrong, key
        assert "unknown key" not in answer({**SMALL, key: None})[1]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("activation_checkpointing", ACT_CHKPT_DEFAULT),
        ("flops_profiler", vars(DeepSpeedFlopsProfilerConfig({}))),
        (
            "data_types",
            [value for name, value in vars(constants).items() if re.fullmatch(r"\w+_DTYPE|KEEP_\w+MODULES", name)],
        ),
        ("optimizer", ["legacy_fusion"]),
    ],
)
def test_keys_of_blocks_without_a_model_are_known(path: str, names: Any) -> None:
    names = [name for name in names if name not in ("dtype",)]
    assert names
    for name in names:
        _, wrong = answer({**SMALL, path: {"type": "Adam", name: 1} if path == "optimizer" else {name: 1}})
        assert "has no key" not in wrong, name


def test_what_deepspeed_takes_for_off_is_off() -> None:
    for keys in (
        {"hybrid_engine": {"enabled": False, "max_out_tokens": 512}, "compile": {"deepcompile": False}, "wandb": {}},
        {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0}},
        {"steps_per_print": inf, "gradient_clipping": inf, "num_nodes": -1, "zero_optimization": False},
        {"flops_profiler": {"enabled": False, "module_depth": -1}},
        {"zero_optimization": {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}},
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


def test_auto_at_the_top_level_is_named() -> None:
    """accelerate#514 and others: `auto` is filled in by the Hugging Face Trainer only."""
    for key in ("train_batch_size", "gradient_clipping", "gradient_accumulation_steps"):
        _, wrong = answer({**SMALL, key: "auto"})
        assert f"`{key}: 'auto'`" in wrong
        assert "Hugging Face Trainer" in wrong
