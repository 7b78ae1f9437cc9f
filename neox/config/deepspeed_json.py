"""The JSON object handed to DeepSpeed: what the user gets, written out, with nothing DeepSpeed would refuse."""

from __future__ import annotations

from typing import Any

from neox.config.plan import BatchPlan, GridPlan, Precision
from neox.config.sections import NeoXConfig


def deepspeed_json(
    config: NeoXConfig, grid: GridPlan, batch: BatchPlan, precision: Precision
) -> tuple[dict[str, Any], list[str]]:
    """Return DeepSpeed's configuration and notes on what was translated or dropped."""
    notes: list[str] = []
    ds = config.deepspeed
    result: dict[str, Any] = {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": ds.gradient_clipping,
        "steps_per_print": ds.steps_per_print,
        "wall_clock_breakdown": ds.wall_clock_breakdown,
    }
    if config.given("optimizer"):
        result["optimizer"] = config.optimizer.optimizer.model_dump(exclude_none=True, mode="json")
    zero = ds.zero_optimization.model_dump(exclude_none=True)
    if grid.pp > 1 and zero.get("overlap_comm"):
        del zero["overlap_comm"]
        notes.append("zero_optimization.overlap_comm is dropped: DeepSpeed's pipeline engine cannot overlap")
    result["zero_optimization"] = zero
    if precision == "fp16":
        result["fp16"] = _fp16(config, notes)
    if precision == "bf16":
        result["bf16"] = {"enabled": True}
        if zero["stage"] >= 1:
            result["data_types"] = {"grad_accum_dtype": "fp32"}
    for key in (
        "fp32_allreduce",
        "prescale_gradients",
        "gradient_predivide_factor",
        "sparse_gradients",
        "dump_state",
        "zero_allow_untested_optimizer",
        "communication_data_type",
    ):
        if config.given(key):
            result[key] = getattr(ds, key)
    for key in ("flops_profiler", "comms_logger"):
        block = getattr(ds, key)
        if block is not None:
            result[key] = block.model_dump(exclude_none=True)
    return result, notes


def _fp16(config: NeoXConfig, notes: list[str]) -> dict[str, Any]:
    block = config.deepspeed.fp16
    if block is None:
        return {"enabled": True}
    if block.fp16 is not None:
        notes.append("fp16.fp16 is v2.0's old name and is left out: DeepSpeed refuses it, fp16.enabled says it")
    if block.type is not None:
        notes.append("fp16.type is v2.0's own and is left out: DeepSpeed refuses it")
    return {**block.model_dump(exclude_none=True, exclude={"fp16", "type"}), "enabled": True}
