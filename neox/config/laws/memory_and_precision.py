"""Laws of ZeRO, offload, precision blocks and accumulation."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.precision import choose_precision
from neox.config.sections import NeoXConfig
from neox.config.wording import place, said


def memory_and_precision_problems(config: NeoXConfig) -> Iterator[str]:
    """Yield violations of laws about ZeRO and precision."""
    yield from _zero(config)
    contradictions: list[str] = []
    choose_precision(config, contradictions)
    yield from contradictions
    yield from _fp16(config)
    yield from _accumulation(config)
    yield from _compiled(config)
    travels = config.deepspeed.communication_data_type
    if config.deepspeed.fp32_allreduce and travels not in (None, "fp32"):
        yield (
            f"{place(config, 'fp32_allreduce')}`fp32_allreduce: true` contradicts "
            f"{said(config, 'communication_data_type', travels)}; keep one"
        )


def _zero(config: NeoXConfig) -> Iterator[str]:
    zero, pp = config.deepspeed.zero_optimization, config.parallelism.pipe_parallel_size
    if zero.stage >= 2 and pp > 1:
        yield (
            f"{place(config, 'zero_optimization.stage')}`zero_optimization.stage: {zero.stage}` does not work with "
            f"{said(config, 'pipe_parallel_size', pp)}: DeepSpeed's pipeline keeps gradients and weights whole; "
            f"use stage 1, or pipe_parallel_size 1 with model_parallel_size for the rest"
        )
    offloads = {
        "offload_optimizer": zero.offload_optimizer is not None and zero.offload_optimizer.device != "none",
        "offload_param": zero.offload_param is not None and zero.offload_param.device != "none",
        "cpu_offload": bool(zero.cpu_offload),
    }
    for name, on in offloads.items():
        if on:
            key = f"zero_optimization.{name}"
            yield f"{place(config, key)}`{key}`: states stay on the GPU here; use a higher ZeRO stage or more ranks"


def _fp16(config: NeoXConfig) -> Iterator[str]:
    block = config.deepspeed.fp16
    if block is None:
        return
    if block.enabled is not None and block.fp16 is not None and block.enabled != block.fp16:
        yield (
            f"{place(config, 'fp16.fp16')}`fp16.fp16: {block.fp16}` contradicts "
            f"{said(config, 'fp16.enabled', block.enabled)}; keep `enabled`"
        )
    asked = config.to_flat().get("dynamic_loss_scale")
    if asked is False and not block.loss_scale:
        yield (
            f"{place(config, 'dynamic_loss_scale')}`dynamic_loss_scale: false` needs a fixed fp16.loss_scale; "
            "give one, or remove it"
        )


def _accumulation(config: NeoXConfig) -> Iterator[str]:
    wanted = config.deepspeed.data_types.grad_accum_dtype if config.deepspeed.data_types else None
    if wanted is None:
        return
    key, precision = "data_types.grad_accum_dtype", choose_precision(config, [])
    if wanted == "fp32" and precision == "fp16" and config.parallelism.pipe_parallel_size > 1:
        yield (
            f"{place(config, key)}`{key}: fp32` with fp16 and pipeline stages lets tied weights drift apart in "
            "DeepSpeed; leave it out, or use bf16"
        )
    if wanted == "fp32" and precision == "bf16" and config.deepspeed.zero_optimization.stage == 0:
        yield f"{place(config, key)}`{key}: fp32` with bf16 needs zero_optimization.stage 1 or more in DeepSpeed"
    if wanted != "fp32" and wanted != precision:
        yield f"{place(config, key)}`{key}: {wanted}` does not fit {precision} training; leave it out"


def _compiled(config: NeoXConfig) -> Iterator[str]:
    if not config.training.compile_layers:
        return
    where, stage = place(config, "compile_layers"), config.deepspeed.zero_optimization.stage
    if stage == 3:
        yield (
            f"{where}`compile_layers: true` does not work with {said(config, 'zero_optimization.stage', stage)}, which "
            "gathers weights inside the layers; use a lower stage, or remove it"
        )
    if config.model.apply_query_key_layer_scaling:
        yield (
            f"{where}`compile_layers: true` does not work with {said(config, 'apply_query_key_layer_scaling', True)}: "
            "layers share one compiled graph, and each would have a scale of its own; remove one of them"
        )
