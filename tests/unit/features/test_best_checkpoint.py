"""The checkpoint named `best`, and exports while training goes on."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from neox.checkpoint.save_directory.best import BEST, BestRule, read_best
from neox.checkpoint.save_directory.staging import is_kept_from_deletion, kept_from_deletion
from neox.checkpoint_files.manifest import write_manifest
from neox.config import NeoXConfig
from neox.data.run_data import DataIterators, EvaluationSet
from neox.data.token_files.sidecar import Sidecar, write_sidecar
from neox.engine import SaveReport, TrainState
from neox.errors import ConfigError
from neox.evaluation.best_rule import best_rule
from neox.evaluation.tasks import FileTask, TaskScalars, file_task_scalars
from neox.features.best_checkpoint.run import NameBest
from neox.features.eval_tasks.run import check_metric
from neox.features.hf_export import run as hf_export
from neox.plan import DataAmounts, static_problems
from neox.plan.report.data_lines import validation_lines
from neox.preflight.data_amounts import validation_tokens
from neox.preflight.score_checks import save_best_notes, save_best_problems
from tests.errors import raises_naming
from tests.plans import SMALL, small_plan

DPO = {"train_impl": "dpo", "pos_train_data_paths": ["p"], "neg_train_data_paths": ["n"], "pack_impl": "unpacked"}
# Writes what it was asked for; a checkpoint with a file `bad` cannot be exported.
TOOL = """
import sys, time
from pathlib import Path
given = [word for word in sys.argv[1:] if word != "--overwrite"]
words = dict(zip(given[::2], given[1::2]))
checkpoint, output = Path(words["--input_dir"]), Path(words["--output_dir"])
if (checkpoint / "bad").exists():
    sys.exit("error: this one is bad")
