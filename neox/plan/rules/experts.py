"""Rules of mixtures of experts: numbers that divide, and what experts do not work with."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.config.sections.experts import ExpertsConfig
from neox.plan.devices.precision import choose_precision
from neox.plan.network.expert_keys import expert_blocks
from neox.plan.rules.network import nearest_multiples
from neox.problems import Problem

_NUMBER = "moe_num_experts"
_TENSOR_RANKS = "model_parallel_size"
_MLP_MODULES = ("dense_h_to_4h", "dense_4h_to_h")


def expert_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about experts that are broken; none for networks without experts."""
    if config.experts.moe_num_experts == 1:
        return
    yield from _choices(config, config.experts)
    yield from _blocks(config)
    yield from _widths(config)
    yield from _refused_with_experts(config)
    if config.parallelism.expert_model_parallel_size > 1:
        yield from _divided_experts(config)


def _choices(config: NeoXConfig, experts: ExpertsConfig) -> Iterator[Problem]:
    """Yield what is wrong with the numbers of experts and groups that a token chooses."""
    number = config.describe_setting(_NUMBER)
    if experts.moe_top_k > experts.moe_num_experts:
        yield config.problem("moe_top_k", f"is more than {number}; use at most that many", _NUMBER)
    groups = experts.moe_router_num_groups
    chosen = experts.moe_router_group_topk
    if groups is None or chosen is None:
        return
    if experts.moe_num_experts % groups:
        yield config.problem("moe_router_num_groups", f"does not divide {number}; use a divisor of that", _NUMBER)
        return
    if chosen > groups:
        described = config.describe_setting("moe_router_num_groups")
        yield config.problem("moe_router_group_topk", f"is more than {described}", "moe_router_num_groups")
        return
    size = experts.moe_num_experts // groups
    counted = experts.moe_router_group_score_topk
    if counted is not None and counted > size:
        rule = f"is more than the {size} experts of a group; use at most that many"
        yield config.problem("moe_router_group_score_topk", rule, "moe_router_num_groups", _NUMBER)
    available = size * chosen
    if experts.moe_top_k > available:
        rule = f"is more than the {available} experts of the groups that a token chooses; choose more groups"
        yield config.problem("moe_top_k", rule, "moe_router_group_topk", "moe_router_num_groups", _NUMBER)


def _blocks(config: NeoXConfig) -> Iterator[Problem]:
    """Yield what is wrong with the blocks that have experts."""
    layers = config.model.num_layers
    if layers is None:
        return
    experts = config.experts
    listed = experts.moe_layer_freq
    depth = config.describe_setting("num_layers")
    if isinstance(listed, tuple) and len(listed) != layers:
        yield config.problem("moe_layer_freq", f"has {len(listed)} numbers, but {depth}", "num_layers")
        return
    blocks = expert_blocks(layers, experts.moe_expert_interval, listed, experts.moe_first_k_dense)
    if not blocks:
        keys = ("moe_layer_freq", "moe_expert_interval", "moe_first_k_dense", "num_layers")
        yield config.problem(_NUMBER, f"and {depth}: no block has experts; change the first blocks", *keys)
    if len(blocks) == layers and config.given("use_bias_in_mlp") and config.model.use_bias_in_mlp:
        rule = "has no effect, because all MLPs are experts, whose biases are set by moe_expert_bias; remove it"
        yield config.problem("use_bias_in_mlp", rule, _NUMBER)


def _widths(config: NeoXConfig) -> Iterator[Problem]:
    """Yield widths that tensor ranks cannot divide; the rule of the MLP reports its own."""
    degree = config.parallelism.model_parallel_size
    for key in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        width = config.value(key)
        if width is not None and width % degree:
            ranks = config.describe_setting(_TENSOR_RANKS)
            nearest = nearest_multiples(width, degree)
            yield config.problem(key, f"cannot be divided over {ranks}; use {nearest}", _TENSOR_RANKS)


def _refused_with_experts(config: NeoXConfig) -> Iterator[Problem]:
    number = config.describe_setting(_NUMBER)
    lora = config.training.lora
    if lora is not None and lora.dropout and not set(lora.target).isdisjoint(_MLP_MODULES):
        rule = f"does not work with adapters of experts ({number}): peft has none there; set it to 0"
        yield config.problem("lora.dropout", rule, "lora.target", _NUMBER)


def _divided_experts(config: NeoXConfig) -> Iterator[Problem]:
    """Yield what does not work with experts that data ranks divide."""
    key = "expert_model_parallel_size"
    number = config.describe_setting(_NUMBER)
    if config.experts.moe_num_experts % config.parallelism.expert_model_parallel_size:
        yield config.problem(key, f"does not divide {number}; use a divisor of that", _NUMBER)
    optimizer = config.optimizer.optimizer
    if not optimizer.kind.elementwise and not optimizer.kind.gathers:
        rule = f"needs an optimizer that updates elements or matrices by themselves, not {optimizer.name}; use Adam"
        yield config.problem(key, rule, "optimizer.type")
    zero = config.deepspeed.zero_optimization
    if zero.reduce_scatter is False:
        rule = "needs gradients that are reduced to the ranks that update them; remove reduce_scatter: false"
        yield config.problem(key, rule, "zero_optimization.reduce_scatter")
    # DeepSpeed's wrapper of bf16 with ZeRO 1 has buffers of its own.
    keeps_buffers = zero.stage == 1 and choose_precision(config, []) == "bf16"
    if zero.contiguous_gradients is False and zero.stage in (1, 2) and not keeps_buffers:
        rule = (
            "needs contiguous gradients: without them DeepSpeed averages those of different experts; remove "
            "contiguous_gradients: false"
        )
        yield config.problem(key, rule, "zero_optimization.contiguous_gradients", "zero_optimization.stage")
    if zero.stage == 3 and (zero.zero_hpz_partition_size or 1) > 1:
        rule = "does not work with second copies of weights, which neighbouring data ranks divide; remove one of them"
        yield config.problem(key, rule, "zero_optimization.zero_hpz_partition_size")
    if zero.stage == 3 and zero.zero_quantized_gradients:
        rule = "does not work with quantized gradients, which DeepSpeed reduces over all data ranks; remove one of them"
        yield config.problem(key, rule, "zero_optimization.zero_quantized_gradients")
