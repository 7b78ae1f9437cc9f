"""Training on preferences: the same numbers under every layout, the first loss, the reference and resumes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neox.data import IndexedDatasetBuilder
from neox.data.token_files.indexed_dataset import IGNORED
from neox.launch.agent.agent_files import PROGRESS_VARIABLE
from neox.plan import RunPlan
from neox.plan.devices.device import rank_memory
from tests.distributed.spawn import RankError, run_ranks
from tests.distributed.training_runs import VOCAB, batches, tiny_plan

PAIRS = 60
LENGTH = 48
STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "sigmoid": {"train_impl": "dpo", "dpo_label_smoothing": 0.1},
    "hinge": {"train_impl": "dpo", "dpo_loss": "hinge"},
    "ipo": {"train_impl": "dpo", "dpo_loss": "ipo"},
    "free": {"train_impl": "dpo", "dpo_reference_free": True},
    "orpo": {"train_impl": "orpo"},
    "simpo": {"train_impl": "simpo"},
    "kto": {"train_impl": "kto", "kto_desirable_weight": 1.5},
    "rm": {"train_impl": "rm", "rm_center_coefficient": 0.1, "z_loss": 0.02},
}


def write_documents(path: Path, documents: list[list[int]]) -> str:
    with IndexedDatasetBuilder(path, np.int32) as builder:
        builder.add_documents(np.concatenate(documents), list(map(len, documents)))
    return str(path)


def write_preferences(directory: Path) -> dict[str, dict[str, Any]]:
    """Write pairs and judged answers of mixed lengths, and return the keys that read each."""
    random = np.random.default_rng(3)
    documents: dict[str, list[list[int]]] = {name: [] for name in ("pos", "pos_label", "neg", "neg_label", "reward")}
    for number in range(PAIRS):
        prompt = random.integers(0, VOCAB, random.integers(1, 8)).tolist()
        for side in ("pos", "neg"):
            answer = random.integers(0, VOCAB, random.integers(2, 10)).tolist()
            documents[side].append(prompt + answer)
            documents[f"{side}_label"].append([IGNORED] * len(prompt) + answer)
        documents["reward"].append([1 if number % 3 else -1] * len(documents["pos"][-1]))
    paths = {name: [write_documents(directory / name, own)] for name, own in documents.items()}
    pairs: dict[str, Any] = {}
    for split in ("train", "valid"):
        for side in ("pos", "neg"):
            pairs[f"{side}_{split}_data_paths"] = paths[side]
            pairs[f"{side}_{split}_label_data_paths"] = paths[f"{side}_label"]
    judged = {"train_data_paths": paths["pos"], "train_label_data_paths": paths["pos_label"]}
    return {"pairs": pairs, "judged": {**judged, "train_reward_data_paths": paths["reward"]}}


def keys_of(data: dict[str, dict[str, Any]], kind: str) -> dict[str, Any]:
    shared = {"seq_length": LENGTH, "max_position_embeddings": LENGTH, "num_workers": 0, "train_iters": STEPS}
    files = data["judged"] if kind == "kto" else data["pairs"]
    return {**shared, "eval_interval": 100, "eval_iters": 2, **files, **KINDS[kind]}


def opened(plan: RunPlan):
    """Return the engine and the batches of a run on this rank."""
    from neox.data.run_data import build_data_iterators
    from neox.engine import initialize_distributed, open_engine
    from neox.features.table import build_features
    from neox.tokenizer import build_tokenizer

    grid, device = initialize_distributed(plan)
    engine = open_engine(plan, grid, device, build_features)
    tokenizer = build_tokenizer("CharLevelTokenizer", None)
    arguments = engine.data_arguments()
    return engine, build_data_iterators(plan, grid.data_rank, engine.iteration, tokenizer=tokenizer, **arguments)


def curves(plans: list[RunPlan]) -> list[list[dict[str, float]]]:
    """On this rank: the scores and norm of each step of each plan, and those of an evaluation."""
    answers = []
    for plan in plans:
        engine, data = opened(plan)
        steps = []
        for _ in range(STEPS):
            result = engine.train_batch(data.train)
            steps.append({**result.scores, "norm": result.grad_norm})
        if data.valid:
            steps.append(dict(engine.eval_batch(data.valid[0].batches).scores))
        answers.append(steps)
    return answers


SCHEDULES: dict[str, dict[str, Any]] = {
    "interleaved": {"pp": 2, "pipeline_schedule": "interleaved"},
    "dualpipev": {"pp": 2, "pipeline_schedule": "dualpipev"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "zero1": {"zero": 1},
    "zero3": {"zero": 3},
    "tp2": {"mp": 2},
    "pp2": {"pp": 2},
    "recomputed": {"zero": 2, "checkpoint_activations": True},
}


def compare(tmp_path: Path, kind: str, layouts: list[str], **others: Any) -> None:
    shared = {"train_batch_size": 4, "num_layers": 2, **others}
    alone = tiny_plan(1, train_micro_batch_size_per_gpu=4, **shared, **keys_of(write_preferences(tmp_path), kind))
    expected = run_ranks(1, curves, [alone])[0][0]
    if kind in ("sigmoid", "kto"):
        first = math.log(2) if kind == "sigmoid" else expected[0]["loss"]
        assert expected[0]["loss"] == pytest.approx(first, rel=1e-5)
    assert expected[0]["loss"] != expected[-1]["loss"]
    plans = []
    for name in layouts:
        layout = {**LAYOUTS, **SCHEDULES}[name]
        micro = 1 if name in SCHEDULES else 2
        if name == "tp2" or (kind == "kto" and name == "pp2"):  # z, and the loss with it, is of a micro batch
            micro = 4
        data = tmp_path / name  # of its own, next to which it stores the reference that it computes
        data.mkdir()
        keys = keys_of(write_preferences(data), kind)
        plans.append(tiny_plan(2, train_micro_batch_size_per_gpu=micro, **shared, **keys, **layout))
    for name, curve in zip(layouts, run_ranks(2, curves, plans)[0], strict=True):
        for step, wanted in zip(curve, expected, strict=True):
            check_scores(step, wanted, (kind, name))


def check_scores(found: Mapping[str, float], wanted: Mapping[str, float], what: object) -> None:
    """Compare the scores of a step: losses to 2e-6, which is met by 1e-6.

    Others are looser. Rewards are beta times differences of sums of about 40 nats, which fp32 rounds to 4e-6; and the
    squares in a norm are added in another order if micro batches or ranks divide a step.
    """
    assert found.keys() == wanted.keys()
    assert found["loss"] == pytest.approx(wanted["loss"], rel=2e-6), what
    for name, value in wanted.items():
        if name == "rewards/accuracies" and abs(wanted["rewards/margins"]) < 1e-6:
            continue  # the model is its own reference: margins are rounding of either sign
        assert found[name] == pytest.approx(value, rel=4e-6, abs=2e-6), (what, name)


def test_layouts_train_alike_by_dpo(tmp_path: Path) -> None:
    compare(tmp_path, "sigmoid", list(LAYOUTS))


def test_layouts_train_alike_by_kto(tmp_path: Path) -> None:
    compare(tmp_path, "kto", ["dp2", "pp2"])


def test_layouts_train_a_reward_model_alike(tmp_path: Path) -> None:
    compare(tmp_path, "rm", ["zero3", "tp2", "pp2"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_layouts_train_alike(tmp_path: Path, kind: str) -> None:
    compare(tmp_path, kind, list(LAYOUTS))


@pytest.mark.slow
def test_adapters_train_alike(tmp_path: Path) -> None:
    lora = {"r": 4, "alpha": 8, "target": ["query_key_value", "dense"]}
    compare(tmp_path, "sigmoid", ["dp2", "zero1", "tp2", "pp2"], lora=lora)


@pytest.mark.slow
def test_other_pipeline_schedules_train_alike(tmp_path: Path) -> None:
    compare(tmp_path, "sigmoid", ["interleaved", "dualpipev"], num_layers=4)


@pytest.mark.slow
def test_other_pipeline_schedules_train_a_reward_model_alike(tmp_path: Path) -> None:
    keys = {"train_batch_size": 4, "num_layers": 4, **keys_of(write_preferences(tmp_path), "rm")}
    plans = [tiny_plan(2, train_micro_batch_size_per_gpu=1, **keys, **layout) for layout in SCHEDULES.values()]
    expected = run_ranks(1, curves, [tiny_plan(1, train_micro_batch_size_per_gpu=4, **keys)])[0][0]
    for curve in run_ranks(2, curves, plans)[0]:
        for step, wanted in zip(curve, expected, strict=True):
            check_scores(step, wanted, "rm")


@pytest.mark.parametrize("kind", ["rm", pytest.param("sigmoid", marks=pytest.mark.slow)])
def test_half_precision_trains_nearly_alike(tmp_path: Path, kind: str) -> None:
    keys = {"train_batch_size": 4, "num_layers": 2, **keys_of(write_preferences(tmp_path), kind)}
    plans = []
    for precision, layout in (("fp32", {}), ("bf16", {"zero": 1}), ("bf16", {"pp": 2})):
        own = {"precision": precision, "pipe_parallel_size": 0, **layout}
        name = {"precompute_model_name": precision} if kind == "sigmoid" else {}
        plans.append(tiny_plan(2, train_micro_batch_size_per_gpu=2, **keys, **own, **name))
    expected, *found = run_ranks(2, curves, plans)[0]
    for curve in found:
        for step, wanted in zip(curve, expected, strict=True):
            assert step["loss"] == pytest.approx(wanted["loss"], abs=0.03)


def resumed(plans: list[RunPlan]):
    """On this rank: the scores after each run, and the identity of its reference."""
    from neox.checkpoint import REFERENCE
    from neox.train.trainer import Trainer

    answers = []
    for plan in plans:
        engine, data = opened(plan)
        Trainer(plan, engine, data).fit()
        answers.append([dict(engine.eval_batch(data.valid[0].batches).scores), engine.saved_state().get(REFERENCE)])
    return answers


def test_a_run_goes_on_with_its_reference(tmp_path: Path) -> None:
    keys = keys_of(write_preferences(tmp_path), "sigmoid")
    shared = {"train_batch_size": 4, "num_layers": 2, **keys, "checkpoint_factor": 2, "train_iters": 6}
    save = str(tmp_path / "run")
    whole = tiny_plan(2, train_micro_batch_size_per_gpu=2, **shared, save=save)
    stopped = tiny_plan(2, train_micro_batch_size_per_gpu=2, **shared, save=save, load=save, iteration=4, zero=1)
    first, second = run_ranks(2, resumed, [whole, stopped])[0]
    assert second[0] == pytest.approx(first[0], rel=2e-6)
    assert first[1] == second[1]
    assert "seed 7" in first[1]
    # A second model on the same data has a file of its own; under one name it is refused.
    (of_first,) = tmp_path.glob("*.reference.npz")
    other = tiny_plan(1, train_micro_batch_size_per_gpu=4, **{**shared, "seed": 8})
    ((started,),) = run_ranks(1, curves, [other])
    assert started[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert len(list(tmp_path.glob("pos.start-*.reference.npz"))) == 2
    named = of_first.with_name("pos.mine.reference.npz")
    of_first.rename(named)
    with pytest.raises(RankError, match="seed 8"):
        run_ranks(1, curves, [replace(other, config=other.config.updated({"precompute_model_name": "mine"}))])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sigmoid", "rm"])
def test_a_run_goes_on_at_other_degrees(tmp_path: Path, kind: str) -> None:
    keys = keys_of(write_preferences(tmp_path), kind)
    save = str(tmp_path / "run")
    shared = {"train_batch_size": 4, "num_layers": 2, **keys, "checkpoint_factor": 2, "train_iters": 6, "save": save}
    whole = tiny_plan(2, train_micro_batch_size_per_gpu=2, **shared)
    others = []
    for layout in ({"pp": 2}, {"mp": 2}, {"zero": 3}):
        micro = 4 if layout != {"zero": 3} else 2
        others.append(tiny_plan(2, train_micro_batch_size_per_gpu=micro, **shared, load=save, iteration=4, **layout))
    first, *found = run_ranks(2, resumed, [whole, *others])[0]
    for scores, _ in found:
        check_scores(scores, first[0], kind)


def test_the_reference_without_adapters_is_the_stored_one(tmp_path: Path) -> None:
    lora = {"r": 4, "alpha": 8, "target": ["query_key_value", "dense"]}
    keys = {"train_batch_size": 4, "num_layers": 2, "lora": lora, **keys_of(write_preferences(tmp_path), "sigmoid")}
    stored = tiny_plan(1, train_micro_batch_size_per_gpu=4, **keys)
    switched = tiny_plan(1, train_micro_batch_size_per_gpu=4, reference_model="without_adapters", **keys)
    expected, found = run_ranks(1, curves, [stored, switched])[0]
    assert found == expected
    assert found[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert found[1]["loss"] != found[0]["loss"]
    (stored_file,) = tmp_path.glob("*.reference.npz")
    stored_file.unlink()
    save = str(tmp_path / "run")
    steps = {"train_iters": 6, "checkpoint_factor": 2, "reference_model": "without_adapters"}
    shared = {**keys, **steps, "train_micro_batch_size_per_gpu": 2, "save": save}
    whole, going_on = tiny_plan(2, **shared), tiny_plan(2, **shared, load=save, iteration=4, pp=2)
    first, second = run_ranks(2, resumed, [whole, going_on])[0]
    assert second[0] == pytest.approx(first[0], rel=4e-6)
    assert not list(tmp_path.glob("*.reference.npz"))


@pytest.mark.parametrize(
    "names", [["alone", "zero3"], pytest.param(["zero1", "tp2", "pp2", "dualpipev"], marks=pytest.mark.slow)]
)
def test_a_copy_of_the_weights_is_the_stored_reference(tmp_path: Path, names: list[str]) -> None:
    keys = {"train_batch_size": 4, "num_layers": 4, **keys_of(write_preferences(tmp_path), "sigmoid")}
    layouts = {**LAYOUTS, **SCHEDULES}
    for name in names:
        before = set(tmp_path.glob("*.reference.npz"))
        world = 1 if name == "alone" else 2
        micro = {"alone": 4, "tp2": 4, "dualpipev": 1}.get(name, 2)
        layout = layouts.get(name, {})
        shared = {**keys, "train_micro_batch_size_per_gpu": micro, "precompute_model_name": name, **layout}
        stored = tiny_plan(world, **shared)
        copied = tiny_plan(world, **{**shared, "precompute_model_name": None}, reference_model="copy")
        expected, found = run_ranks(world, curves, [stored, copied])[0]
        assert found[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
        assert found[1]["loss"] != found[0]["loss"]
        for step, wanted in zip(found, expected, strict=True):
            assert step == pytest.approx(wanted, rel=2e-6, abs=2e-6), name
        assert set(tmp_path.glob("*.reference.npz")) - before == {tmp_path / f"pos.{name}.reference.npz"}


def progress_of_other_ranks(plan: RunPlan, directory: str) -> bool:
    """On this rank: whether it reports progress while the reference's log-probabilities are computed."""
    import torch.distributed as dist

    path = Path(directory) / f"progress-{dist.get_rank()}"
    os.environ[PROGRESS_VARIABLE] = str(path)
    opened(plan)
    return path.exists()


