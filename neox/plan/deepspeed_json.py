"""JSON object for DeepSpeed: every setting explicit, and none that DeepSpeed refuses."""

from __future__ import annotations

from typing import Any

from neox.config.neox_config import NeoXConfig
from neox.config.sections.conditions import status_of
from neox.config.sections.deepspeed import ZeroSettings
from neox.plan.batch import BatchPlan
from neox.plan.precision import Precision
from neox.plan.topology import Topology

_ZERO_STATUS = {key: status_of(info) for key, info in ZeroSettings.model_fields.items()}
# Read by DeepSpeed when it saves or loads a checkpoint itself, which it never does here.
_CHECKPOINT_KEYS = tuple(key for key, status in _ZERO_STATUS.items() if status == "no effect")
_OFFLOADS = {"offload_optimizer", "offload_param"}
_LEFT_OUT = {key for key, status in _ZERO_STATUS.items() if status != "works"} | _OFFLOADS | {"cpu_offload"}
# Written as they are given.
_UNCHANGED = ("prescale_gradients", "gradient_predivide_factor", "dump_state", "zero_allow_untested_optimizer")


def deepspeed_json(
    config: NeoXConfig, grid: Topology, batch: BatchPlan, precision: Precision
) -> tuple[dict[str, Any], list[str]]:
    """Return DeepSpeed's configuration, and notes on what was translated or dropped.

    A value that was not given is written where DeepSpeed's default may differ from NeoX's (`gradient_clipping`).
    """
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
    if config.optimizer.model_fields_set & {"optimizer"}:
        optimizer = config.optimizer.optimizer
        given = optimizer.model_dump(exclude_unset=True, exclude_none=True, mode="json")
        result["optimizer"] = {"type": optimizer.type, **given}
    result["zero_optimization"] = _zero(config, grid, notes)
    if ds.zero_optimization.offloads_optimizer:
        result["zero_force_ds_cpu_optimizer"] = False  # the optimizer is ours, on the CPU too
    result |= _precision(config, precision, notes)
    result |= {key: getattr(ds, key) for key in _UNCHANGED if config.given(key)}
    if grid.sequence_parallel and grid.pp_size > 1:
        # DeepSpeed would take what stages pass on for equal on tensor ranks: send a part from each, and gather them.
        result["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    communication = _communication(config, notes)
    if communication is not None:
        result["communication_data_type"] = communication
    for key in ("flops_profiler", "comms_logger"):
        block = getattr(ds, key)
        if block is not None:
            result[key] = block.model_dump(exclude_none=True)
    return result, notes


def _zero(config: NeoXConfig, grid: Topology, notes: list[str]) -> dict[str, Any]:
    """Return the ZeRO block; offload keys with `none` are left out."""
    settings = config.deepspeed.zero_optimization
    block: dict[str, Any] = settings.model_dump(exclude_none=True, exclude=_LEFT_OUT) | _offload(config, notes)
    notes.extend(
        f"{config.describe_setting(f'zero_optimization.{key}')} changes nothing: checkpoints are this project's own"
        for key in _CHECKPOINT_KEYS
        if getattr(settings, key)
    )
    if grid.pp_size > 1 and block.pop("overlap_comm", False):
        notes.append(
            f"{config.describe_setting('zero_optimization.overlap_comm')} is dropped: DeepSpeed's pipeline engine "
            "cannot overlap reduction with the backward pass"
        )
    if settings.overlap_comm is False:
        block["overlap_comm"] = False
    if settings.states_directory is not None:
        block["sub_group_size"] = settings.updated_at_once
    return block


def _offload(config: NeoXConfig, notes: list[str]) -> dict[str, Any]:
    """Return the blocks of offload that are on."""
    settings = config.deepspeed.zero_optimization
    on = {"offload_optimizer": settings.offloads_optimizer, "offload_param": settings.offloads_weights}
    if settings.cpu_offload:
        given = config.describe_setting("zero_optimization.cpu_offload")
        notes.append(f"{given} is written as offload_optimizer: {{device: cpu}}, its name today")
    if settings.offloads_optimizer:
        directory = settings.states_directory
        place = "host memory" if directory is None else f"files of {directory}, of which host memory holds what it can"
        notes.append(
            f"offload_optimizer: optimizer states and fp32 weights are in {place}; torch's kernels update them on "
            "the CPU, AdamW in about 1.6 ns for each parameter on two cores (DeepSpeed's CPUAdam: 1.9)"
        )
    blocks = {key: getattr(settings, key) for key, is_on in on.items() if is_on}
    written = {
        # `nvme` too: to DeepSpeed, what is in our files is in host memory.
        key: {**({} if block is None else block.model_dump(exclude_none=True)), "device": "cpu"}
        for key, block in blocks.items()
    }
    if settings.weights_directory is not None:
        written["offload_param"]["pin_memory"] = False
    return written


def _precision(config: NeoXConfig, precision: Precision, notes: list[str]) -> dict[str, Any]:
    """Return the fp16, bf16 and data_types blocks."""
    asked = config.deepspeed.data_types.grad_accum_dtype if config.deepspeed.data_types else None
    accumulation = {"data_types": {"grad_accum_dtype": asked}} if asked else {}
    if precision == "fp16":
        return {"fp16": _fp16(config, notes), **accumulation}
    if precision == "bf16":
        _note_bf16(config, notes)
        _note_unused_fp16(config, precision, notes)
        if asked is None and config.deepspeed.zero_optimization.stage >= 1:
            # DeepSpeed would accumulate in bf16; with ZeRO-0 it does, and refuses the key.
            accumulation = {"data_types": {"grad_accum_dtype": "fp32"}}
            notes.append("data_types.grad_accum_dtype is fp32: bf16 gradients are accumulated in fp32")
        elif asked is None and config.deepspeed.gradient_accumulation_steps not in (None, 1):
            notes.append("bf16 with ZeRO-0 accumulates gradients in bf16; zero_optimization.stage 1 does so in fp32")
        immediate = config.deepspeed.bf16.immediate_grad_update if config.deepspeed.bf16 else True
        return {"bf16": {"enabled": True, "immediate_grad_update": immediate}, **accumulation}
    _note_unused_fp16(config, precision, notes)
    return accumulation


def _fp16(config: NeoXConfig, notes: list[str]) -> dict[str, Any]:
    """Return DeepSpeed's fp16 block: v2.0's own keys translated to `enabled`."""
    block = config.deepspeed.fp16
    if block is None:
        return {"enabled": True}
    for key in ("fp16", "type"):
        if getattr(block, key) is not None:
            given = config.describe_setting(f"fp16.{key}")
            notes.append(f"{given} is written as fp16.enabled, the one DeepSpeed knows")
    return {**block.model_dump(exclude_none=True, exclude={"fp16", "type"}), "enabled": True}


def _note_unused_fp16(config: NeoXConfig, precision: Precision, notes: list[str]) -> None:
    """Note an fp16 block that has no effect, unless it was switched off or translated."""
    block = config.deepspeed.fp16
    if block is None or block.enabled is False or block.fp16 is False or block.type is not None:
        return
    keys = [f"fp16.{key}" for key in block.model_dump(exclude_none=True)]
    if keys:
        where = config.source(keys[0])
        notes.append(
            f"{', '.join(keys)} ({where}) changes nothing: training is in {precision}; fp16.enabled switches it on"
        )


def _note_bf16(config: NeoXConfig, notes: list[str]) -> None:
    block = config.deepspeed.fp16
    if block is not None and block.type in ("bfloat16", "bf16"):
        notes.append(
            f"{config.describe_setting('fp16.type')} is written as bf16.enabled; bf16 needs no loss scale, so the "
            "other keys of fp16 are left out"
        )


def _communication(config: NeoXConfig, notes: list[str]) -> str | None:
    """Return the format in which gradients are communicated, if it was given."""
    ds = config.deepspeed
    if ds.fp32_allreduce and ds.communication_data_type is None:
        notes.append(f"{config.describe_setting('fp32_allreduce')} is written as communication_data_type fp32")
        return "fp32"
    return ds.communication_data_type
