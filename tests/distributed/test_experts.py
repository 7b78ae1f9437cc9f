"""Mixtures of experts train to the same losses, gradients and weights under every layout of ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from neox.checkpoint import CheckpointReader, find_checkpoint, open_checkpoint, upcycle
from neox.config import NeoXConfig
from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import TINY, batches, tiny_plan

STEPS = 4
EXPERTS: dict[str, Any] = {
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_expert_interval": 2,
    "moe_router_type": "topk",
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
    "moe_aux_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_z_loss_coeff": 0.01,
    "no_weight_tying": True,
}
BIASED: dict[str, Any] = {
    **EXPERTS,
    "moe_router_type": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
}
RECOMPUTED = {"checkpoint_activations": True, "checkpoint_num_layers": 2}
ONLY_EXPERTS_LOSSES = {"loss_normalization": "micro_batch"}
"""Key with which batches without labels have no loss of the objective."""

LAYOUTS: list[dict[str, Any]] = [
    {"mp": 2},
    {"mp": 2, "sequence_parallel": True, **RECOMPUTED},
    {"pp": 2},
    {"pp": 2, "zero": 1, **RECOMPUTED},
    {"zero": 0},
    {"zero": 1, "train_micro_batch_size_per_gpu": 2},
    {"zero": 2},
    {"zero": 3},
]
DIVIDED: dict[str, Any] = {"expert_model_parallel_size": 2}
SOME_LAYOUTS = [LAYOUTS[1], LAYOUTS[3], LAYOUTS[5]]


def curves(plans: list[RunPlan]) -> list[list[dict[str, float]]]:
    """Train each plan on this rank; return scores and gradient norm of each step, then of an evaluation."""
    from neox.engine import initialize_distributed, initialize_engine

    results = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = _batches(plan, grid.data_rank)
        steps = [engine.train_batch(data) for _ in range(STEPS)]
        evaluated = engine.eval_batch(_batches(plan, grid.data_rank)).scores
        results.append([{**step.scores, "norm": step.grad_norm} for step in steps] + [dict(evaluated)])
    return results


def _batches(plan: RunPlan, dp_rank: int) -> Iterator[dict[str, torch.Tensor]]:
    has_labels = not plan.config.given("loss_normalization")
    for batch in batches(plan, dp_rank):
        mask = batch["loss_mask"] * float(has_labels)
        if not plan.marks_padding:
            yield {**batch, "loss_mask": mask}
            continue
        length = mask.shape[1]
        lengths = 1 + batch["tokens"][:, 0] % length  # of each sample, whatever batch it is in
        is_text = torch.arange(length) < lengths.unsqueeze(1)
        yield {**batch, "loss_mask": mask * is_text, "lengths": lengths}


@functools.cache
def reference(kind: str) -> list[dict[str, float]]:
    """The curve of one rank: with experts, with biases of the choice, or with the losses of experts only."""
    ((found,),) = run_ranks(1, curves, [tiny_plan(1, **KINDS[kind])])
    return found


LIKE_GPT_OSS: dict[str, Any] = {
    **EXPERTS,
    "moe_expert_bias": True,
    "moe_router_logit_bias": True,
    "moe_norm_topk_prob": True,
    "activation": "clamped_swiglu",
    "mlp_width": 48,
    "attention_sinks": True,
    "attention_config": [[["sliding_window", "global"], "all"]],
    "sliding_window_width": 5,
    "norm": "rmsnorm",
}
KINDS: dict[str, dict[str, Any]] = {
    "experts": EXPERTS,
    "biased": BIASED,
    "losses of experts": {**EXPERTS, **ONLY_EXPERTS_LOSSES, "gradient_clipping": 0.0},
}


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        pytest.param("experts", SOME_LAYOUTS, id="experts, some"),
        pytest.param("biased", SOME_LAYOUTS, id="biased, some"),
        pytest.param("losses of experts", SOME_LAYOUTS, id="losses of experts, some", marks=pytest.mark.slow),
        pytest.param("experts", [LAYOUTS[7]], id="experts, ZeRO 3"),
        pytest.param("experts", LAYOUTS, id="experts, all", marks=pytest.mark.slow),
    ],
)
def test_every_layout_trains_the_same(kind: str, layouts: list[dict[str, Any]]):
    first = reference(kind)[0]
    names = ["total_loss", "lm_loss", "moe_balance_loss", "moe_z_loss", "moe_largest_share", "norm"]
    assert list(first) == names
    assert first["total_loss"] == pytest.approx(sum(first[name] for name in names[1:4]))
    assert first["norm"] > 0
    assert (first["lm_loss"] > 1) == (kind != "losses of experts")
    for found in run_ranks(2, curves, [tiny_plan(2, **KINDS[kind], **layout) for layout in layouts]):
        for layout, curve in zip(layouts, found, strict=True):
            for step, (ours, theirs) in enumerate(zip(curve, reference(kind), strict=True)):
                if layout.get("train_micro_batch_size_per_gpu"):  # a share of one micro batch depends on its size
                    ours["moe_largest_share"] = theirs["moe_largest_share"]
                assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-8), (layout, step)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"mp": 2, "pp": 2}, id="stages", marks=pytest.mark.slow),
        pytest.param({**DIVIDED, "mp": 2, "sequence_parallel": True}, id="divided"),
    ],
)
def test_a_network_like_gpt_oss_trains_the_same_on_four_ranks(layout: dict[str, Any]):
    """Biases of experts and of the router, sinks and windows: two tensor ranks and two stages, or divided experts."""
    ((expected,),) = run_ranks(1, curves, [tiny_plan(1, **LIKE_GPT_OSS)])
    for (curve,) in run_ranks(4, curves, [tiny_plan(4, **LIKE_GPT_OSS, **layout)]):
        for step, (ours, theirs) in enumerate(zip(curve, expected, strict=True)):
            assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-8), step


def test_recomputation_routes_and_counts_once():
    plans = [tiny_plan(1, **BIASED), tiny_plan(1, **BIASED, **RECOMPUTED)]
    ((kept, recomputed),) = run_ranks(1, curves, plans)
    assert recomputed == kept


TWO_RANKS = [DIVIDED, {**DIVIDED, **RECOMPUTED, "zero": 1}, {**DIVIDED, "zero": 2}, {**DIVIDED, "zero": 3}]
FOUR_RANKS = [
    DIVIDED,
    {**DIVIDED, "zero": 1},
    {**DIVIDED, "zero": 2},
    {"expert_model_parallel_size": 4, "zero": 2},
    {**DIVIDED, "mp": 2, "sequence_parallel": True},
    {**DIVIDED, "mp": 2, "zero": 2},
    {**DIVIDED, "pp": 2},
    {**DIVIDED, "pp": 2, "zero": 1},
    {**DIVIDED, "zero": 3},
    {"expert_model_parallel_size": 4, "zero": 3, **RECOMPUTED},
    {**DIVIDED, "mp": 2, "zero": 3},
]


@pytest.mark.parametrize(
    ("kind", "world", "layouts"),
    [
        ("experts", 2, TWO_RANKS),
        pytest.param("experts", 4, FOUR_RANKS, marks=pytest.mark.slow),
        pytest.param("biased", 4, FOUR_RANKS[:8], marks=pytest.mark.slow),
    ],
)
def test_data_ranks_that_divide_experts_train_the_same(kind: str, world: int, layouts: list[dict[str, Any]]):
    for found in run_ranks(world, curves, [tiny_plan(world, **KINDS[kind], **layout) for layout in layouts]):
        for layout, curve in zip(layouts, found, strict=True):
            for step, (ours, theirs) in enumerate(zip(curve, reference(kind), strict=True)):
                assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-8), (layout, step)


def test_padding_is_left_out_under_every_layout():
    """Sequence parallelism, recomputation, stages, divided experts; `tests/field/test_training.py` has the values."""
    keys = {**BIASED, "pack_impl": "pack_until_overflow", "moe_expert_capacity_factor": 1.0}
    ((expected,),) = run_ranks(1, curves, [tiny_plan(1, **keys)])
    assert 0 < expected[0]["moe_dropped"] < 0.5
    layouts = [LAYOUTS[1], LAYOUTS[2], LAYOUTS[3], DIVIDED]
    for found in run_ranks(2, curves, [tiny_plan(2, **keys, **layout) for layout in layouts]):
        for layout, curve in zip(layouts, found, strict=True):
            for step, (ours, theirs) in enumerate(zip(curve, expected, strict=True)):
                assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-8), (layout, step)


@pytest.mark.parametrize("optimizer", [pytest.param("SGD", marks=pytest.mark.slow), "Adam"])
def test_clipped_updates_do_not_depend_on_the_expert_degree(optimizer: str):
    keys = {**EXPERTS, "gradient_clipping": 0.05, "optimizer": {"type": optimizer, "params": {"lr": 0.05}}}
    ((expected,),) = run_ranks(1, curves, [tiny_plan(1, **keys)])
    stages = (0, 1, 2, 3)
    for found in run_ranks(2, curves, [tiny_plan(2, **keys, **DIVIDED, zero=stage) for stage in stages]):
        for stage, curve in zip(stages, found, strict=True):
            for ours, theirs in zip(curve, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-8), stage


@pytest.mark.slow
def test_divided_experts_train_the_same_with_every_schedule_of_stages():
    keys = {**EXPERTS, "train_batch_size": 8}
    ((expected,),) = run_ranks(1, curves, [tiny_plan(1, **keys)])
    layouts: list[dict[str, Any]] = [{"pipeline_schedule": name} for name in ("interleaved", "dualpipev")]
    layouts.append({"pipeline_schedule": "dualpipev", "zero": 1})
    plans = [tiny_plan(4, pp=2, **keys, **DIVIDED, **layout) for layout in layouts]
    for found in run_ranks(4, curves, plans, timeout=400):
        for layout, curve in zip(layouts, found, strict=True):
            for ours, theirs in zip(curve, expected, strict=True):
                ours["moe_largest_share"] = theirs["moe_largest_share"]  # of micro batches of another size
                assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-8), layout


BF16 = {**EXPERTS, "precision": "bf16"}
BF16_STEP = 2**-7  # two units in the last place: gradients of experts are rounded after other sums than on one rank
BF16_NORM = 2**-6  # on CPUs with AMX, one rank in bf16 is 1 % from fp32 after tokens were routed otherwise
BF16_TWO_RANKS = [DIVIDED, {**DIVIDED, "zero": 1}, {**DIVIDED, "zero": 2}]
BF16_FOUR_RANKS = [
    {**DIVIDED, "zero": 1},
    {**DIVIDED, "pp": 2, "zero": 1},
    {**DIVIDED, "pp": 2},
    {**DIVIDED, "mp": 2, "zero": 1},
    {"expert_model_parallel_size": 4, "zero": 1},
]


@pytest.mark.parametrize(
    ("world", "layouts"),
    [(2, BF16_TWO_RANKS), pytest.param(4, BF16_FOUR_RANKS, marks=pytest.mark.slow)],
)
def test_divided_experts_train_in_bf16(world: int, layouts: list[dict[str, Any]]):
    ((expected,),) = run_ranks(1, curves, [tiny_plan(1, **BF16)])
    assert max(step.get("norm", 0) for step in expected) > 1  # clipped at 0.5
    for found in run_ranks(world, curves, [tiny_plan(world, **BF16, **layout) for layout in layouts]):
        for layout, curve in zip(layouts, found, strict=True):
            for ours, theirs in zip(curve, expected, strict=True):
                ours["moe_largest_share"] = theirs["moe_largest_share"]  # a few tokens are routed otherwise
                if "norm" in theirs:
                    assert ours.pop("norm") == pytest.approx(theirs["norm"], rel=BF16_NORM), layout
                rest = {name: value for name, value in theirs.items() if name != "norm"}
                assert ours == pytest.approx(rest, rel=BF16_STEP), layout


def norms(plan: RunPlan) -> list[tuple[float, float, float]]:
    """Return norm and clipping factor of each step in bf16, and the norm of the gathered gradient in fp64."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.parallel import gather_experts, holds_divided_experts

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    wrapper = engine.deepspeed_engine.optimizer
    original = wrapper._norm_and_factor
    found = []

    def watched() -> tuple[float, float]:
        square = 0.0
        for weights, gradients in zip(wrapper.bf16_groups, wrapper.fp32_groups_gradients, strict=True):
            for weight, flat in zip(weights, gradients, strict=True):
                gradient = flat.view(weight.shape)
                if holds_divided_experts(weight):
                    gradient = gather_experts(gradient, grid)
                square += float(gradient.double().square().sum())
        norm, factor = original()
        found.append((norm, factor, square**0.5))
        return norm, factor

    wrapper._norm_and_factor = watched
    data = batches(plan, grid.dp_rank)
    for _ in range(2):
        engine.train_batch(data)
    return found


