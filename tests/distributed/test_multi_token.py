"""Multi-token prediction trains alike in every layout, and goes on in another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.test_context_parallel import uneven
from tests.distributed.test_optimizers import losses_with_saves
from tests.distributed.test_reshard import plan_of, relay_and_still, worst
from tests.distributed.training_runs import tiny_plan

STEPS = 6
MODULES: dict[str, Any] = {
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": 0.5,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "mlp_width": 48,
    "no_weight_tying": True,
    "loss_normalization": "micro_batch",
}
TIED = {"no_weight_tying": False}
DOCUMENTS = {"reset_attention_mask": True}
EXPERTS = {
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_type": "sigmoid",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_first_k_dense": 1,
}
BIASED = {**EXPERTS, "moe_router_enable_expert_bias": True}  # not with ZeRO 3
RECOMPUTED = {"checkpoint_activations": True}
SHARES = {"mp": 2, "sequence_parallel": True}


def curves(plans: Sequence[RunPlan]) -> list[list[dict[str, float]]]:
    """Return scores and gradient norm of each step by plan; last, the scores of an evaluation."""
    from neox.engine import initialize_distributed, initialize_engine

    results = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = uneven(plan, grid.data_rank)
        steps = [engine.train_batch(data) for _ in range(STEPS)]
        evaluated = dict(engine.eval_batch(data).scores)
        again = engine.train_batch(data)
        results.append([{**step.scores, "norm": step.grad_norm} for step in [*steps, again]] + [evaluated])
    return results


def check(
    world: int, layouts: Sequence[dict[str, Any]], closeness: float = 2e-6, **network: Any
) -> list[dict[str, float]]:
    """Compare layouts with one rank; return its curve."""
    network = {**MODULES, **network}
    expected = run_ranks(1, curves, [tiny_plan(1, **network)], timeout=300)[0][0]
    plans = [tiny_plan(world, **layout, **network) for layout in layouts]
    for rank in run_ranks(world, curves, plans, timeout=500):
        for layout, curve in zip(layouts, rank, strict=True):
            for step, (found, wanted) in enumerate(zip(curve, expected, strict=True)):
                assert found.keys() == wanted.keys(), layout
                for name, value in wanted.items():
                    tolerance = 10 * closeness if name == "norm" else closeness
                    assert found[name] == pytest.approx(value, rel=tolerance), (layout, step, name)
    return expected


def test_stages_train_as_whole_networks_do() -> None:
    """The short one of these tests: the last stage has a copy of the embedding, and ZeRO 3 gathers it twice."""
    ((stages, whole), _) = run_ranks(
        2, curves, [tiny_plan(2, **layout, **MODULES) for layout in ({"pp": 2}, {"zero": 3})]
    )
    for found, wanted in zip(stages, whole, strict=True):
        assert found == pytest.approx(wanted, rel=2e-5)
        assert found["lm_loss"] == pytest.approx(wanted["lm_loss"], rel=2e-6)


@pytest.mark.slow
def test_two_ranks_train_as_one_does() -> None:
    expected = check(2, [{"mp": 2}, {"pp": 2}, {"zero": 1}, {"zero": 3}])
    assert list(expected[0]) == ["total_loss", "lm_loss", "mtp_loss", "norm"]
    assert list(expected[-1]) == ["lm_loss"]
    assert expected[-2]["mtp_loss"] < expected[0]["mtp_loss"] - 0.05
    assert expected[0]["total_loss"] == pytest.approx(expected[0]["lm_loss"] + 0.5 * expected[0]["mtp_loss"])


@pytest.mark.slow
@pytest.mark.parametrize("normalization", ["micro_batch", "tokens", "samples"])
def test_tied_embeddings_and_documents(normalization: str) -> None:
    layouts = [{"mp": 2}, {"pp": 2, "zero": 1, **RECOMPUTED}, {"zero": 2}, {"zero": 3, **RECOMPUTED}, SHARES]
    slow = {"optimizer": {"type": "Adam", "params": {"lr": 0.0005}}}  # rare tokens: Adam turns rounding into steps
    check(2, layouts, **TIED, **DOCUMENTS, **slow, loss_normalization=normalization)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
def test_context_ranks(kind: str) -> None:
    ranks = {"context_parallel_size": 2, "context_parallel_kind": kind}
    check(2, [{**ranks, "zero": 1}, {**ranks, "zero": 3, **RECOMPUTED}], **DOCUMENTS)
    check(4, [{**ranks, "pp": 2}, {**ranks, **SHARES}], **DOCUMENTS)


@pytest.mark.slow
def test_experts() -> None:
    divided = {"expert_model_parallel_size": 2}
    check(2, [{"mp": 2}, {"pp": 2}, {"zero": 3}, {**divided, "zero": 2, **RECOMPUTED}], **EXPERTS)
    check(2, [{**divided, "zero": 1}], **BIASED)
    check(4, [{**SHARES, "pp": 2}, {**divided, "mp": 2}, {**divided, "pp": 2}], **BIASED)


LATENT = {"attention_config": ["latent"] * 4, "kv_lora_rank": 12, "head_dim": 8, "v_head_dim": 6}
NETWORKS = {
    "latent": {**LATENT, "use_bias_in_qkv": False, "use_bias_in_attn_linear": False},
    "windows": {"attention_config": ["global", "sliding_window"] * 2, "sliding_window_width": 5},
    "mamba2": {"attention_config": ["global", "mamba2_mlp"] * 2, "mamba_head_dim": 8, "mamba_state_dim": 8},
    "gmlp": {"attention_config": ["global", "gmlp"] * 2, "activation": "gelu"},
    "softcap": {"logit_softcap": 5.0, "norm_placement": "both"},
    "row": {"output_layer_parallelism": "row"},
    "muP": {"use_mup": True, "mup_base_hidden_size": 16},
    "z-loss": {"lm_z_loss": 0.001},
    "tiles": {"mlp_tile_size": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_networks(network: dict[str, Any]) -> None:
    check(2, [{"mp": 2}, {"pp": 2, **RECOMPUTED}, {"zero": 3}], **network)


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.0005}}}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 0.001}}}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [MUON, LION], ids=["Muon", "Lion"])
def test_optimizers(keys: dict[str, Any]) -> None:
    check(2, [{"pp": 2}, {"zero": 1}, {"zero": 2}], 5e-6, **keys)


@pytest.mark.slow
def test_copies_of_tied_embeddings_are_updated_alike() -> None:
    """Megatron-LM#4641: on the last stage Muon updated the modules' copy; #844: copies divided over data ranks."""
    check(2, [{"pp": 2}, {"pp": 2, "zero": 1}], 5e-6, **TIED, **MUON)
    check(4, [{"pp": 2, "zero": 1}], **TIED)