def test_every_rank_reports_progress_while_the_reference_is_computed(tmp_path: Path) -> None:
    plan = tiny_plan(2, **keys_of(write_preferences(tmp_path), "sigmoid"), num_layers=2)
    assert run_ranks(2, progress_of_other_ranks, plan, str(tmp_path)) == [True, True]


def observed(plans: list[RunPlan]) -> list[dict[str, float]]:
    """On this rank: what is observed of the third step of each plan."""
    found = []
    for plan in plans:
        engine, data = opened(plan)
        for _ in range(STEPS):
            result = engine.train_batch(data.train)
        found.append(dict(result.numbers))
    return found


def test_the_reference_is_not_observed_instead_of_the_model(tmp_path: Path) -> None:
    keys = {**keys_of(write_preferences(tmp_path), "sigmoid"), "log_stability_every": 1, "num_layers": 2}
    stored, copied = tiny_plan(1, **keys), tiny_plan(1, **keys, reference_model="copy")
    expected, found = run_ranks(1, observed, [stored, copied])[0]
    assert any(name.startswith("stability/attention_logit") for name in expected)
    assert found == pytest.approx(expected, rel=1e-5)


def copied_bytes(plans: list[RunPlan]) -> list[int]:
    """On this rank: the bytes of the second copy of the weights of each plan."""
    from neox.engine import initialize_distributed
    from neox.engine.build_engine import build_model
    from neox.features.reference.copy import WeightsCopy
    from neox.objectives import build_objective

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        answers.append(WeightsCopy(build_model(plan, grid, build_objective(plan), device)).nbytes)
    return answers