@pytest.mark.slow  # `test_divided_experts_train_in_bf16` compares norms with those of one rank
@pytest.mark.parametrize("world", [2, 4])
def test_the_norm_in_bf16_is_that_of_the_whole_gradient(world: int):
    by_rank = run_ranks(world, norms, tiny_plan(world, **BF16, **DIVIDED, zero=1))
    assert all(found == by_rank[0] for found in by_rank)
    for norm, factor, expected in by_rank[0]:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert factor == pytest.approx(0.5 / (expected + 1e-6), rel=1e-6)


ADAPTED_EXPERTS: dict[str, Any] = {
    **EXPERTS,
    "lora": {"r": 4, "alpha": 8, "target": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
    "gradient_clipping": 0.02,
    # Adam divides by the size of gradients. Those of new adapters are almost 0: with eps 1e-8 their rounding is seen.
    "optimizer": {"type": "Adam", "params": {"lr": 0.02, "eps": 1e-4}},
}


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, [{"mp": 2, "sequence_parallel": True, **RECOMPUTED}, {**DIVIDED, "zero": 2}]),
        pytest.param(2, [{"mp": 2}, {"pp": 2, "zero": 1}, {"zero": 3}, DIVIDED], marks=pytest.mark.slow),
        pytest.param(2, [{"context_parallel_size": 2, **DIVIDED, "zero": 1}], marks=pytest.mark.slow),
        pytest.param(2, [{**DIVIDED, "zero": 3}], marks=pytest.mark.slow),
        pytest.param(4, [{**DIVIDED, "mp": 2, "zero": 1}, {**DIVIDED, "pp": 2}], marks=pytest.mark.slow),
    ],
)
def test_adapters_of_experts_train_the_same(world: int, layouts: list[dict[str, Any]]):
    ((expected,),) = run_ranks(1, curves, [tiny_plan(1, **ADAPTED_EXPERTS)])
    assert expected[-2]["lm_loss"] < expected[0]["lm_loss"]
    for found in run_ranks(world, curves, [tiny_plan(world, **ADAPTED_EXPERTS, **layout) for layout in layouts]):
        for layout, curve in zip(layouts, found, strict=True):
            for ours, theirs in zip(curve, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-8), layout


