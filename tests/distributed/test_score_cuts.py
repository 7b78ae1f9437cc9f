"""Reported scores: the same numbers however a step or an evaluation is cut into micro batches, data ranks and stages.

Reports that taught it: KTO's rewards in LlamaFactory (PR 10830) and trl (issue 1447, PR 1472), which averaged means of
micro batches that held different numbers of good and bad answers; extremes and means of rewards in OpenRLHF (PR 1336),
ms-swift (PR 10144) and VeOmni (PR 1130); steps without labels in trl (issue 6668), OLMo-core (PR 657) and instructlab
(issue 547).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from neox.objectives.multi_token import DOCUMENTS
from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.test_preferences import keys_of, opened, write_preferences
from tests.distributed.training_runs import SEQ, VOCAB, batches, tiny_plan

SAMPLES = 4
ANSWERS = 12
"""Rows of one answer in an evaluation."""
Scores = dict[str, float | None]
EXPERTS = {
    "norm": "rmsnorm",
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_type": "topk",
    "moe_aux_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_z_loss_coeff": 0.01,
}
TEACHER = {"teacher_logits": "teacher", "distillation_weight": 0.7}
LANGUAGE: dict[str, dict[str, Any]] = {
    "labels": {},
    "samples": {"loss_normalization": "samples", "lm_z_loss": 0.1},
    "experts": EXPERTS,
    "ahead": {"mtp_num_layers": 2},
    "distillation": TEACHER,
}
PREFERENCES = ("sigmoid", "hinge", "ipo", "free", "orpo", "simpo", "kto", "rm")
CUTS_OF_ONE: tuple[dict[str, Any], ...] = tuple({"train_micro_batch_size_per_gpu": size} for size in (4, 2, 1))
CUTS_OF_TWO: tuple[dict[str, Any], ...] = (
    {"train_micro_batch_size_per_gpu": 1},
    {"train_micro_batch_size_per_gpu": 1, "pp": 2},
)
OF_MICRO_BATCHES = {"moe_largest_share"}
"""Scores that a micro batch defines: the most used expert of each."""


def masks(step: int) -> torch.Tensor:
    """Labels of a step: many, some and few in its samples, and none in one of them."""
    mask = torch.zeros(SAMPLES, SEQ)
    for sample, labels in enumerate((SEQ, 5, 0, 1)):
        mask[(sample + step) % SAMPLES, :labels] = 1.0
    return mask


def labelled(plan: RunPlan, data_rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro batches with `masks`, documents of half a sample, and a teacher's logits."""
    size = plan.batch.train_micro_batch_size_per_gpu
    for number, batch in enumerate(batches(plan, data_rank)):
        step, part = divmod(number, plan.batch.gradient_accumulation_steps)
        first = (part * plan.grid.data_size + data_rank) * size
        generator = torch.Generator().manual_seed(step)
        ids = torch.rand(SAMPLES, SEQ, VOCAB, generator=generator).topk(5).indices
        logits = torch.randn(SAMPLES, SEQ, 5, generator=generator)
        fields = {"loss_mask": masks(step), "teacher_ids": ids, "teacher_logits": logits}
        if plan.architecture.mtp_num_layers:
            fields[DOCUMENTS] = (torch.arange(SEQ) // 8).expand(SAMPLES, -1)
        yield {**batch, **{name: value[first : first + size] for name, value in fields.items()}}


def language_scores(plans: list[RunPlan]) -> list[list[Scores]]:
    """On this rank: scores of two steps and of an evaluation of each plan."""
    from neox.engine import initialize_distributed, initialize_engine

    found = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = labelled(plan, grid.data_rank)
        steps = [dict(engine.train_batch(data).scores) for _ in range(2)]
        found.append([*steps, engine.eval_batch(labelled(plan, grid.data_rank)).scores])
    return found


def preference_scores(plans: list[RunPlan]) -> list[list[Scores]]:
    """On this rank: scores of two steps and of an evaluation of each plan."""
    found = []
    for plan in plans:
        engine, data = opened(plan)
        steps = [dict(engine.train_batch(data.train).scores) for _ in range(2)]
        found.append([*steps, engine.eval_batch(data.valid[0].batches).scores])
    return found


def plain_answers(plan: RunPlan) -> tuple[Scores, list[dict[str, Any]]]:
    """On one rank, after a step: an evaluation's scores, and sums, references and judgements of each of its answers.

    The log-probabilities are those of whole logits, each answer by itself.
    """
    engine, data = opened(plan)
    engine.train_batch(data.train)
    valid = data.valid[0].batches
    start = valid.position
    scores = engine.eval_batch(valid, ANSWERS).scores
    valid.seek(start)
    answers = []
    for _ in range(ANSWERS):
        batch = next(valid)
        for row in range(len(batch["tokens"])):
            for pair in (batch["pair_mask"][row] > 0).nonzero().flatten().tolist():
                found = {"good": bool(batch["desirable"][row, pair]) if "desirable" in batch else None}
                for side in (0, 1):
                    own = batch["slots"][row] == 2 * pair + side
                    with torch.no_grad():
                        logits = engine.logits(batch["tokens"][row : row + 1, own])[0].double()
                    counted = batch["in_answer"][row, own] > 0
                    picked = logits.log_softmax(-1).gather(-1, batch["labels"][row, own].unsqueeze(-1)).squeeze(-1)
                    found[f"sum{side}"] = float(picked[counted].sum())
                    if "reference" in batch:
                        found[f"reference{side}"] = float(batch["reference"][row, 2 * pair + side])
                answers.append(found)
    return scores, answers


def compare(found: Scores, expected: Scores, left_out: Collection[str], tolerance: float = 1e-5) -> None:
    assert list(found) == list(expected)
    for name in found.keys() - left_out:
        assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), (name, found, expected)