def test_the_plan_counts_the_copy(tmp_path: Path) -> None:
    keys = {**keys_of(write_preferences(tmp_path), "sigmoid"), "precision": "bf16"}
    layouts: list[dict[str, Any]] = [{"zero": 1}, {"zero": 3}, {"mp": 2}, {"pp": 2}]
    plans = [tiny_plan(2, **keys, reference_model="copy", **layout) for layout in layouts]
    measured = run_ranks(2, copied_bytes, plans)
    for number, layout in enumerate(layouts):
        stored = tiny_plan(2, **keys, **layout)
        for rank in range(2):
            planned = rank_memory(plans[number], rank, on_cpu=False).weights
            planned -= rank_memory(stored, rank, on_cpu=False).weights
            assert measured[rank][number] == pytest.approx(planned, rel=0.02), layout


def test_a_run_goes_on_with_the_copy_of_its_first_weights(tmp_path: Path) -> None:
    data = write_preferences(tmp_path)
    base = str(tmp_path / "base")
    shared = {"train_batch_size": 4, "num_layers": 2, "train_micro_batch_size_per_gpu": 2}
    steps = {"train_iters": 6, "checkpoint_factor": 2}
    simpo = {**shared, **keys_of(data, "simpo"), **steps, "train_iters": 2, "seed": 5, "save": base}
    copied = {"reference_model": "copy", "load": base, "finetune": True}
    keys = {**shared, **keys_of(data, "sigmoid"), **steps, **copied}
    save = str(tmp_path / "run")
    whole = tiny_plan(2, **keys, save=str(tmp_path / "whole"))
    stopped = tiny_plan(2, **keys, save=save, exit_interval=4)
    of_launcher = {**keys, "load": save, "finetune": False}  # a run loads its own checkpoints
    going_on = tiny_plan(2, **of_launcher, save=save, zero=3)
    _, expected, before, found = run_ranks(2, resumed, [tiny_plan(2, **simpo), whole, stopped, going_on])[0]
    assert before[0] != expected[0]
    assert found[0] == pytest.approx(expected[0], rel=2e-6, abs=2e-6)
    assert found[1] == expected[1]
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(RankError, match="base"):
        run_ranks(2, resumed, [going_on])


