"""The plan's memory of divided experts and of multi-token prediction is what a step holds."""

from __future__ import annotations

import pytest

from benchmarks.memory import EXPERT_LAYOUTS, EXPERTS, device_of, plan_of, step_peaks
from neox.plan import RunPlan
from neox.plan.devices.device import memory_on
from tests.distributed.spawn import run_ranks


def check(world: int, plans: list[RunPlan]) -> None:
    """Compare the memory of each plan with what a step holds on the fullest rank."""
    peaks = run_ranks(world, step_peaks, plans, timeout=1500)
    for number, plan in enumerate(plans):
        device = device_of(plan)
        planned = memory_on(plan, device).needed(on_cpu=device.shared)
        held = max(of_rank[number] for of_rank in peaks)
        assert planned == pytest.approx(held, rel=0.05), f"{number}: {plan.grid}"


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layouts_of_experts_take_the_planned_memory(world: int, precision: str) -> None:
    layouts = [(keys, zero) for ranks, keys, zero in EXPERT_LAYOUTS if ranks == world]
    plans = [plan_of(world, precision, zero, **EXPERTS, **keys) for keys, zero in layouts]
    check(world, plans)


MODULES = [
    (1, {"mtp_num_layers": 1}, {"stage": 0}),
    (1, {"mtp_num_layers": 3, "checkpoint_activations": True}, {"stage": 0}),
    (2, {"mtp_num_layers": 2}, {"stage": 1}),
    (2, {"mtp_num_layers": 2}, {"stage": 3}),
    (2, {"mtp_num_layers": 2, "model_parallel_size": 2}, {"stage": 0}),
    (2, {"mtp_num_layers": 2, "model_parallel_size": 2, "sequence_parallel": True}, {"stage": 0}),
    (2, {"mtp_num_layers": 1, "pipe_parallel_size": 2, "gradient_accumulation_steps": 4}, {"stage": 1}),
    (2, {**EXPERTS, "mtp_num_layers": 1, "expert_model_parallel_size": 2}, {"stage": 1}),
    (2, {"mtp_num_layers": 2, "ema_decay": 0.99}, {"stage": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_multi_token_prediction_takes_the_planned_memory(precision: str) -> None:
    for world in (1, 2):
        layouts = [(keys, zero) for ranks, keys, zero in MODULES if ranks == world]
        plans = [plan_of(world, precision, zero, **keys) for keys, zero in layouts]
        check(world, plans)


LATENT: dict[str, object] = {
    "attention_config": [[["latent"], "all"]],
    "num_layers": 6,
    "seq_length": 1024,
    "max_position_embeddings": 1024,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "norm": "rmsnorm",
    "use_bias_in_qkv": False,
}
VALUES: dict[str, dict[str, object]] = {
    "as wide as keys": {"head_dim": 64, "rotary_pct": 0.25, "v_head_dim": 64},
    "narrower": {"head_dim": 96, "rotary_pct": 1 / 3, "v_head_dim": 64},
}
CONTEXT_LAYOUTS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"context_parallel_size": 2, "context_parallel_kind": "all_gather"}, {"stage": 1}),
    ({"context_parallel_size": 2, "context_parallel_kind": "ulysses"}, {"stage": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_latent_attention_takes_the_planned_memory(precision: str, values: str) -> None:
    keys = {**LATENT, **VALUES[values]}
    check(1, [plan_of(1, precision, {"stage": 0}, **keys)])
    check(2, [plan_of(2, precision, zero, **keys, **layout) for layout, zero in CONTEXT_LAYOUTS])


RECOMPUTED: dict[str, object] = {"num_layers": 6, "checkpoint_activations": True}
CONTEXT_KINDS = ("all_gather", "ulysses")


@pytest.mark.slow
@pytest.mark.parametrize("length", [128, 1024])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_context_ranks_that_recompute_take_the_planned_memory(precision: str, length: int) -> None:
    keys = {**RECOMPUTED, "seq_length": length, "max_position_embeddings": length, "context_parallel_size": 2}
    plans = []
    for kind in CONTEXT_KINDS:
        for stage in (1, 3):
            plans.append(plan_of(2, precision, {"stage": stage}, context_parallel_kind=kind, **keys))
    check(2, plans)


ADAPTED = {
    **EXPERTS,
    "lora": {"r": 16, "alpha": 16, "target": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
}
ADAPTER_LAYOUTS: list[tuple[int, dict[str, object], dict[str, object]]] = [
    (1, {}, {"stage": 0}),
    (2, {"model_parallel_size": 2}, {"stage": 0}),
    (2, {}, {"stage": 1}),
    (2, {}, {"stage": 3}),
    (2, {"expert_model_parallel_size": 2}, {"stage": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_of_experts_take_the_planned_memory(precision: str) -> None:
    for world in (1, 2):
        layouts = [(keys, zero) for ranks, keys, zero in ADAPTER_LAYOUTS if ranks == world]
        plans = [plan_of(world, precision, zero, **ADAPTED, **keys) for keys, zero in layouts]
        check(world, plans)


LATENT_ADAPTERS = {
    "r": 16,
    "alpha": 16,
    "target": ["query_down", "query_up", "key_value_down", "key_value_up", "dense"],
}
OF_LATENT: list[tuple[int, dict[str, object], dict[str, object]]] = [
    (1, {}, {"stage": 0}),
    (2, {"model_parallel_size": 2}, {"stage": 0}),
    (2, {"model_parallel_size": 2, "sequence_parallel": True}, {"stage": 0}),
    (2, {"mtp_num_layers": 1}, {"stage": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [None, LATENT_ADAPTERS], ids=["whole", "adapters"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_latent_attention_in_layouts_takes_the_planned_memory(precision: str, adapters: object) -> None:
    keys = {**LATENT, **VALUES["as wide as keys"], "lora": adapters}
    for world in (1, 2):
        layouts = [(layout, zero) for ranks, layout, zero in OF_LATENT if ranks == world]
        check(world, [plan_of(world, precision, zero, **keys, **layout) for layout, zero in layouts])
    if adapters is None or precision == "bf16":
        # In processes of its own: DeepSpeed replaces torch's products for good. Its own keep inputs of frozen layers;
        # oneDNN's in fp32, which the plan does not count, free them.
        check(2, [plan_of(2, precision, {"stage": 3}, **keys, checkpoint_activations=True)])


ATTENTION_ADAPTERS = {"r": 16, "alpha": 16, "target": ["query_key_value", "dense"]}
LONGER = {"num_layers": 6, "seq_length": 1024, "max_position_embeddings": 1024, "lora": ATTENTION_ADAPTERS}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_of_attention_alone_take_the_planned_memory(precision: str) -> None:
    """Frozen MLPs keep no input of their products, and a frozen head has no gradient."""
    check(1, [plan_of(1, precision, {"stage": 0}, **LONGER)])
    layouts = [({"model_parallel_size": 2}, {"stage": 0}), ({"mtp_num_layers": 1}, {"stage": 1})]
    check(2, [plan_of(2, precision, zero, **LONGER, **layout) for layout, zero in layouts])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["Muon", "Adam8bit"])
def test_optimizers_of_divided_experts_and_of_modules_take_the_planned_memory(optimizer: str) -> None:
    divided = {**EXPERTS, "expert_model_parallel_size": 2}
    for keys in (divided, {"mtp_num_layers": 2}):
        check(2, [plan_of(2, "bf16", {"stage": stage}, optimizer, **keys) for stage in (1, 2)])