def saved_after(world: int, layouts: list[dict[str, Any]], path: Path, lr: float) -> list[dict[str, torch.Tensor]]:
    """Return the adapters that plain SGD has after two steps in each layout, by layer and name."""
    keys = {
        **ADAPTED_EXPERTS,
        "gradient_clipping": 0.0,
        "weight_decay": 0.0,
        "lr_decay_style": "constant",
        "warmup": 0.0,
        "min_lr": 0.0,
    }
    keys["optimizer"] = {"type": "SGD", "params": {"lr": lr}}
    plans = []
    for number, layout in enumerate(layouts):
        plans.append(tiny_plan(world, **keys, **layout, save=str(path / f"{world} {lr} {number}")))
    run_ranks(world, resumed, plans)
    answers = []
    for plan in plans:
        reader = CheckpointReader(find_checkpoint(str(plan.config.checkpoint.save)), plan.layers)
        answers.append({})
        for layer in plan.layers:
            for spec in layer.parameters:
                if spec.trained:
                    answers[-1][f"{layer.index}.{spec.name}"] = reader.full(layer.index, spec.name)
    return answers


@pytest.mark.slow
def test_each_adapters_gradient_is_that_of_one_rank(tmp_path: Path):
    """By what two steps of SGD have added up: the first has gradients of B alone."""
    (start,) = saved_after(1, [{}], tmp_path, 0.0)
    (wanted,) = saved_after(1, [{}], tmp_path, 0.1)
    layouts = [{"mp": 2}, {"zero": 1}, {"zero": 3}, DIVIDED, {**DIVIDED, "zero": 2}, {**DIVIDED, "zero": 3}]
    for layout, found in zip(layouts, saved_after(2, layouts, tmp_path, 0.1), strict=True):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            moved = (value - start[name]).abs().max()
            assert moved > 0, name
            rounding = torch.finfo(torch.float32).eps * value.abs().max()  # of the adapter, which moves little
            assert (found[name] - value).abs().max() <= 1e-5 * moved + rounding, (layout, name)