@pytest.mark.slow
def test_cuts_of_a_batch_train_alike() -> None:
    """Megatron-LM#1532, #2417: the modules' loss was divided by other numbers than the main loss with accumulation."""
    keys = {**MODULES, "loss_normalization": "tokens"}
    plans = [tiny_plan(1, **keys, train_micro_batch_size_per_gpu=size) for size in (4, 2, 1)]
    whole, *cuts = run_ranks(1, curves, plans, timeout=300)[0]
    for cut in cuts:
        for step, wanted in zip(cut, whole, strict=True):
            assert step == pytest.approx(wanted, rel=2e-5)


EIGHT_BITS = {"optimizer": {"type": "Adam8bit", "params": {"lr": 0.003, "min_8bit_size": 0}}}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.003}}}


@pytest.mark.slow
def test_states_of_8_bits_follow_adam_and_resume_exactly(tmp_path) -> None:
    """Blocks of 8-bit states hold other elements in other layouts, so losses are close; a resume reads the codes."""
    layouts = [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"pp": 2}]
    plans = [tiny_plan(2, **MODULES, **EIGHT_BITS, **layout) for layout in layouts]
    (*found, adam), _ = run_ranks(2, curves, [*plans, tiny_plan(2, **MODULES, **ADAM)], timeout=300)
    for layout, curve in zip(layouts, found, strict=True):
        for step, wanted in zip(curve, adam, strict=True):
            for name in step.keys() - {"norm"}:
                assert step[name] == pytest.approx(wanted[name], rel=1e-3), (layout, name)
        assert curve != adam
    for number, layout in enumerate(layouts):
        save = str(tmp_path / str(number))
        whole = tiny_plan(2, **MODULES, **EIGHT_BITS, **layout, save=save)
        further = tiny_plan(2, **MODULES, **EIGHT_BITS, **layout, load=save)
        (undisturbed, resumed), _ = run_ranks(2, losses_with_saves, [whole, further], 4, 2, timeout=300)
        assert resumed == undisturbed[2:], layout


@pytest.mark.slow
def test_four_ranks() -> None:
    check(4, [{"pp": 2, "mp": 2}, {"pp": 2, **SHARES, **RECOMPUTED}, {"pp": 4}, {"mp": 4}, {"mp": 2, "zero": 1}])


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, TIED, EXPERTS], ids=["untied", "tied", "experts"])
def test_a_relay_of_layouts_is_an_undisturbed_run(tmp_path, keys: dict[str, Any]) -> None:
    layouts = [
        {"pp": 2, "mp": 1, "zero": 1},
        {"pp": 1, "mp": 2, "zero": 0},
        {"pp": 1, "mp": 1, "zero": 3},
        {"pp": 2, "mp": 1, "zero": 0},
    ]
    save = str(tmp_path / "relay")
    keys = {**MODULES, **keys}
    relayed = [plan_of(2, layout, save=save, load=save, **keys) for layout in layouts]
    still = plan_of(2, {"pp": 1, "mp": 1, "zero": 1}, save=str(tmp_path / "still"), **keys)
    got, expected = run_ranks(2, relay_and_still, relayed, still, timeout=300)[0]
    assert worst([loss for loss, _ in got], [loss for loss, _ in expected]) < 2e-6


def finetuned(first: RunPlan, second: RunPlan) -> list[dict[str, float]]:
    """Train and save, then fine-tune in another network; return the first scores of both."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    found = []
    for plan in (first, second):
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        data = uneven(plan, grid.data_rank)
        found.append(dict(engine.train_batch(data).scores))
        if plan is first:
            save_checkpoint(engine, plan.config.checkpoint.save)
            found.append(dict(engine.train_batch(uneven(plan, grid.data_rank)).scores))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
def test_fine_tuning_starts_with_other_modules(tmp_path, before: int, after: int) -> None:
    saving = tiny_plan(1, **{**MODULES, "mtp_num_layers": before}, save=str(tmp_path))
    loading = tiny_plan(1, **{**MODULES, "mtp_num_layers": after}, load=str(tmp_path), finetune=True)
    _, trained, tuned = run_ranks(1, finetuned, saving, loading, timeout=300)[0]
    assert tuned["lm_loss"] == pytest.approx(trained["lm_loss"], rel=1e-6)
    assert ("mtp_loss" in tuned) == (after > 0)
