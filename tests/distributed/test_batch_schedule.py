"""Ramp-up of the batch and a curriculum of lengths in both engines: equal curves in every layout, and exact resumes."""

import numpy as np
import pytest
import torch

from neox.data.batches import BatchIterator
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import SEQ, VOCAB, batches, tiny_plan

CURRICULUM = {
    "enabled": True,
    "min_difficulty": 4,
    "max_difficulty": SEQ,
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 4},
}
# Batches of 2, 2, 4, 6 samples and on; lengths of 4, 8, 12, 16 tokens and on.
KEYS = {"train_batch_size": 6, "rampup_batch_size": [2, 2, 8], "curriculum_learning": CURRICULUM}
SCHEDULER = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 5e-3, "cycle_first_step_size": 3}}
STEPS, SAVED_AT = 6, 2


class Samples:
    """Samples that are a function of their number."""

    seq_length, num_samples, has_labels = SEQ, 600, False

    def read(self, indices: np.ndarray) -> np.ndarray:
        return (indices[:, None] * 7 + (1 + indices[:, None] % 3) * np.arange(SEQ + 1)) % VOCAB


def data(plan, dp_rank, done=0):
    start = plan.batch_schedule.samples(done) // plan.batch.samples_at_once
    size = plan.batch.train_micro_batch_size_per_gpu
    return BatchIterator(Samples(), size, dp_rank=dp_rank, dp_size=plan.grid.dp_size, start=start, num_workers=0)


def curves(runs):
    """For each (saving plan, loading plan): losses, an evaluation's loss, samples read; and those of a resumed run."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    answers = []
    for plan, resumed in runs:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        batches, whole = data(plan, grid.dp_rank), []
        for step in range(STEPS):
            if step == SAVED_AT:
                save_checkpoint(engine, plan.config.checkpoint.save)
                evaluated = engine.eval_batch(data(plan, grid.dp_rank)).scores
            whole.append(engine.train_batch(batches))
        again = open_engine(resumed, grid, device)
        counted = again.deepspeed_engine.global_samples
        rest = data(resumed, grid.dp_rank, again.iteration)
        answers.append(
            {
                "whole": whole,
                "resumed": [again.train_batch(rest) for _ in range(STEPS - SAVED_AT)],
                "evaluated": evaluated,
                "samples": [counted, engine.deepspeed_engine.global_samples],
                "read": batches.position * plan.batch.samples_at_once if grid.pp_rank == 0 else None,
            }
        )
    return answers


FAST = [{"pp": 2}, {"pp": 2, "pipeline_schedule": "interleaved"}, {"zero": 2, "scheduler": SCHEDULER}]
FURTHER = [
    {},
    {"pp": 2, "zero": 1},
    {"zero": 1},
    {"zero": 3},
    {"mp": 2, "zero": 1},
    {"zero": 1, "train_micro_batch_size_per_gpu": 1, "checkpoint_activations": True},
    {"pp": 2, "bf16": {"enabled": True}, "zero": 1},
    {"fp16": {"enabled": True, "initial_scale_power": 8}},
]


@pytest.mark.parametrize("layouts", [FAST, pytest.param(FURTHER, marks=pytest.mark.slow)], ids=["fast", "further"])
def test_changing_batches_train_alike_and_resume_exactly(tmp_path, layouts):
    runs = []
    for number, layout in enumerate(layouts):
        directory = str(tmp_path / str(number))
        runs.append([tiny_plan(2, **{key: directory}, **KEYS, **layout) for key in ("save", "load")])
    (answers, _) = run_ranks(2, curves, runs, timeout=400)
    reference = answers[0]
    for layout, answer in zip(layouts, answers, strict=True):
        assert answer["resumed"] == answer["whole"][SAVED_AT:], layout
        assert answer["samples"] == [4, 26], layout
        assert answer["read"] in (26, None), layout
        low = "bf16" in layout or "fp16" in layout
        steps = 3 if "scheduler" in layout else STEPS  # another learning rate changes what follows
        expected = [step.loss for step in reference["whole"]][: 1 if steps == 3 else STEPS]
        found = [step.loss for step in answer["whole"]][: len(expected)]
        assert found == pytest.approx(expected, rel=2e-2 if low else 1e-5), layout


SHORT = 8
EXPERTS = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.1}


def padded_curves(plans):
    """Scores and gradient norm of each step on rows that end in padding, which experts do not count."""
    from neox.engine import initialize_distributed, initialize_engine

    def rows(plan, data_rank):
        for number, batch in enumerate(batches(plan, data_rank)):
            length = plan.config.model.seq_length
            lengths = torch.full((len(batch["tokens"]),), 3 + number % 2 * SHORT)
            mask = torch.arange(SEQ) < lengths.unsqueeze(1)
            cut = {name: value[:, :length] for name, value in (batch | {"loss_mask": mask.float()}).items()}
            yield cut | {"lengths": lengths.clamp(max=length)}

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = rows(plan, grid.data_rank)
        answers.append([engine.train_batch(data) for _ in range(3)])
    return answers


def test_padded_rows_of_experts_are_cut_with_their_lengths():
    """`unpacked`, `best_fit` and `pack_until_overflow` tell experts the lengths of rows, one number a row."""
    curriculum = {**CURRICULUM, "schedule_type": "fixed_discrete"}
    curriculum["schedule_config"] = {"difficulty": [SHORT, SEQ], "max_step": [5]}
    short = {"seq_length": SHORT, "max_position_embeddings": SEQ}
    plans = [tiny_plan(2, **EXPERTS, **keys) for keys in ({"curriculum_learning": curriculum}, short)]
    cut, whole = run_ranks(2, padded_curves, plans)[0]
    assert [step.scores for step in cut] == [step.scores for step in whole]
    assert [step.grad_norm for step in cut] == [step.grad_norm for step in whole]