@pytest.mark.slow
@pytest.mark.parametrize("width", [24, 22], ids=["blocks end with experts", "blocks go over experts"])
def test_states_of_8_bits_go_on(tmp_path: Path, width: int):
    """At the same degree exactly; at others after blocks of other elements have been rounded."""
    path = str(tmp_path / "eight bits")
    optimizer = {"type": "Adam8bit", "params": {"lr": 0.005, "min_8bit_size": 64}}
    keys = {**EXPERTS, "moe_ffn_hidden_size": width, "optimizer": optimizer}
    for number, layout in enumerate(({**DIVIDED}, {**DIVIDED, "zero": 1})):
        saving = tiny_plan(2, **keys, **layout, save=f"{path} {number}")
        others: list[dict[str, Any]] = [layout, {"zero": 1}, {**DIVIDED, "zero": 2}]
        loading = [tiny_plan(2, **keys, **other, load=f"{path} {number}") for other in others]
        for undisturbed, same, *elsewhere in run_ranks(2, resumed, [saving, *loading]):
            assert same == undisturbed[SAVED_AT:]
            for curve in elsewhere:
                for ours, theirs in zip(curve, undisturbed[SAVED_AT:], strict=True):
                    assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-3)


@pytest.mark.slow
def test_adapters_of_experts_go_on_at_other_degrees_and_merge(tmp_path: Path):
    path = str(tmp_path / "adapters")
    saving = tiny_plan(2, **ADAPTED_EXPERTS, **DIVIDED, zero=1, save=path)
    layouts: list[dict[str, Any]] = [{"mp": 2}, {"zero": 3}, {**DIVIDED, "zero": 2}]
    loading = [tiny_plan(2, **ADAPTED_EXPERTS, **layout, load=path) for layout in layouts]
    for undisturbed, *others in run_ranks(2, resumed, [saving, *loading]):
        for curve in others:
            for ours, theirs in zip(curve, undisturbed[SAVED_AT:], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-8)
    checkpoint = find_checkpoint(path)
    apart = CheckpointReader(checkpoint, saving.layers)
    merged = CheckpointReader(checkpoint, tiny_plan(1, **EXPERTS).layers)
    for layer in (2, 4):
        for name in ("mlp.experts.dense_h_to_4h", "mlp.experts.dense_4h_to_h"):
            a, b = (apart.full(layer, f"{name}.adapter.lora_{part}") for part in "AB")
            assert b.abs().amax((1, 2)).min() > 0  # of every expert
            expected = apart.full(layer, f"{name}.weight") + 2.0 * torch.einsum("eor,eri->eoi", b, a)
            torch.testing.assert_close(merged.full(layer, f"{name}.weight"), expected)
            torch.testing.assert_close(merged.expert(layer, f"{name}.weight", 3), expected[3])


