"""Rules of the optimizer: where it works, and what it can update."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.config.sections.optimizer_kind import DecayingParams
from neox.config.sections.optimizer_table import plain_name
from neox.plan.devices.precision import choose_precision
from neox.plan.network.parameter_groups import static_group_problems
from neox.problems import Problem

_TYPE = "optimizer.type"
_STAGE = "zero_optimization.stage"
_OFFLOAD = "zero_optimization.offload_optimizer"


def optimizer_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about the optimizer that are broken."""
    yield from _weight_decay(config)
    yield from _offload(config)
    yield from _whole_parameters(config)
    yield from _hidden_matrices(config)
    yield from static_group_problems(config)
    yield from _untouched_rows(config)
    yield from _foreign_kernels(config)


def _weight_decay(config: NeoXConfig) -> Iterator[Problem]:
    """Weight decay may stand in two places, with one value."""
    params = config.optimizer.optimizer.params
    if not isinstance(params, DecayingParams) or params.weight_decay is None or not config.given("weight_decay"):
        return
    if params.weight_decay != config.optimizer.weight_decay:
        other = config.describe_setting("weight_decay")
        yield config.problem("optimizer.params.weight_decay", f"contradicts {other}; keep one", "weight_decay")


def _offload(config: NeoXConfig) -> Iterator[Problem]:
    """Names of optimizers that update states in the hosts' memory ask for offload."""
    settings = config.optimizer.optimizer
    on_host = plain_name(settings.type) in map(plain_name, settings.kind.host_names)
    if on_host and not config.deepspeed.zero_optimization.offloads_optimizer:
        advice = f"set `{_OFFLOAD}: {{device: cpu}}`, or use {settings.kind.names[0]}"
        yield config.problem(_TYPE, f"updates states in the hosts' memory; {advice}", _OFFLOAD)


def _whole_parameters(config: NeoXConfig) -> Iterator[Problem]:
    """An optimizer whose step depends on the shape of a parameter must see whole parameters, or gather them."""
    kind = config.optimizer.optimizer.kind
    if kind.elementwise or kind.gathers:
        return
    if config.value("model_parallel_size") > 1:
        yield _divided(config, "model_parallel_size", "tensor ranks hold parts of them; use 1")
    if config.value(_STAGE) > 0:
        yield _divided(config, _STAGE, "ZeRO hands it flat pieces of them; use stage 0")
    if config.parallelism.pipe_parallel_size > 1 and choose_precision(config, []) == "bf16":
        why = "DeepSpeed's bf16 pipeline hands it flat pieces of them; use 1, or fp16"
        yield _divided(config, "pipe_parallel_size", why)


def _divided(config: NeoXConfig, key: str, why: str) -> Problem:
    """Return the problem that the value of a key divides parameters, with the reason and what to do about the key."""
    rule = f"does not work with {config.describe_setting(key)}: its step depends on the shape of whole parameters"
    return config.problem(_TYPE, f"{rule}, and {why}, or another optimizer, such as Adam or Lion", key)


def _hidden_matrices(config: NeoXConfig) -> Iterator[Problem]:
    """An optimizer for the matrices of blocks has nothing to do if they are frozen."""
    if not config.optimizer.optimizer.kind.hidden_apart:
        return
    freezing = []
    if config.training.lora is not None:
        freezing.append("lora")
    prompt = config.model.soft_prompt_tuning
    if prompt is not None and prompt.enabled:
        freezing.append("soft_prompt_tuning")
    if config.tokenizer.train_only_added_tokens:
        freezing.append("train_only_added_tokens")
    for key in freezing:
        rule = f"updates matrices of blocks, all of which `{key}` freezes; use Adam, which has the rest"
        yield config.problem(_TYPE, rule, key)


def _untouched_rows(config: NeoXConfig) -> Iterator[Problem]:
    """An optimizer that moves elements without a gradient cannot leave the rows of old tokens as they are."""
    key = "train_only_added_tokens"
    kind = config.optimizer.optimizer.kind
    if config.tokenizer.train_only_added_tokens and not kind.leaves_untouched:
        rule = f"does not work with `{key}`: it also changes numbers without a gradient; use Adam"
        yield config.problem(_TYPE, rule, key)


def _foreign_kernels(config: NeoXConfig) -> Iterator[Problem]:
    """Torch's switch for deterministic algorithms does not reach the kernels of other packages."""
    package = config.optimizer.optimizer.kind.package
    if config.training.deterministic and package:
        rule = f"does not work with `deterministic`: nothing is known of the kernels of {package}; use Adam"
        yield config.problem(_TYPE, rule, "deterministic")