def language_plans(kind: str, world: int, cuts: tuple[dict[str, Any], ...]) -> list[RunPlan]:
    keys = {"num_layers": 2, "train_batch_size": SAMPLES, "loss_normalization": "tokens", **LANGUAGE[kind]}
    return [tiny_plan(world, **keys, **cut) for cut in cuts]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("kind", ["labels", *(pytest.param(kind, marks=SLOW) for kind in LANGUAGE if kind != "labels")])
def test_scores_of_language_models_do_not_depend_on_the_cut(kind: str) -> None:
    expected, *others = run_ranks(1, language_scores, language_plans(kind, 1, CUTS_OF_ONE))[0]
    cuts = [step for step in CUTS_OF_TWO if not (kind == "ahead" and "pp" in step)]
    for found in run_ranks(2, language_scores, language_plans(kind, 2, tuple(cuts))):
        others += found
    for curve in others:
        for scores, wanted in zip(curve, expected, strict=True):
            compare(scores, wanted, OF_MICRO_BATCHES)


@pytest.mark.parametrize("kind", ["kto", "rm", *(pytest.param(kind, marks=SLOW) for kind in PREFERENCES[:-2])])
def test_scores_of_preferences_do_not_depend_on_the_cut(tmp_path: Path, kind: str) -> None:
    """KTO's z is one number of each micro batch, as in TRL: the second loss depends on it, and the weights after it."""
    data = write_preferences(tmp_path)
    keys = {"num_layers": 2, "train_batch_size": SAMPLES, **keys_of(data, kind), "loss_normalization": "tokens"}
    if kind == "kto":
        keys["valid_data_paths"] = keys["train_data_paths"]
        keys["valid_label_data_paths"] = keys["train_label_data_paths"]
        keys["valid_reward_data_paths"] = keys["train_reward_data_paths"]
    keys |= {"eval_iters": 1}
    expected, *others = run_ranks(1, preference_scores, [tiny_plan(1, **keys, **cut) for cut in CUTS_OF_ONE])[0]
    for found in run_ranks(2, preference_scores, [tiny_plan(2, **keys, **cut) for cut in CUTS_OF_TWO]):
        others += found
    for curve in others:
        for step, (scores, wanted) in enumerate(zip(curve, expected, strict=True)):
            if kind == "kto" and step:
                compare(scores, wanted, {"loss", "kl"}, 1e-5 if step == 1 else 1e-3)
            else:
                compare(scores, wanted, ())


def test_rewards_of_kto_are_means_over_the_answers_of_each_kind(tmp_path: Path) -> None:
    """Each answer by itself in plain torch; micro batches of one row hold one kind alone, or both unevenly."""
    keys = {
        "num_layers": 2,
        "train_batch_size": SAMPLES,
        **keys_of(write_preferences(tmp_path), "kto"),
        "eval_iters": ANSWERS // SAMPLES,
    }
    for split in ("data", "label_data", "reward_data"):
        keys[f"valid_{split}_paths"] = keys[f"train_{split}_paths"]
    plan = tiny_plan(1, **keys, train_micro_batch_size_per_gpu=1, pack_impl="unpacked")
    scores, answers = run_ranks(1, plain_answers, plan)[0]
    beta = plan.config.preferences.kto_beta
    means = {}
    for good, name in ((True, "chosen"), (False, "rejected")):
        of_kind = [answer for answer in answers if answer["good"] is good]
        assert of_kind
        means[f"logps/{name}"] = math.fsum(answer["sum0"] for answer in of_kind) / len(of_kind)
        ratios = [answer["sum0"] - answer["reference0"] for answer in of_kind]
        means[f"rewards/{name}"] = beta * math.fsum(ratios) / len(of_kind)
    means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    for name, value in means.items():
        assert scores[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def without_labels(plan: RunPlan) -> tuple[list[float | None], list[Scores]]:
    """On this rank: the losses of three steps, the second of which has no label, and an evaluation without labels."""
    from neox.engine import initialize_distributed, initialize_engine

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)

    def data(steps: tuple[int, ...]) -> Iterator[dict[str, torch.Tensor]]:
        for number, batch in enumerate(batches(plan, grid.data_rank)):
            has_labels = float(steps[number // plan.batch.gradient_accumulation_steps % len(steps)])
            yield {**batch, "loss_mask": batch["loss_mask"] * has_labels}

    train = data((1, 0, 1))
    losses = [engine.train_batch(train).loss for _ in range(3)]
    return losses, [engine.eval_batch(data((0,))).scores]


@pytest.mark.parametrize(("world", "normalization"), [(1, "tokens"), (2, "micro_batch")])
def test_a_step_without_labels_has_no_loss(world: int, normalization: str) -> None:
    plan = tiny_plan(world, num_layers=2, loss_normalization=normalization, pp=2 * (world - 1))
    for losses, (evaluated,) in run_ranks(world, without_labels, plan):
        assert losses[1] is None
        assert losses[0] == pytest.approx(math.log(VOCAB), rel=0.1)
        assert losses[2] is not None
        assert evaluated == {"lm_loss": None}