SAVED_AT = 2


def resumed(plans: list[RunPlan]) -> list[list[dict[str, float]]]:
    """Train each plan from its checkpoint, if it has one, to the last step, and save after `SAVED_AT` steps."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    results = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        micro = engine.iteration * plan.batch.gradient_accumulation_steps
        data = batches(plan, grid.data_rank, micro)
        curve = []
        for iteration in range(engine.iteration, STEPS):
            step = engine.train_batch(data)
            curve.append({**step.scores, "norm": step.grad_norm})
            if iteration + 1 == SAVED_AT and plan.config.checkpoint.save is not None:
                save_checkpoint(engine, plan.config.checkpoint.save)
        results.append(curve)
    return results


SAVING: list[dict[str, Any]] = [{}, *({**DIVIDED, "zero": stage} for stage in (0, 1, 3, 2))]
LOADING: list[dict[str, Any]] = [{"zero": 1}, {**DIVIDED, "zero": 2}, {**DIVIDED, "zero": 3}, {"mp": 2}]


@pytest.mark.parametrize(
    ("precision", "saved_by", "read_by", "tolerance"),
    [
        pytest.param("fp32", SAVING[:4:3], LOADING[::2], 2e-6, id="fp32, some"),
        pytest.param("fp32", SAVING, LOADING, 2e-6, id="fp32", marks=pytest.mark.slow),
        pytest.param("bf16", SAVING, LOADING, 2e-2, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_at_any_expert_degree(
    tmp_path: Path, precision: str, saved_by: list[dict[str, Any]], read_by: list[dict[str, Any]], tolerance: float
):
    """Weights and the optimizer's state are saved with two expert ranks and without, and read by others."""
    keys = {**EXPERTS, "precision": precision}
    saving = []
    loading = []
    for number, layout in enumerate(saved_by):
        path = str(tmp_path / str(number))
        saving.append(tiny_plan(2, **keys, **layout, save=path))
        for other in read_by:
            loading.append(tiny_plan(2, **keys, **other, load=path))
    expected, *curves_of_others = run_ranks(2, resumed, saving)[0]
    pairs = [(curve, expected) for curve in curves_of_others]
    for curve in run_ranks(2, resumed, loading)[0]:
        assert len(curve) == STEPS - SAVED_AT
        pairs.append((curve, expected[SAVED_AT:]))
    for curve, right in pairs:
        for ours, theirs in zip(curve, right, strict=True):
            if precision == "bf16":
                ours["moe_largest_share"] = theirs["moe_largest_share"]  # a few tokens are routed otherwise
            assert ours == pytest.approx(theirs, rel=tolerance)


