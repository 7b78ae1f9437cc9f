"""Samples whose tokens are divided over ranks train as on one rank, whatever else is divided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from neox.data.batches import document_starts
from neox.model import GPT, Context
from neox.parallel import ParallelGrid, context_indices
from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

EOD = 7
BASE: dict[str, Any] = {"num_layers": 2, "loss_normalization": "micro_batch"}
DOCUMENTS = {"reset_attention_mask": True, "attention_config": [[["flash"], "all"]]}
WINDOW = {"attention_config": ["flash", "flash"], "sliding_window_width": 5}
LOCAL = {"attention_config": ["bigbird", "global"], "sparsity_config": {"block": 2, "different_layout_per_head": True}}
BY_LENGTH = {
    "rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 4},
    "rotary_pct": 1.0,
}
RECOMPUTED = {"checkpoint_activations": True}
LATENT = {
    "norm": "rmsnorm",
    "attention_config": [[["latent"], "all"]],
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "head_dim": 10,
    "rotary_pct": 0.4,
    "v_head_dim": 6,
    "use_bias_in_qkv": False,
}
GROUPED = {"num_kv_heads": 2, "norm": "rmsnorm"}


def uneven(plan: RunPlan, data_rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches with few labels: of some samples, only the first tokens have any, which are on the first rank."""
    for batch in batches(plan, data_rank):
        tokens = batch["tokens"]
        mask = (tokens % 3 != 0).float()
        mask[tokens[:, 0] % 2 == 0, 3:] = 0.0
        batch["loss_mask"] = mask
        if plan.config.data.reset_attention_mask:
            batch["document_starts"] = document_starts(tokens, EOD)
        yield batch


def curves(plans: list[RunPlan], steps: int) -> list[list[tuple[float, float]]]:
    from neox.engine import initialize_distributed, initialize_engine

    results = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = uneven(plan, grid.data_rank)
        trained = [engine.train_batch(data) for _ in range(steps)]
        results.append([(step.loss, step.grad_norm) for step in trained])
    return results


def check(world: int, layouts: list[dict[str, Any]], *, steps: int = 20, **network: Any) -> None:
    """Compare the losses and gradient norms of layouts with those of one rank."""
    network = {**BASE, **network}
    plans = [tiny_plan(world, **layout, **network) for layout in layouts]
    expected = run_ranks(1, curves, [tiny_plan(1, **network)], steps, timeout=300)[0][0]
    for rank in run_ranks(world, curves, plans, steps, timeout=500):
        for layout, curve in zip(layouts, rank, strict=True):
            for (loss, norm), (one_loss, one_norm) in zip(curve, expected, strict=True):
                assert loss == pytest.approx(one_loss, rel=2e-6), layout
                assert norm == pytest.approx(one_norm, rel=2e-5), layout


def kinds(degree: int, **keys: Any) -> list[dict[str, Any]]:
    """Return a layout with context ranks of each kind."""
    both = ("all_gather", "ulysses")
    return [{"context_parallel_size": degree, "context_parallel_kind": kind, **keys} for kind in both]


def test_two_context_ranks() -> None:
    gathering, exchanging = kinds(2)
    check(2, [{**gathering, "zero": 3, **RECOMPUTED}, {**exchanging, "zero": 1}], steps=4, **DOCUMENTS)


