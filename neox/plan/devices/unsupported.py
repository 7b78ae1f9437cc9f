"""What a run asks for and a kind of device does not have. Launcher and ranks ask this function."""

from __future__ import annotations

from collections.abc import Iterator

from neox.architecture import BLOCKS, FLEX_HEAD_DIM, FUSED_SOFTMAX_LENGTH
from neox.devices import DEVICES, AttentionBackend, DeviceFamily, family_has
from neox.plan.network.attention_config import fused_softmax_key
from neox.plan.run_plan import RunPlan
from neox.problems import Problem

_BACKEND = "attention_backend"


def unsupported_by_device(plan: RunPlan, family: DeviceFamily | None) -> Iterator[Problem]:
    """Yield the settings of a training that no device of a kind supports.

    Args:
        plan: The plan.
        family: Kind of the devices of all ranks; None for one that is not known here.
    """
    yield from _attention_backend(plan, family)
    yield from _fused_softmax(plan, family)
    if plan.config.training.fp8 is not None and family != "cpu" and not family_has(family, "scaled_product"):
        # A CPU imitates the kernel.
        yield plan.config.problem("fp8", f"has no kernel here for devices of kind {family}; remove it")
    if family == "cpu":
        for key in plan.config.deepspeed.zero_optimization.quantizing_keys:
            rule = "needs GPUs, because DeepSpeed's kernel runs only there; remove it"
            yield plan.config.problem(key, rule)


def _attention_backend(plan: RunPlan, family: DeviceFamily | None) -> Iterator[Problem]:
    backend = plan.config.training.attention_backend
    if backend == "auto":
        return
    others: tuple[AttentionBackend, ...] = ()
    if family is not None:
        others = DEVICES[family].attention
    if backend not in others:
        rule = f"has no kernel for devices of kind {family}; use {' or '.join(['auto', *others])}"
        yield plan.config.problem(_BACKEND, rule)
        return
    if family != "cpu" and backend in ("flash", "cudnn") and plan.precision == "fp32":
        rule = "takes no fp32; use memory_efficient, or precision: bf16"
        yield plan.config.problem(_BACKEND, rule, "precision")
    if backend == "flex":
        width = _narrowest_head(plan)
        if width < FLEX_HEAD_DIM:
            rule = f"takes heads of at least {FLEX_HEAD_DIM}, and these are {width} wide; use auto or memory_efficient"
            yield plan.config.problem(_BACKEND, rule)


def _fused_softmax(plan: RunPlan, family: DeviceFamily | None) -> Iterator[Problem]:
    key = fused_softmax_key(plan.config)
    length = plan.config.model.seq_length or 0
    if key is not None and family_has(family, "triton") and length > FUSED_SOFTMAX_LENGTH:
        rule = f"serves up to {FUSED_SOFTMAX_LENGTH:,} positions"
        rule += ', fewer than seq_length; use attention_config: [[["flash"], "all"]]'
        yield plan.config.problem(key, rule, "seq_length")


def _narrowest_head(plan: RunPlan) -> int:
    """Return the smallest width of keys or values in the blocks whose attention is `flash`."""
    network = plan.architecture
    widths = []
    for block, kernel in zip(network.attention, plan.attention, strict=True):
        attention = BLOCKS[block].attention
        if attention is not None and kernel == "flash":
            widths.append(min(network.head_dim, attention.value_width(network)))
    return min(widths)