def biases_of_starts(plans: list[RunPlan]) -> list[list[list[float]]]:
    """Return the biases of this rank's routers: after two steps of the first plan, and as the others load them."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint
    from neox.model import biased_routers

    found = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        if plan.config.checkpoint.load is None:
            data = batches(plan, grid.dp_rank)
            for _ in range(2):
                engine.train_batch(data)
            save_checkpoint(engine, plan.config.checkpoint.save or "")
        routers = biased_routers(engine.deepspeed_engine.module)
        found.append([router.selection_bias.tolist() for router in routers if router.selection_bias is not None])
    return found


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_biases_of_the_choice_are_not_rounded_at_a_start(tmp_path: Path, precision: str):
    keys = {**BIASED, "precision": precision}
    plans = [tiny_plan(2, **keys, zero=1, save=str(tmp_path))]
    for layout in ({"zero": 1}, {"zero": 2}, {"mp": 2}):
        plans.append(tiny_plan(2, **keys, **layout, load=str(tmp_path)))
    trained, *loaded = run_ranks(2, biases_of_starts, plans)[0]
    assert any(bias not in (0.0, torch.tensor(bias, dtype=torch.bfloat16).item()) for bias in trained[0])
    assert loaded == [trained] * 3


ADAPTED: dict[str, Any] = {**EXPERTS, "lora": {"r": 4, "alpha": 8, "target": ["query_key_value", "dense"]}}
ADAPTERS_SAVING: list[dict[str, Any]] = [{}, {**DIVIDED, "zero": 2}, DIVIDED]
ADAPTERS_LOADING: list[dict[str, Any]] = [{**DIVIDED, "zero": 1}, {"mp": 2}, {"zero": 1}]


@pytest.mark.parametrize(
    ("saved_by", "read_by"),
    [
        pytest.param(ADAPTERS_SAVING[:2], ADAPTERS_LOADING[:2], id="some"),
        pytest.param(ADAPTERS_SAVING, ADAPTERS_LOADING, id="all", marks=pytest.mark.slow),
    ],
)
def test_adapters_next_to_divided_experts_go_on_at_any_expert_degree(
    tmp_path: Path, saved_by: list[dict[str, Any]], read_by: list[dict[str, Any]]
):
    """Adapters and their states are saved with two expert ranks and without, and read by others."""
    keys = {**ADAPTED, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    saving = []
    loading = []
    for number, layout in enumerate(saved_by):
        path = str(tmp_path / str(number))
        saving.append(tiny_plan(2, **keys, **layout, save=path))
        for other in read_by:
            loading.append(tiny_plan(2, **keys, **other, load=path))
    expected, *curves_of_others = run_ranks(2, resumed, saving)[0]
    assert expected[0]["norm"] > 0
    for curve in curves_of_others:
        for ours, theirs in zip(curve, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6)
    for curve in run_ranks(2, resumed, loading)[0]:
        assert len(curve) == STEPS - SAVED_AT
        for ours, theirs in zip(curve, expected[SAVED_AT:], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6)


HOST: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("world", "degrees", "stages"),
    [
        pytest.param(2, DIVIDED, [2], id="ZeRO 2"),
        pytest.param(2, DIVIDED, [1, 3], id="ZeRO 1 and 3", marks=pytest.mark.slow),
        pytest.param(4, {**DIVIDED, "mp": 2}, [1, 2, 3], id="tensor ranks", marks=pytest.mark.slow),
        pytest.param(4, {**DIVIDED, "pp": 2}, [1], id="stages", marks=pytest.mark.slow),
    ],
)
def test_divided_experts_with_states_in_host_memory(
    tmp_path: Path, world: int, degrees: dict[str, Any], stages: list[int]
):
    """They train the same, and a run goes on with and without offload."""
    ((expected,),) = run_ranks(1, curves, [tiny_plan(1, **EXPERTS)])
    saving = []
    loading = []
    for stage in stages:
        zero = {"zero_optimization": {"stage": stage, **HOST}}
        path = str(tmp_path / str(stage))
        saving.append(tiny_plan(world, **EXPERTS, **degrees, **zero, save=path))
        loading.append(tiny_plan(world, **EXPERTS, **degrees, zero=1, load=path))
        loading.append(tiny_plan(world, **EXPERTS, **degrees, **zero, load=path))
    for curve in run_ranks(world, resumed, saving)[0]:
        for ours, theirs in zip(curve, expected[:STEPS], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-8)
    for curve in run_ranks(world, resumed, loading)[0]:
        for ours, theirs in zip(curve, expected[SAVED_AT:STEPS], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-8)


def test_an_upcycled_network_starts_with_the_dense_loss(tmp_path: Path):
    dense = {"activation": "swiglu", "mlp_width": 40, "use_bias_in_mlp": False, "no_weight_tying": True}
    mixture = {**EXPERTS, **dense, "moe_norm_topk_prob": True, "moe_ffn_hidden_size": 40}
    mixture |= {"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False}
    run_ranks(2, resumed, [tiny_plan(2, **dense, save=str(tmp_path / "dense"))])
    config = NeoXConfig.from_flat({**TINY, **mixture})
    reader = open_checkpoint(find_checkpoint(tmp_path / "dense"))
    upcycle(reader, tmp_path / "moe", config, lambda _, spec: torch.randn(spec.shape) * 0.02)
    fresh = {"finetune": True}
    plans = [tiny_plan(2, **dense, **fresh, load=str(tmp_path / "dense"))]
    for layout in ({}, {**DIVIDED, "zero": 1}, {"mp": 2}):
        plans.append(tiny_plan(2, **mixture, **layout, **fresh, load=str(tmp_path / "moe")))
    expected, *found = run_ranks(2, resumed, plans)[0]
    for curve in found:
        assert curve[0]["lm_loss"] == pytest.approx(expected[0]["lm_loss"], rel=1e-6)


@pytest.mark.slow
def test_four_ranks_with_two_of_each_expert_save_states_that_one_rank_reads(tmp_path: Path):
    saving = [tiny_plan(4, **EXPERTS, **DIVIDED, zero=zero, save=str(tmp_path / str(zero))) for zero in (1, 2)]
    expected, _ = run_ranks(4, resumed, saving)[0]
    loading = [tiny_plan(1, **EXPERTS, load=str(tmp_path / str(zero))) for zero in (1, 2)]
    for curve in run_ranks(1, resumed, loading)[0]:
        for ours, theirs in zip(curve, expected[SAVED_AT:], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6)