time.sleep(0.2)
output.mkdir(exist_ok=True)
(output / "from").write_text(checkpoint.name + " " + words.get("--revision", ""))
print("verified: yes")
"""


def checkpoint(save: Path, step: int) -> Path:
    path = save / f"global_step{step}"
    path.mkdir(parents=True)
    write_manifest(path, step, step)
    return path


def named_best(save: Path, **keys: object) -> NameBest:
    return NameBest(small_plan(save=str(save), save_best="validation/lm_loss", **keys))


def evaluate(feature: NameBest, step: int, value: float) -> None:
    feature.on_evaluation(TrainState(iteration=step), "validation", {"validation/lm_loss": value})


def save(feature: NameBest, directory: Path, step: int) -> None:
    feature.on_save(TrainState(iteration=step), SaveReport(checkpoint(directory, step), step, 0.0, 0.0))


def best(directory: Path) -> tuple[str, int, float]:
    found = read_best(directory)
    assert found is not None
    assert found.rule.metric == "validation/lm_loss"
    return found.checkpoint, found.iteration, found.value


def test_the_best_of_evaluated_checkpoints_has_the_name_and_stays(tmp_path: Path) -> None:
    feature = named_best(tmp_path)
    feature.on_start(TrainState())
    evaluate(feature, 1, 1.0)  # not saved
    evaluate(feature, 2, 3.0)
    save(feature, tmp_path, 2)
    assert best(tmp_path) == ("global_step2", 2, 3.0)
    save(feature, tmp_path, 3)  # not evaluated
    evaluate(feature, 4, 2.0)
    save(feature, tmp_path, 4)
    evaluate(feature, 5, float("nan"))
    save(feature, tmp_path, 5)
    save(feature, tmp_path, 6)
    evaluate(feature, 6, 2.5)
    assert (tmp_path / BEST).resolve() == tmp_path / "global_step4"
    kept = [step for step in range(2, 7) if is_kept_from_deletion(tmp_path / f"global_step{step}")]
    assert kept == [4]
    with kept_from_deletion(tmp_path / "global_step4"):  # an upload may protect it, too
        pass
    resumed = named_best(tmp_path)
    resumed.on_start(TrainState(iteration=6))
    evaluate(resumed, 7, 2.2)
    save(resumed, tmp_path, 7)
    assert (tmp_path / BEST).resolve().name == "global_step4"
    save(resumed, tmp_path, 8)
    evaluate(resumed, 8, 1.0)  # after its save, as at the last step
    assert (tmp_path / BEST).resolve().name == "global_step8"
    named_best(tmp_path).on_start(TrainState())  # another run begins
    assert read_best(tmp_path) is None
    assert not (tmp_path / BEST).exists()


def test_a_last_checkpoint_whose_evaluation_was_interrupted_is_compared_after_a_restart(tmp_path: Path) -> None:
    feature = named_best(tmp_path)
    feature.on_start(TrainState())
    evaluate(feature, 2, 3.0)
    save(feature, tmp_path, 2)
    save(feature, tmp_path, 4)  # and the process is killed
    restarted = named_best(tmp_path)
    restarted.on_start(TrainState(iteration=4))
    evaluate(restarted, 4, 2.0)
    assert best(tmp_path) == ("global_step4", 4, 2.0)


def test_a_save_in_the_background_may_end_after_the_next_evaluation(tmp_path: Path) -> None:
    feature = named_best(tmp_path)
    evaluate(feature, 100, 2.0)
    evaluate(feature, 110, 2.1)
    save(feature, tmp_path, 100)
    assert best(tmp_path) == ("global_step100", 100, 2.0)


def test_a_best_that_a_rollback_writes_again_stays(tmp_path: Path) -> None:
    feature = named_best(tmp_path)
    evaluate(feature, 200, 2.0)
    save(feature, tmp_path, 200)
    evaluate(feature, 250, 9.0)
    shutil.rmtree(tmp_path / "global_step200")
    save(feature, tmp_path, 200)
    assert is_kept_from_deletion(tmp_path / "global_step200")
    evaluate(feature, 220, 1.0)
    save(feature, tmp_path, 250)  # its evaluation was before the rollback
    assert best(tmp_path) == ("global_step200", 200, 2.0)


NAMED = {"train_data_paths": ["t"], "valid_data_paths": {"web": "w", "own": "o"}}
TASKS = {"save_best": "eval/lambada_acc", "eval_tasks": ["lambada=l.jsonl"]}
OF_GROUP = {"save_best": "eval/mmlu_anatomy_acc", "eval_tasks": ["mmlu_anatomy"]}
OF_DPO = {**DPO, "pos_valid_data_paths": ["p"], "neg_valid_data_paths": ["n"], "save_best": "validation/loss"}
BLEND = {"train_data_paths": ["t"], "valid_data_paths": ["a", "b"], "valid_data_weights": [1, 1]}
PAIR = {"train_data_paths": ["t"], "valid_data_paths": {"a": "a", "b": "b"}}
OF_WEB = {**NAMED, "save_best": "validation/web/lm_loss"}
BITS = {**NAMED, "save_best": "validation/lm_loss_bits_per_byte"}


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({}, {"save_best_goal": "max"}, ["save_best_goal min -> max"]),
        ({}, {"save_best": "validation/z_loss"}, ["save_best validation/lm_loss -> validation/z_loss"]),
        ({}, {"eval_iters": 7}, ["samples 400 -> 28"]),
        ({"data_path": "d"}, {"data_path": "d", "split": "8,1,1"}, ["split [0.969, 0.03, 0.001] -> [0.8, 0.1, 0.1]"]),
        ({"data_path": "d"}, {"data_path": "d", "valid_data_paths": ["never read"]}, []),
        (NAMED, {**NAMED, "valid_data_paths": {"web": "w"}}, ["valid_data_paths"]),
        ({**NAMED, "save_best": "validation/web/x_loss"}, {**NAMED, "valid_data_paths": {"web": "w"}}, ["save_best"]),
        (TASKS, {**TASKS, "eval_limit": 5}, ["eval_limit unset -> 5"]),
        (TASKS, {**TASKS, "eval_tasks": ["lambada=other.jsonl"]}, ["eval_tasks"]),
        ({}, {"train_iters": 20, "eval_interval": 5, "valid_data_weights": None}, []),
        (TASKS, {**TASKS, "eval_tasks": ["lambada=l.jsonl", "arc_easy"], "eval_iters": 1}, []),
        (TASKS, {**TASKS, "seq_length": 8}, ["seq_length 16 -> 8"]),
        (OF_GROUP, {**OF_GROUP, "eval_tasks": ["mmlu_anatomy", "mmlu", "mmlu_anatomy_2"]}, []),
        (OF_GROUP, {**OF_GROUP, "eval_tasks": ["mmlu"]}, []),
        (OF_GROUP, {**OF_GROUP, "eval_tasks": ["mmlu_*"]}, []),
        (OF_GROUP, {**OF_GROUP, "eval_tasks": ["own/mmlu_anatomy.yaml"]}, ["eval_tasks"]),
        (BLEND, {**BLEND, "valid_data_weights": [2, 2]}, []),
        (BLEND, {**BLEND, "valid_data_weights": None}, []),
        (BLEND, {**BLEND, "valid_data_weights": [2, 1]}, ["valid_data_weights [0.5, 0.5] -> [0.666667, 0.333333]"]),
        (PAIR, {**PAIR, "valid_data_paths": {"a": {"path": "a", "weight": 2}, "b": {"path": "b", "weight": 2}}}, []),
        (PAIR, {**PAIR, "valid_data_paths": {"a": {"path": "a", "weight": 2}, "b": "b"}}, ["valid_data_paths"]),
        ({}, {"loss_normalization": "samples"}, ["loss_normalization micro_batch -> samples"]),
        ({}, {"loss_normalization": "tokens", "eval_iters": "all"}, ["loss_norm", "samples", "seed"]),
        ({"eval_iters": "all"}, {"loss_normalization": "tokens", "eval_iters": "all"}, []),
        ({}, {"eod_mask_loss": True}, ["eod_mask_loss unset -> True"]),
        ({}, {"reset_attention_mask": True}, ["reset_attention_mask unset -> True"]),
        (NAMED, {**NAMED, "pack_impl": "unpacked"}, ["loss_normalization", "pack_impl unset -> unpacked"]),
        ({}, {"seed": 5}, ["seed 1234 -> 5"]),
        (OF_DPO, {**OF_DPO, "dpo_beta": 0.5}, ["dpo_beta unset -> 0.5"]),
        (OF_DPO, {**OF_DPO, "dpo_loss": "ipo"}, ["dpo_loss unset -> ipo"]),
        (OF_DPO, {**OF_DPO, "pos_train_data_paths": ["q"]}, []),
        ({}, {"lm_z_loss": 1e-3}, []),
        (
            {"lm_z_loss": 1e-2, "save_best": "validation/loss"},
            {"lm_z_loss": 1e-3, "save_best": "validation/loss"},
            ["lm"],
        ),
        (OF_WEB, {**OF_WEB, "valid_data_paths": {"web": {"path": "w", "labels": "l"}}}, ["valid_data_paths"]),
        (OF_WEB, {**OF_WEB, "valid_data_paths": {"web": {"path": "w", "weight": 2}}}, []),
        ({}, {"fim_rate": 0.5, "num_workers": 0, "data_impl": "mmap"}, []),
        (BITS, BITS, []),
        (
            {**NAMED, "save_best": "validation/web/lm_loss"},
            {**NAMED, "save_best": "validation/web/lm_loss", "valid_data_paths": {"web": "w", "more": "m"}},
            [],
        ),
    ],
)
def test_a_rule_changes_with_metric_goal_and_what_it_is_measured_on(
    before: dict[str, object], now: dict[str, object], changed: list[str]
) -> None:
    def rule(keys: dict[str, object]) -> BestRule:
        known: dict[str, object] = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
        return best_rule(small_plan(**known, save="x", **{"save_best": "validation/lm_loss", **keys}))

    found = sorted(rule(now).changes_since(rule(before)))
    assert len(found) == len(changed)
    for text, expected in zip(found, changed, strict=True):
        assert text.startswith(expected)


def test_a_task_file_is_known_by_the_names_in_it(tmp_path: Path) -> None:
    """lm-eval reports by the keys `task` and `group` of a file, whatever the file is called."""
    for name, text in (
        ("first", "task: questions\ndoc_to_text: !function code.read\n"),
        ("second", "include: first.yaml\nnum_fewshot: 2\n"),
        ("group", "group: exam\ntask: [questions, other]\n"),
        ("unrelated", "task: something\n"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)

    def measured(*tasks: str) -> list[str]:
        listed = [task if "." not in task else str(tmp_path / task) for task in tasks]
        plan = small_plan(save="x", save_best="eval/questions_acc", eval_tasks=listed)
        return [Path(task).name for task in best_rule(plan).measured_on["eval_tasks"]]

    assert measured("first.yaml", "unrelated.yaml") == ["first.yaml"]
    assert measured("second.yaml", "arc_easy") == ["second.yaml"]
    assert measured("group.yaml") == ["group.yaml"]
    assert measured("absent.yaml", "unrelated.yaml") == ["absent.yaml"]  # it may be any


def test_a_best_by_another_rule_stays_until_another_is_evaluated_and_is_named(tmp_path: Path, caplog) -> None:
    feature = named_best(tmp_path)
    evaluate(feature, 2, 1.0)
    save(feature, tmp_path, 2)
    record = json.loads((tmp_path / "best.json").read_text())
    assert (record["metric"], record["goal"]) == ("validation/lm_loss", "min")
    assert record["measured_on"]["samples"] == small_plan().batch.train_batch_size * 100

    same = named_best(tmp_path, load=str(tmp_path))
    same.on_start(TrainState(iteration=2))
    evaluate(same, 3, 2.0)
    save(same, tmp_path, 3)
    assert not caplog.records
    assert best(tmp_path) == ("global_step2", 2, 1.0)

    largest = named_best(tmp_path, load=str(tmp_path), save_best_goal="max")
    plan = small_plan(save=str(tmp_path), load=str(tmp_path), save_best="validation/lm_loss", save_best_goal="max")
    assert "save_best_goal min -> max" in save_best_notes(plan)[0]
    largest.on_start(TrainState(iteration=3))
    assert "save_best_goal min -> max" in caplog.text
    assert is_kept_from_deletion(tmp_path / "global_step2")
    evaluate(largest, 4, 0.5)  # worse by either goal, and yet the only one of the new goal
    save(largest, tmp_path, 4)
    assert best(tmp_path) == ("global_step4", 4, 0.5)
    assert is_kept_from_deletion(tmp_path / "global_step4")
    assert save_best_notes(plan) == []
    evaluate(largest, 5, 0.4)
    save(largest, tmp_path, 5)
    assert best(tmp_path) == ("global_step4", 4, 0.5)


def older_record(directory: Path, metric: str, config: str | None) -> None:
    """Write the record of a version that wrote neither goal nor data, and the configuration of its checkpoint."""
    path = checkpoint(directory, 2)
    if config is not None:
        (path / "configs").mkdir()
        (path / "configs" / "config.yml").write_text(config)
    older = {"checkpoint": "global_step2", "iteration": 2, "metric": metric, "value": 1.0}
    (directory / "best.json").write_text(json.dumps(older))


@pytest.mark.parametrize(
    ("metric", "config", "changed"),
    [
        ("validation/lm_loss", "save_best_goal: min", None),
        ("validation/lm_loss", "seed: 1", None),  # `min` is the default
        ("validation/lm_loss", "save_best_goal: max", "save_best_goal max -> min"),
        ("validation/lm_loss", None, "save_best_goal unset -> min"),
        ("validation/web/lm_loss_bits_per_byte", "seed: 1", None),
        ("validation/lm_loss_bits_per_byte", "seed: 1", "joined_text_weighed_by unset -> labels"),
        ("validation/lm_loss_char_ppl", "seed: 1", "joined_text_weighed_by unset -> labels"),
        ("eval/perplexity_loss", "seed: 1", "scored_of_documents unset -> text"),
        ("eval/lambada_ppl", "seed: 1", None),
    ],
)
def test_a_record_of_an_older_version_has_the_goal_of_its_checkpoint(
    tmp_path: Path, metric: str, config: str | None, changed: str | None
) -> None:
    older_record(tmp_path, metric, config)
    tasks = ["perplexity=c.jsonl", "lambada=l.jsonl"]
    plan = small_plan(**NAMED, save=str(tmp_path), load=str(tmp_path), save_best=metric, eval_tasks=tasks)
    notes = save_best_notes(plan)
    assert len(notes) == (changed is not None)
    for note in notes:
        assert str(changed) in note


def test_a_record_of_an_older_version_counts(tmp_path: Path) -> None:
    older_record(tmp_path, "validation/lm_loss", "save_best_goal: min")
    feature = named_best(tmp_path)
    feature.on_start(TrainState(iteration=2))
    evaluate(feature, 3, 2.0)
    save(feature, tmp_path, 3)
    assert best(tmp_path) == ("global_step2", 2, 1.0)


PAIRS = {"train_impl": "orpo", "pos_train_data_paths": ["p"], "neg_train_data_paths": ["n"]}


def test_the_goal_is_what_the_metric_says() -> None:
    tasks = {"eval_tasks": ["lambada_openai"], "save": "runs/x"}
    for metric, goal in (("eval/lambada_openai_acc", "max"), ("eval/lambada_openai_perplexity", "min")):
        assert best_rule(small_plan(**tasks, save_best=metric)).goal == goal
    assert best_rule(small_plan(**tasks, save_best="eval/lambada_openai_acc", save_best_goal="min")).goal == "min"
    unknown = {**tasks, "save_best": "eval/lambada_openai_score"}
    with raises_naming(ConfigError, "save_best", "save_best_goal"):
        best_rule(small_plan(**unknown))
    (problem,) = save_best_problems(small_plan(**unknown))
    assert problem.keys[0] == "save_best"
    assert not save_best_problems(small_plan(**unknown, save_best_goal="max"))
    (problem,) = save_best_problems(small_plan(save="runs/x", save_best="validation/logps/chosen", **PAIRS))
    assert problem.keys[0] == "save_best"


def test_the_largest_value_may_be_the_best_and_a_wrong_name_ends_the_run(tmp_path: Path) -> None:
    feature = named_best(tmp_path, save_best_goal="max")
    for step, value in ((1, 0.5), (2, 0.7), (3, 0.6)):
        evaluate(feature, step, value)
        save(feature, tmp_path, step)
    assert (tmp_path / BEST).resolve().name == "global_step2"
    with pytest.raises(ConfigError, match=r"validation/lm_loss is no scalar.*validation/loss"):
        feature.on_evaluation(TrainState(iteration=4), "validation", {"validation/loss": 1.0, "timers/x": 1.0})


def test_metrics_that_can_never_decide_are_refused() -> None:
    def problems(**keys: object) -> list[str]:
        config = NeoXConfig.from_flat({**SMALL, "save": "x", "checkpoint_factor": 3, "train_iters": 10, **keys})
        return [str(problem) for problem in static_problems(config)]

    assert problems(save_best="validation/lm_loss", eval_interval=6) == []
    assert "eval_interval" in problems(save_best="validation/lm_loss", eval_interval=5)[0]
    assert "no scalar of evaluations" in problems(save_best="train/lm_loss", eval_interval=6)[0]
    assert "eval_tasks" in problems(save_best="eval/x_acc", eval_interval=6)[0]
    assert "eval_ema" in problems(save_best="validation_ema/lm_loss", eval_interval=6)[0]
    assert any("save_best" in problem for problem in problems(hf_export="best"))


@pytest.mark.parametrize(
    ("metric", "keys", "known"),
    [
        ("validation/loss", {}, "validation/lm_loss,"),
        ("validation/web/lm_loss", {}, "validation/lm_loss,"),
        ("validation/wbe/lm_loss", {"valid_data_paths": {"web": "w", "own": "o"}}, "validation/web/lm_loss"),
        ("validation/web/los", {"valid_data_paths": {"web": "w", "own": "o"}}, "validation/web/lm_loss"),
        ("validation/rewards/accuracy", DPO, "validation/rewards/accuracies"),
        ("validation/lm_loss", DPO, "validation/loss"),
        ("validation/lm_loss_bits", {}, "validation/lm_loss_bits_per_byte"),
        ("eval/needle_ac", {"eval_tasks": ["needle=n.svg"]}, "eval/needle_acc"),
        ("eval/lambada_ac", {"eval_tasks": ["lambada=/absent/x.jsonl"]}, "eval/lambada_acc"),
    ],
)
def test_misspelt_metrics_are_refused_before_a_run(metric: str, keys: dict[str, object], known: str) -> None:
    plan = small_plan(1, save="x", checkpoint_factor=3, eval_interval=3, train_iters=10, save_best=metric, **keys)
    (problem,) = save_best_problems(plan)
    assert problem.keys == ("save_best",)
    assert known in str(problem)


@pytest.mark.parametrize(
    ("metric", "keys"),
    [
        ("validation/lm_loss_bits_per_byte", {}),
        ("validation/web/lm_loss", {"valid_data_paths": {"web": "w"}}),
        ("validation/lm_loss", {"valid_data_paths": {"web": "w"}}),
        ("validation_ema/lm_loss", {"ema_decay": 0.9, "eval_ema": True}),
        ("validation/z_loss", {"lm_z_loss": 1e-4}),
        ("validation/rewards/margins", DPO),
        ("validation/moe_balance_loss", {"moe_num_experts": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.1}),
        ("eval/needle_acc", {"eval_tasks": ["needle=n.svg"]}),
        ("eval/needle_acc_64_50", {"eval_tasks": ["needle=n.svg"]}),
        ("eval/arc_easy_acc", {"eval_tasks": ["arc_easy"]}),  # the ranks know
    ],
)
def test_metrics_of_a_run_are_accepted(metric: str, keys: dict[str, object]) -> None:
    plan = small_plan(1, save="x", checkpoint_factor=3, eval_interval=3, train_iters=10, save_best=metric, **keys)
    assert save_best_problems(plan) == []


@pytest.mark.parametrize(
    ("metric", "lacking"),
    [
        ("validation/lm_loss", None),
        ("validation/web/lm_loss_bits_per_byte", None),
        ("validation/own/lm_loss_bits_per_byte", "own"),
        ("validation/lm_loss_bits_per_byte", "own"),
        ("validation/away/lm_loss_bits_per_byte", None),  # not on this machine: the ranks know
    ],
)
def test_bits_per_byte_need_data_that_know_their_bytes(tmp_path: Path, metric: str, lacking: str | None) -> None:
    for name, settings in (("web", {"document_bytes": 40}), ("own", {})):
        (tmp_path / f"{name}.idx").touch()
        write_sidecar(tmp_path / name, Sidecar("HFTokenizer", "abc", 50, 0, True, 3, 10, 49, settings=settings))
    sets = {name: str(tmp_path / name) for name in ("web", "own", "away")}
    plan = small_plan(save="x", train_data_paths=["t"], valid_data_paths=sets, save_best=metric)
    problems = save_best_problems(plan)
    assert len(problems) == (lacking is not None)
    for problem in problems:
        assert problem.keys == ("save_best",)
        assert sets[str(lacking)] in str(problem)
        assert sets["web"] not in str(problem)

    loaded = [EvaluationSet(None, "web", bytes_per_token=4.0), EvaluationSet(None, "own")]
    loaded.append(EvaluationSet(None, "away", bytes_per_token=1.0))
    with nullcontext() if lacking is None else pytest.raises(ConfigError, match="own"):
        NameBest(plan).on_data(None, DataIterators(None, tuple(loaded), ()))


@pytest.mark.parametrize(
    ("metric", "names", "split", "lacking"),
    [
        ("validation/web/lm_loss_bits_per_byte", ["web"], "9,1,0", False),
        ("validation/lm_loss_bits_per_byte", ["web"], "9,1,0", True),
        ("validation/lm_loss_bits_per_byte", ["web", "own"], "9,1,0", True),  # named once
        ("validation/lm_loss_bits_per_byte", ["web"], "9,0,1", False),  # no part of it is evaluated
        ("validation/own/lm_loss_bits_per_byte", ["web", "own"], "9,1,0", True),
    ],
)
def test_bits_per_byte_of_one_set_need_no_other(
    tmp_path: Path, metric: str, names: list[str], split: str, lacking: bool
) -> None:
    for name, settings in (("web", {"document_bytes": 40}), ("own", {})):
        (tmp_path / f"{name}.idx").touch()
        write_sidecar(tmp_path / name, Sidecar("HFTokenizer", "abc", 50, 0, True, 3, 10, 49, settings=settings))
    sets = {name: str(tmp_path / name) for name in names}
    own = str(tmp_path / "own")
    plan = small_plan(save="x", data_path=own, split=split, valid_data_paths=sets, save_best=metric)
    problems = save_best_problems(plan)
    assert len(problems) == lacking
    for problem in problems:
        assert str(problem).count(own) == 1


@pytest.mark.parametrize(("split", "has_documents"), [("1000000,1,0", False), ("90,10,0", True)])
def test_a_part_of_a_small_file_without_a_document_is_no_validation_data(
    tmp_path: Path, split: str, has_documents: bool
) -> None:
    (tmp_path / "web.idx").touch()
    write_sidecar(
        tmp_path / "web", Sidecar("HFTokenizer", "abc", 50, 0, True, 3, 10, 49, settings={"document_bytes": 40})
    )
    data = Path(__file__).parents[2] / "golden" / "data" / "small_text_document"  # whose sidecar has no bytes
    plan = small_plan(
        save="x",
        data_path=str(data),
        split=split,
        valid_data_paths={"web": str(tmp_path / "web")},
        save_best="validation/lm_loss_bits_per_byte",
    )
    plan = replace(plan, amounts=DataAmounts(validation_tokens=validation_tokens(plan.config)))
    assert bool(dict(plan.amounts.validation_tokens)[None]) == has_documents
    assert [str(data) in str(problem) for problem in save_best_problems(plan)] == [True] * has_documents
    assert ["a part of data_path" in line for line in validation_lines(plan)] == [True] * has_documents + [False]


def test_bytes_of_files_that_no_evaluation_reads_are_not_asked_for(tmp_path: Path) -> None:
    for name, settings in (("web", {"document_bytes": 40}), ("own", {})):
        (tmp_path / f"{name}.idx").touch()
        write_sidecar(tmp_path / name, Sidecar("HFTokenizer", "abc", 50, 0, True, 3, 10, 49, settings=settings))
    metric = "validation/lm_loss_bits_per_byte"
    web, own = str(tmp_path / "web"), str(tmp_path / "own")
    assert save_best_problems(small_plan(save="x", data_path=web, valid_data_paths=[own], save_best=metric)) == []
    assert len(save_best_problems(small_plan(save="x", data_path=own, valid_data_paths=[web], save_best=metric))) == 1


def test_a_score_of_a_task_that_does_not_list_it_is_left_to_the_first_evaluation(caplog) -> None:
    files = file_task_scalars([FileTask("lambada", "a[1].txt", "a[1]"), FileTask("needle", "n.svg", "n[2]")])
    scalars = TaskScalars([*files, "eval/arc_acc", "eval/all_*"], ["eval/arc_*"])
    for metric in (None, "validation/x", "eval/a[1]_acc", "eval/n[2]_acc_64_50", "eval/arc_acc", "eval/all_f1"):
        check_metric(metric, scalars)
    assert not caplog.records
    check_metric("eval/arc_f1", scalars)
    assert "eval/arc_f1" in caplog.text
    with pytest.raises(ConfigError, match="eval/b_acc"):
        check_metric("eval/b_acc", scalars)


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tool in place of the real one, which imports torch and transformers."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "convert_to_hf.py").write_text(TOOL)
    monkeypatch.setattr(hf_export, "scripts_root", lambda: tmp_path)
    return tmp_path / "run-hf"


def test_every_save_is_exported_and_a_failure_ends_nothing(tmp_path: Path, exported: Path) -> None:
    run = tmp_path / "run"
    feature = hf_export.HfExport(small_plan(save=str(run), hf_export="every save", hf_export_hub="me/model"))
    feature.on_start(TrainState())
    for step in (1, 2, 3):
        path = checkpoint(run, step)
        if step == 2:
            (path / "bad").touch()
        feature.on_save(TrainState(iteration=step), SaveReport(path, step, 0.0, 0.0))
    assert is_kept_from_deletion(run / "global_step3")
    feature.on_exit()
    assert {path.name for path in exported.iterdir()} == {"global_step1", "global_step2.export.log", "global_step3"}
    assert (exported / "global_step3" / "from").read_text() == "global_step3 step3"
    assert "this one is bad" in (exported / "global_step2.export.log").read_text()
    assert not is_kept_from_deletion(run / "global_step3")
    resumed = hf_export.HfExport(small_plan(save=str(run), hf_export="every save"))
    checkpoint(run, 4)
    resumed.on_start(TrainState(iteration=4))  # killed before its export
    resumed.on_exit()
    assert (exported / "global_step4").exists()


def test_the_best_one_is_exported_under_its_name(tmp_path: Path, exported: Path) -> None:
    run = tmp_path / "run"
    keys = {"save": str(run), "save_best": "validation/lm_loss", "hf_export": "best"}
    plan = small_plan(**keys)
    naming = NameBest(plan)
    exporting = hf_export.HfExport(plan)
    for step, value in ((1, 3.0), (2, 4.0), (3, 2.0)):
        state = TrainState(iteration=step)
        report = SaveReport(checkpoint(run, step), step, 0.0, 0.0)
        scalars = {"validation/lm_loss": value}
        for feature in (naming, exporting):
            feature.on_evaluation(state, "validation", scalars)
        for feature in (naming, exporting):
            feature.on_save(state, report)
        time.sleep(0.01)
    exporting.on_exit()
    assert {path.name for path in exported.iterdir()} == {BEST, "best.json"}
    assert (exported / BEST / "from").read_text().split() == ["global_step3"]


@pytest.mark.parametrize("keys", [{}, {"hf_export_hub": "me/model"}], ids=["directory", "hub"])
def test_the_next_export_is_that_of_the_best_one_by_then(tmp_path: Path, exported: Path, keys: dict[str, str]) -> None:
    """Others in between are not exported, unless a repository gets a revision of each."""
    run = tmp_path / "run"
    plan = small_plan(save=str(run), save_best="validation/lm_loss", hf_export="best", **keys)
    naming = NameBest(plan)
    exporting = hf_export.HfExport(plan)
    for step in (1, 2, 3):
        scalars = {"validation/lm_loss": 4.0 - step}
        report = SaveReport(checkpoint(run, step), step, 0.0, 0.0)
        for feature in (naming, exporting):
            feature.on_evaluation(TrainState(iteration=step), "validation", scalars)
            feature.on_save(TrainState(iteration=step), report)
    kept = [is_kept_from_deletion(run / f"global_step{step}") for step in (1, 2, 3)]
    assert kept == [True, bool(keys), True]
    exporting.on_exit()
    assert (exported / BEST / "from").read_text().split()[0] == "global_step3"


def test_a_best_that_was_named_right_before_a_kill_is_exported_afterwards(tmp_path: Path, exported: Path) -> None:
    run = tmp_path / "run"
    plan = small_plan(save=str(run), save_best="validation/lm_loss", hf_export="best")
    naming = NameBest(plan)
    exporting = hf_export.HfExport(plan)
    for step in (1, 2):
        evaluate(naming, step, 4.0 - step)
        save(naming, run, step)
        if step == 1:
            exporting.on_start(TrainState(iteration=1))
            exporting.on_exit()
    assert (exported / BEST / "from").read_text().split()[0] == "global_step1"
    for _ in range(2):
        resumed = hf_export.HfExport(plan)
        resumed.on_start(TrainState(iteration=2))
        resumed.on_exit()
        assert (exported / BEST / "from").read_text().split()[0] == "global_step2"
        (exported / BEST / "from").write_text("global_step2 untouched")
    assert (exported / BEST / "from").read_text() == "global_step2 untouched"


def test_an_evaluation_without_labels_names_no_checkpoint(tmp_path: Path) -> None:
    feature = named_best(tmp_path)
    save(feature, tmp_path, 2)
    feature.on_evaluation(TrainState(iteration=2), "validation", {"validation/lm_loss": None})
    assert read_best(tmp_path) is None