def test_a_stored_reference_of_shorter_rows_is_refused(tmp_path: Path) -> None:
    keys = {"train_batch_size": 4, "num_layers": 2, **keys_of(write_preferences(tmp_path), "sigmoid")}
    shared = {**keys, "train_micro_batch_size_per_gpu": 4, "skip_bad_pairs": True}
    short, whole = tiny_plan(1, **{**shared, "seq_length": LENGTH // 2}), tiny_plan(1, **shared)
    run_ranks(1, curves, [short])
    with pytest.raises(RankError, match="smaller seq_length"):
        run_ranks(1, curves, [whole])


def test_the_reference_moves_no_random_numbers(tmp_path: Path) -> None:
    keys = keys_of(write_preferences(tmp_path), "sigmoid")
    shared = {"train_batch_size": 4, "num_layers": 2, "hidden_dropout": 0.1, **keys}
    plan = tiny_plan(1, train_micro_batch_size_per_gpu=4, **shared)
    computed, stored = run_ranks(1, curves, [plan, plan])[0]
    assert computed == stored


def test_texts_are_kept_apart_over_stages() -> None:
    plans = [
        tiny_plan(2, train_micro_batch_size_per_gpu=2, num_layers=2, reset_attention_mask=True, **layout)
        for layout in ({}, {"pp": 2})
    ]
    ranks, stages = run_ranks(2, of_documents, plans)[0]
    assert stages == pytest.approx(ranks, rel=4e-6)


def of_documents(plans: list[RunPlan]) -> list[list[float]]:
    """On this rank: the losses of steps on rows of two documents."""
    from neox.data.batches import document_starts
    from neox.engine import initialize_distributed, initialize_engine
    from neox.features.table import build_features

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device, build_features)
        rows = (
            {**batch, "document_starts": document_starts(batch["tokens"], 5)} for batch in batches(plan, grid.dp_rank)
        )
        answers.append([engine.train_batch(rows).loss for _ in range(STEPS)])
    return answers


@pytest.mark.slow
def test_the_first_loss_is_that_of_equal_models(tmp_path: Path) -> None:
    """ln 2, whatever the precision, the ZeRO stage, the packing and the degrees."""
    keys = {"train_batch_size": 4, "num_layers": 2, **keys_of(write_preferences(tmp_path), "sigmoid")}
    plans = []
    for number, (precision, impl, layout) in enumerate(
        [
            ("fp32", "packed", {"zero": 2}),
            ("fp32", "unpacked", {"zero": 3}),
            ("fp32", "pack_until_overflow", {"pp": 2}),
            ("bf16", "packed", {"zero": 1}),
            ("bf16", "unpacked", {"pp": 2}),
            ("fp16", "packed", {"mp": 2}),
        ]
    ):
        own = {"precision": precision, "pack_impl": impl, "precompute_model_name": f"of-plan-{number}"}
        plans.append(tiny_plan(2, train_micro_batch_size_per_gpu=2, **keys, **own, **layout))
    for plan, curve in zip(plans, run_ranks(2, curves, plans)[0], strict=True):
        allowed = 1e-5 if plan.precision == "fp32" else 5e-3
        assert curve[0]["loss"] == pytest.approx(math.log(2), abs=allowed), plan.config.data.pack_impl


@pytest.mark.parametrize("kind", ["simpo", "rm"])
def test_whole_validation_sets_count_each_pair_once(tmp_path: Path, kind: str) -> None:
    """Micro batches of three rows on two data ranks, which do not divide the rows: the last ones hold copies."""
    from neox.data.run_data import build_data_iterators
    from neox.tokenizer import build_tokenizer

    data = write_preferences(tmp_path)
    keys = {**keys_of(data, kind), "eval_iters": "all", "train_micro_batch_size_per_gpu": 3, "train_batch_size": 6}
    plan = tiny_plan(2, **keys)
    counted = 0.0
    rows = 0
    for rank in range(2):
        (found,) = build_data_iterators(plan, rank, tokenizer=build_tokenizer("CharLevelTokenizer", None)).valid
        assert found.micro_batches is not None
        for _ in range(found.micro_batches):
            batch = next(found.batches)
            counted += float(batch["pair_mask"].sum())
            rows += len(batch["pair_mask"])
    assert counted == PAIRS
    assert rows > found.batches.dataset.num_samples, "some of the last rows are copies"


def whole_set(plan: RunPlan) -> dict[str, float]:
    """Return the mean scores of one pass over the validation set."""
    engine, data = opened(plan)
    (found,) = data.valid
    assert found.micro_batches is not None
    return dict(engine.eval_batch(found.batches, found.micro_batches).scores)


def test_whole_validation_sets_score_alike_on_data_ranks(tmp_path: Path) -> None:
    """The last micro batch of the second rank holds copies only."""
    data = write_preferences(tmp_path)
    keys = {**keys_of(data, "simpo"), "eval_iters": "all", "train_batch_size": 8}
    alone = run_ranks(1, whole_set, tiny_plan(1, train_micro_batch_size_per_gpu=8, **keys))[0]
    both = run_ranks(2, whole_set, tiny_plan(2, train_micro_batch_size_per_gpu=4, **keys))
    assert both[0] == both[1]
    check_scores(both[0], alone, "two data ranks")
