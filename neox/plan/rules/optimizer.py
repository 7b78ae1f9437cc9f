"""Rules of the optimizer: its numbers, where it works, and muP."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.config.sections.model import MUP_INIT_METHODS
from neox.config.sections.optimizer_params import (
    AdafactorParams,
    Adam8bitParams,
    AdamParams,
    DecayingParams,
    LionParams,
    MuonParams,
    SGDParams,
)
from neox.config.sections.optimizer_table import plain_name
from neox.plan.precision import choose_precision
from neox.problems import Note, Problem


def optimizer_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about the optimizer that are broken."""
    yield from _numbers(config)
    yield from _offload(config)
    yield from _whole_parameters(config)
    yield from _hidden_matrices(config)
    yield from _mup(config)


def optimizer_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield a note for weight decay, and for a schedule of betas, given to an optimizer that has none."""
    params = config.optimizer.optimizer.params
    kind = config.describe_setting("optimizer.type")
    if config.given("weight_decay") and not isinstance(params, DecayingParams):
        decay = config.describe_setting("weight_decay")
        message = f"{decay} changes nothing with {kind}, which has none, as in gpt-neox"
        yield Note(("weight_decay", "optimizer.type"), message)
    scheduler = config.schedule.scheduler
    cycles = scheduler is not None and scheduler.type == "OneCycle" and scheduler.params.cycle_momentum
    if cycles and "betas" not in type(params).model_fields:
        key = "scheduler.params.cycle_momentum"
        momentum = config.describe_setting(key)
        message = f"{momentum} changes nothing with {kind}, which has no betas; only its learning rate is cycled"
        yield Note((key, "optimizer.type"), message)


def _numbers(config: NeoXConfig) -> Iterator[Problem]:
    params, block = config.optimizer.optimizer.params, "optimizer.params"
    if isinstance(params, AdamParams | LionParams | MuonParams | Adam8bitParams):
        for i, beta in enumerate(params.betas):
            if not 0 <= beta < 1:
                yield config.problem_about(f"`{block}.betas[{i}]: {beta}` must be in [0, 1)", f"{block}.betas")
    if isinstance(params, AdafactorParams) and min(value or 0.0 for value in params.eps) < 0:
        yield config.problem(f"{block}.eps", "must not be negative")
    if isinstance(params, AdamParams) and params.adam_w_mode is False:
        yield config.problem(
            f"{block}.adam_w_mode", "does not work: weight decay is decoupled here, as in gpt-neox; remove it"
        )
    if isinstance(params, SGDParams) and params.nesterov and (not params.momentum or params.dampening):
        yield config.problem(
            f"{block}.nesterov",
            "needs `momentum` above 0, and no `dampening`",
            f"{block}.momentum",
            f"{block}.dampening",
        )
    if isinstance(params, DecayingParams) and params.weight_decay is not None:
        flat = config.optimizer.weight_decay
        if config.given("weight_decay") and params.weight_decay != flat:
            other = config.describe_setting("weight_decay")
            yield config.problem(f"{block}.weight_decay", f"contradicts {other}; keep one", "weight_decay")


def _offload(config: NeoXConfig) -> Iterator[Problem]:
    """Names of optimizers that update states in the hosts' memory ask for offload."""
    settings, key = config.optimizer.optimizer, "zero_optimization.offload_optimizer"
    if plain_name(settings.type) not in map(plain_name, settings.kind.host_names):
        return
    if not config.deepspeed.zero_optimization.offloads_optimizer:
        yield config.problem(
            "optimizer.type",
            f"updates states in the hosts' memory; set `{key}: {{device: cpu}}`, or use {settings.kind.names[0]}",
            key,
        )


def _whole_parameters(config: NeoXConfig) -> Iterator[Problem]:
    """An optimizer whose step depends on a parameter's shape works only where it sees whole parameters."""
    kind, stage, degree = config.optimizer.optimizer.kind, "zero_optimization.stage", "model_parallel_size"
    if kind.elementwise:
        return
    flat_bf16 = choose_precision(config, []) == "bf16" and config.parallelism.pipe_parallel_size > 1
    cuts = {
        stage: (config.value(stage) > 0 and not kind.gathers, "ZeRO hands it flat pieces of them; use stage 0"),
        degree: (config.value(degree) > 1, "tensor ranks hold parts of them; use 1"),
        "pipe_parallel_size": (
            flat_bf16 and not kind.gathers,
            "DeepSpeed's bf16 pipeline hands it flat pieces of them; use 1, or fp16",
        ),
    }
    for key, (cut, why) in cuts.items():
        if cut:
            yield config.problem(
                "optimizer.type",
                f"does not work with {config.describe_setting(key)}: its step depends on the shape of whole "
                f"parameters, and {why}, or another optimizer, such as Adam or Lion",
                key,
            )


def _hidden_matrices(config: NeoXConfig) -> Iterator[Problem]:
    """An optimizer for blocks' matrices has nothing to do where they are frozen."""
    if not config.optimizer.optimizer.kind.hidden_apart:
        return
    prompt = config.model.soft_prompt_tuning
    frozen = {"lora": config.training.lora is not None, "soft_prompt_tuning": prompt is not None and prompt.enabled}
    for key in (key for key, freezes in frozen.items() if freezes):
        yield config.problem(
            "optimizer.type",
            f"updates matrices of blocks, all of which `{key}` freezes; use Adam, which has the rest",
            key,
        )


def _mup(config: NeoXConfig) -> Iterator[Problem]:
    optimizer, model = config.optimizer, config.model
    if not optimizer.use_mup:
        return
    params = optimizer.optimizer.params
    if isinstance(params, MuonParams) and params.adjust_lr_fn == "original":
        yield config.problem(
            "optimizer.params.adjust_lr_fn",
            "has steps that follow the width by itself, which use_mup does; remove it",
            "use_mup",
        )
    if optimizer.mup_base_hidden_size is None:
        rule = "needs `mup_base_hidden_size`, the hidden_size that lr was tuned at"
        yield config.problem("use_mup", rule, "mup_base_hidden_size")
    for key in ("init_method", "output_layer_init_method"):
        if getattr(model, key) not in MUP_INIT_METHODS:
            names = ", ".join(MUP_INIT_METHODS)
            yield config.problem(key, f"follows the width by itself, which use_mup does; use one of {names}", "use_mup")