def resumed(first: RunPlan, second: RunPlan) -> list[tuple[float, float]]:
    """Train to step 4, save, and go on in another layout: (loss, norm) of the steps after that."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    grid, device = initialize_distributed(first)
    engine = open_engine(first, grid, device)
    data = batches(first, grid.data_rank)
    for _ in range(4):
        engine.train_batch(data)
    save_checkpoint(engine, first.config.checkpoint.save)
    grid, device = initialize_distributed(second)
    again = open_engine(second, grid, device)
    assert again.iteration == 4
    data = batches(second, grid.data_rank, start=4 * second.batch.gradient_accumulation_steps)
    return [(step.loss, step.grad_norm) for step in (again.train_batch(data) for _ in range(3))]


@pytest.mark.parametrize("network", [{}, pytest.param(LATENT, marks=pytest.mark.slow)], ids=["plain", "latent"])
def test_a_run_goes_on_with_another_number_of_context_ranks(tmp_path, network: dict[str, Any]) -> None:
    divided = {"context_parallel_size": 2, "zero": 1}
    keys = {**BASE, **network}
    whole = run_ranks(1, plain_curve, tiny_plan(1, **keys), 7, timeout=300)[0][4:]
    for number, (before, after) in enumerate((({}, divided), (divided, {"zero": 3}))):
        saving = tiny_plan(2, **keys, **before, save=str(tmp_path / str(number)))
        loading = tiny_plan(2, **keys, **after, load=str(tmp_path / str(number)))
        for (loss, norm), (one_loss, one_norm) in zip(
            run_ranks(2, resumed, saving, loading, timeout=300)[0], whole, strict=True
        ):
            assert loss == pytest.approx(one_loss, rel=1e-5)
            assert norm == pytest.approx(one_norm, rel=1e-4)


def plain_curve(plan: RunPlan, steps: int) -> list[tuple[float, float]]:
    from tests.distributed.training_runs import train_curve

    return train_curve(plan, steps)


def outputs_of_documents(world: int, layouts: list[dict[str, Any]]) -> None:
    """Change a token of one document, and compare the hidden states of the next, which several ranks share."""
    starts = torch.tensor([[0] * 3 + [3] * 7 + [10] * 6])  # the middle one begins on the first rank or the second
    tokens = torch.randint(1, 60, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 1] = 0 if tokens[0, 1] else 1
    for layout in layouts:
        plan = tiny_plan(world, **BASE, **DOCUMENTS, **layout)
        grid = ParallelGrid.build(plan.grid)
        own = context_indices(16, grid)
        model = GPT(plan, grid)
        context = Context(document_starts=starts, divided=True)
        before = model.hidden(tokens[:, own], context)
        after = model.hidden(changed[:, own], context)
        others = own >= 3
        assert torch.equal(before[:, others], after[:, others])
        if (own == 1).any():
            assert not torch.equal(before[:, ~others], after[:, ~others])


def test_another_token_of_one_document_changes_no_bit_of_the_next() -> None:
    run_ranks(2, outputs_of_documents, 2, kinds(2))


@pytest.mark.slow
def test_another_token_of_one_document_changes_no_bit_of_the_next_on_four_ranks() -> None:
    run_ranks(4, outputs_of_documents, 4, [*kinds(4), *kinds(4, **RECOMPUTED), *kinds(2, mp=2)])


SLOW: dict[str, tuple[int, list[dict[str, Any]], dict[str, Any]]] = {
    "documents": (2, [*kinds(2, zero=1), *kinds(2, zero=3, **RECOMPUTED)], DOCUMENTS),
    "plain": (2, [*kinds(2), *kinds(2, zero=1), *kinds(2, zero=3)], {}),
    "window": (2, kinds(2, zero=1, **RECOMPUTED), WINDOW),
    "window in documents": (2, kinds(2), {**DOCUMENTS, **WINDOW}),
    "patterns of heads": (2, kinds(2), LOCAL),
    "grouped keys": (2, kinds(2), {**GROUPED, "attention_config": [[["flash"], "all"]]}),
    "alibi": (2, kinds(2), {"pos_emb": "alibi"}),
    "rpe": (2, kinds(2), {"pos_emb": "rpe"}),
    "learned": (2, kinds(2), {"pos_emb": "learned"}),
    "rotary by length": (2, kinds(2), BY_LENGTH),
    "rotary by length of documents": (2, kinds(2), {**BY_LENGTH, **DOCUMENTS}),
    "latent": (2, [*kinds(2, zero=1), *kinds(2, zero=3, **RECOMPUTED)], LATENT),
    "latent in documents": (2, kinds(2), {**LATENT, "reset_attention_mask": True}),
    "latent and tensor ranks": (4, [*kinds(2, mp=2, sequence_parallel=True), *kinds(2, pp=2)], LATENT),
    "four": (4, [*kinds(4), *kinds(2), *kinds(2, mp=2, sequence_parallel=True)], DOCUMENTS),
    "adapters": (2, kinds(2, zero=1), {"lora": {"r": 2, "target": ["query_key_value", "dense"]}}),
    "interleaved": (4, kinds(2, pp=2, pipeline_schedule="interleaved"), {"num_layers": 8}),
    "dualpipev": (4, kinds(2, pp=2, pipeline_schedule="dualpipev"), {"num_layers": 8, "train_batch_size": 8}),
    "tensor ranks and stages": (4, [*kinds(2, mp=2, zero=1), *kinds(2, pp=2, zero=1), *kinds(2, pp=2)], WINDOW),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_losses_and_norms_are_those_of_one_rank(name: str) -> None:
    world, layouts, network = SLOW[name]
    check(world, layouts, **network)
