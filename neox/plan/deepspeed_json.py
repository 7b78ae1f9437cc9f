"""JSON object for DeepSpeed: every setting explicit, and none that DeepSpeed refuses."""

from __future__ import annotations

from typing import Any

from neox.config.neox_config import NeoXConfig
from neox.config.sections.conditions import status_of
from neox.config.sections.deepspeed import Bf16Settings, ZeroSettings
from neox.plan.batches.batch import BatchPlan
from neox.plan.devices.precision import Precision
from neox.plan.ranks.pipeline_schedules import ranges_per_stage
from neox.plan.ranks.topology import Topology

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

    A value that was not given is written if DeepSpeed's default may differ from NeoX's (`gradient_clipping`).
    """
    notes: list[str] = []
    ds = config.deepspeed
    result: dict[str, Any] = {
        # DeepSpeed counts a micro batch for each rank with the same weights; context ranks share one.
        "train_batch_size": batch.train_batch_size * grid.cp_size,
        "train_micro_batch_size_per_gpu": batch.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": ds.gradient_clipping,
        "steps_per_print": ds.steps_per_print,
        "wall_clock_breakdown": ds.wall_clock_breakdown,
        **_optimizer(config),
        "zero_optimization": _zero(config, grid, precision, notes),
    }
    if ds.zero_optimization.offloads_optimizer:
        result["zero_force_ds_cpu_optimizer"] = False  # the optimizer is ours, on the CPU too
    result |= _precision(config, precision, notes)
    for key in _UNCHANGED:
        if config.given(key):
            result[key] = getattr(ds, key)
    communication = _communication(config, notes)
    if communication is not None:
        result["communication_data_type"] = communication
    for key in ("flops_profiler", "comms_logger"):
        block = getattr(ds, key)
        if block is not None:
            result[key] = block.model_dump(exclude_none=True)
    return result, notes


def _optimizer(config: NeoXConfig) -> dict[str, Any]:
    """Return the optimizer block, if one was given."""
    if "optimizer" not in config.optimizer.model_fields_set:
        return {}
    optimizer = config.optimizer.optimizer
    given = optimizer.model_dump(exclude_unset=True, exclude_none=True, mode="json")
    return {"optimizer": {"type": optimizer.type, **given}}


def _reduces_ranges(config: NeoXConfig, grid: Topology, precision: Precision) -> bool:
    """Return whether a pipeline stage reduces the gradients of one range of layers while another one runs."""
    keys = config.parallelism
    ranges = ranges_per_stage(keys.pipeline_schedule, grid.pp_size, keys.virtual_stages)
    return ranges > 1 and (precision == "bf16" or config.deepspeed.zero_optimization.stage == 0)


def _zero(config: NeoXConfig, grid: Topology, precision: Precision, notes: list[str]) -> dict[str, Any]:
    """Return the ZeRO block; offload keys with `none` are left out."""
    settings = config.deepspeed.zero_optimization
    block: dict[str, Any] = settings.model_dump(exclude_none=True, exclude=_LEFT_OUT) | _offload(config, notes)
    for key in _CHECKPOINT_KEYS:
        if getattr(settings, key):
            given = config.describe_setting(f"zero_optimization.{key}")
            notes.append(f"{given} changes nothing: checkpoints are this project's own")
    if grid.pp_size > 1 and block.pop("overlap_comm", False):
        given = config.describe_setting("zero_optimization.overlap_comm")
        if not _reduces_ranges(config, grid, precision):
            notes.append(
                f"{given} is dropped: with stages gradients are reduced during the backward pass only in bf16 or with "
                "ZeRO 0, and if a stage has several ranges of layers (pipeline_schedule)"
            )
    if settings.overlap_comm is False:
        block["overlap_comm"] = False
    if settings.states_directory is not None:
        block["sub_group_size"] = settings.updated_at_once
    return block


def _offload(config: NeoXConfig, notes: list[str]) -> dict[str, Any]:
    """Return the blocks of offload that are on.

    The device is always `cpu`: to DeepSpeed, what is in our files is in host memory.
    """
    settings = config.deepspeed.zero_optimization
    blocks = {}
    if settings.cpu_offload:
        given = config.describe_setting("zero_optimization.cpu_offload")
        notes.append(f"{given} is written as offload_optimizer: {{device: cpu}}, its name today")
    if settings.offloads_optimizer:
        notes.append(_offload_note(settings))
        given_block = settings.offload_optimizer
        keys = {} if given_block is None else given_block.model_dump(exclude_none=True)
        blocks["offload_optimizer"] = {**keys, "device": "cpu"}
    if settings.offload_param is not None and settings.offloads_weights:
        keys = settings.offload_param.model_dump(exclude_none=True)
        blocks["offload_param"] = {**keys, "device": "cpu"}
        if settings.weights_directory is not None:
            blocks["offload_param"]["pin_memory"] = False
    return blocks


def _offload_note(settings: ZeroSettings) -> str:
    place = "host memory"
    if settings.states_directory is not None:
        place = f"files of {settings.states_directory}, of which host memory holds what it can"
    return (
        f"offload_optimizer: optimizer states and fp32 weights are in {place}; torch's kernels update them on "
        "the CPU, AdamW in about 1.6 ns for each parameter on two cores (DeepSpeed's CPUAdam: 1.9)"
    )


def _precision(config: NeoXConfig, precision: Precision, notes: list[str]) -> dict[str, Any]:
    """Return the fp16, bf16 and data_types blocks."""
    data_types = config.deepspeed.data_types
    accumulation: dict[str, Any] = {}
    if data_types is not None and data_types.grad_accum_dtype is not None:
        accumulation = {"data_types": {"grad_accum_dtype": data_types.grad_accum_dtype}}
    if precision == "fp16":
        return {"fp16": _fp16(config, notes), **accumulation}
    if precision == "bf16":
        _note_bf16(config, notes)
        _note_unused_fp16(config, precision, notes)
        bf16 = config.deepspeed.bf16 or Bf16Settings()
        if not accumulation and not bf16.has_bf16_states:
            accumulation = _bf16_accumulation(config, notes)
        block = {"enabled": True, "immediate_grad_update": bf16.immediate_grad_update}
        if bf16.has_bf16_states:
            block |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": bf16.bf16_optimizer_states}
        return {"bf16": block, **accumulation}
    _note_unused_fp16(config, precision, notes)
    return accumulation


def _bf16_accumulation(config: NeoXConfig, notes: list[str]) -> dict[str, Any]:
    """Return the data_types block of bf16 if none was given.

    DeepSpeed would accumulate in bf16. With ZeRO 0 it does so, and refuses the key.
    """
    if config.deepspeed.zero_optimization.stage >= 1:
        notes.append("data_types.grad_accum_dtype is fp32: bf16 gradients are accumulated in fp32")
        return {"data_types": {"grad_accum_dtype": "fp32"}}
    if config.parallelism.pipe_parallel_size > 1:
        notes.append(
            "bf16 stages with ZeRO-0 accumulate gradients in bf16 and divide states over data ranks; "
            "zero_optimization.stage 1 accumulates in fp32, which takes 2 bytes per parameter more"
        )
    elif config.deepspeed.gradient_accumulation_steps not in (None, 1):
        notes.append("bf16 with ZeRO-0 accumulates gradients in bf16; zero_optimization.stage 1 does so in fp32")
    return {}


def _fp16(config: NeoXConfig, notes: list[str]) -> dict[str, Any]:
    """Return DeepSpeed's fp16 block, with v2.0's own keys translated to `enabled`."""
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
        given = f"{', '.join(keys)} ({config.source(keys[0])})"
        notes.append(f"{given} changes nothing: training is in {precision}; fp16.enabled switches it on")


def _note_bf16(config: NeoXConfig, notes: list[str]) -> None:
    """Note v2.0's way to ask for bf16."""
    block = config.deepspeed.fp16
    if block is not None and block.type in ("bfloat16", "bf16"):
        given = config.describe_setting("fp16.type")
        notes.append(
            f"{given} is written as bf16.enabled; bf16 needs no loss scale, so the other keys of fp16 are left out"
        )


def _communication(config: NeoXConfig, notes: list[str]) -> str | None:
    """Return the format in which gradients are communicated, if it was given."""
    ds = config.deepspeed
    if ds.fp32_allreduce and ds.communication_data_type is None:
        notes.append(f"{config.describe_setting('fp32_allreduce')} is written as communication_data_type fp32")
        return "fp32"
    return ds.communication_data_type
