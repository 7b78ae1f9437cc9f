"""metrics.jsonl and the picture made from it."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest

from neox.engine import SaveReport, StepReport, StepResult, TrainState
from neox.errors import DataError, TrainingError
from neox.features.trackers.metrics_file import MetricsFile
from neox.metrics import (
    METRICS_FILE,
    curves,
    draw,
    ends_finite,
    goal_of,
    places_of,
    read_metrics,
    smoothed,
    task_curves,
    trained,
)


def report(loss=2.5, norm=1.25):
    result = StepResult({"lm_loss": loss}, grad_norm=norm, loss_scale=1.0, lr=1e-3, update_skipped=False)
    return StepReport(result, seconds=0.5, samples=8, seq_length=256, flops=5e11)


def test_a_name_says_whether_larger_values_are_better() -> None:
    """Reported as transformers PR 31142: the worst model was kept. Right: the registry of lm-evaluation-harness."""
    pytest.importorskip("lm_eval")
    import lm_eval.api.metrics  # noqa: F401  registers them
    from lm_eval.api.registry import is_higher_better

    names = "brier_score acc acc_norm acc_mutual_info acc_bytes acc_all exact_match perplexity likelihood"
    names += " word_perplexity byte_perplexity bits_per_byte mcc f1 bleu chrf ter"
    for name in names.split():
        assert goal_of(f"eval/some_task_{name}") == ("max" if is_higher_better(name) else "min"), name
    assert goal_of("eval/gsm8k_exact_match_strict-match") == "max"
    # `higher_is_better: false` in the harness's crows_pairs
    assert goal_of("eval/crows_pairs_english_likelihood_diff") == "min"
    assert goal_of("eval/needle_acc_1024_50") == "max"
    assert goal_of("validation/web/lm_loss_char_ppl") == "min"
    assert goal_of("validation/rewards/accuracies") == "max"
    assert goal_of("eval/loss_of_acc_lambada_ppl") == "min"
    assert goal_of("validation/logps/chosen") is goal_of("validation/kl") is goal_of("eval/lossy") is None


def test_a_line_a_step_with_known_names_unrounded(tmp_path):
    metrics = MetricsFile(tmp_path / "logs")
    loss = 2.123456789012345
    metrics.on_step(TrainState(iteration=1), report(loss))
    metrics.on_evaluation(TrainState(iteration=1), "validation", {"validation/lm_loss": 3.0})
    first, second = read_metrics(metrics.path)
    assert first["iteration"] == 1
    assert first["train/lm_loss"] == loss
    assert {"train/learning_rate", "train/loss_scale", "runtime/samples_per_sec", "runtime/iteration_time"} <= set(
        first
    )
    assert second == {"iteration": 1, "kind": "validation", "validation/lm_loss": 3.0}


def test_each_iteration_has_one_row_of_kind_step(tmp_path):
    metrics = MetricsFile(tmp_path)
    for iteration in (1, 2):
        metrics.on_step(TrainState(iteration=iteration), report())
        metrics.on_evaluation(TrainState(iteration=iteration), "tasks", {"eval/x_acc": 0.5})
        metrics.on_save(TrainState(iteration=iteration), SaveReport(tmp_path, iteration, 1.0, 1.0))
    rows = [(row["iteration"], row["kind"]) for row in read_metrics(metrics.path)]
    assert rows == [(i, kind) for i in (1, 2) for kind in ("step", "tasks", "save")]


def run(directory, losses):
    """A run's files: the losses by iteration, from the one before the first."""
    metrics = MetricsFile(directory)
    metrics.on_start(TrainState(iteration=min(losses) - 1))
    for iteration, loss in losses.items():
        metrics.on_step(TrainState(iteration=iteration), report(loss))
    metrics.on_end(TrainState())


def test_resume_appends_and_the_later_line_wins(tmp_path):
    for losses in ({1: 4.0, 2: 3.0, 3: 2.0}, {3: 2.5, 4: 1.5}):
        run(tmp_path, losses)
    assert curves(tmp_path / "metrics.jsonl") == {"train/lm_loss": {1: 4.0, 2: 3.0, 3: 2.5, 4: 1.5}}


def test_resume_from_an_earlier_checkpoint_drops_what_came_after_it(tmp_path):
    for losses in ({1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}, {2: 3.5, 3: 2.5}):
        run(tmp_path, losses)
    assert curves(tmp_path / "metrics.jsonl") == {"train/lm_loss": {1: 4.0, 2: 3.5, 3: 2.5}}


def test_the_trained_loss_is_the_first_whatever_its_name(tmp_path):
    rows = [
        {"iteration": 1, "kind": "step", "train/loss": 4.0, "train/lm_loss": 3.0, "train/grad_norm": 1.0},
        {"iteration": 1, "kind": "validation", "validation/loss": 5.0, "validation/lm_loss": 3.5, "timers/x": 1.0},
        {"iteration": 1, "kind": "tasks", "eval/x_acc": 0.5},
        {"iteration": 1, "kind": "save", "runtime/save_stall": 0.5},
        {"iteration": 2, "kind": "step", "train/loss": 3.5},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert curves(file) == {"train/loss": {1: 4.0, 2: 3.5}, "validation/loss": {1: 5.0}}


def test_the_picture_has_a_line_for_each_validation_set(tmp_path):
    file = tmp_path / "metrics.jsonl"
    scores = {
        "validation/loss": 4.0,
        "validation/loss_ppl": 54.6,
        "validation/a/loss": 3.0,
        "validation/a/loss_ppl": 20.0,
    }
    rows = [{"iteration": i, "kind": "validation", **scores, "validation/b/loss": 5.0} for i in (1, 2)]
    averaged = {name.replace("validation/", "validation_ema/"): value for name, value in scores.items()}
    rows.append({"iteration": 2, "kind": "validation_ema", **averaged})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {name: points[2] for name, points in curves(file).items()} == {
        "validation_ema/loss": 4.0,
        "validation_ema/a/loss": 3.0,
        "validation/loss": 4.0,
        "validation/a/loss": 3.0,
        "validation/b/loss": 5.0,
    }
    assert draw({"": file}, tmp_path / "loss.png")


def test_the_legend_says_how_many_tokens_a_point_is_of(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    row = {"validation/loss": 4.0, "validation/a/loss": 3.0, "validation/tokens": 4096.0, "validation/a/tokens": 2048.0}
    file.write_text("".join(json.dumps({"iteration": i, "kind": "validation", **row}) + "\n" for i in (1, 2)))
    labels = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.legend", lambda self, **style: labels.extend(self.get_legend_handles_labels()[1])
    )
    assert draw({"": file}, tmp_path / "loss.png")
    assert [("4,096" in label, "2,048" in label) for label in labels] == [(True, False), (False, True)]


def test_files_of_version_0_1_have_no_kinds(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [{"iteration": i, "train/lm_loss": loss, "train/learning_rate": 0.1} for i, loss in ((1, 4.0), (2, 3.0))]
    rows.insert(1, {"iteration": 1, "validation/lm_loss": 3.5, "validation/lm_loss_ppl": 33.0})
    rows.append({"iteration": 2, "train/lm_loss": 2.5})  # trained again
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert curves(file) == {"train/lm_loss": {1: 4.0, 2: 2.5}, "validation/lm_loss": {1: 3.5}}


def test_a_fresh_start_begins_a_new_file_and_keeps_the_old_ones(tmp_path):
    for losses in ({1: 4.0, 2: 3.0}, {1: 3.9}, {1: 3.8}):
        run(tmp_path, losses)
    kept = {name: curves(tmp_path / name)["train/lm_loss"] for name in ("metrics-1.jsonl", "metrics-2.jsonl")}
    assert kept == {"metrics-1.jsonl": {1: 4.0, 2: 3.0}, "metrics-2.jsonl": {1: 3.9}}
    assert curves(tmp_path / "metrics.jsonl") == {"train/lm_loss": {1: 3.8}}
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["loss-1.png", "loss-2.png", "loss.png"]


def test_values_that_are_not_finite_stay_json(tmp_path):
    metrics = MetricsFile(tmp_path)
    metrics.on_step(TrainState(iteration=1), report(math.nan, math.inf))
    line = json.loads(metrics.path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (line["train/lm_loss"], line["train/grad_norm"]) == ("nan", "inf")
    assert curves(metrics.path) == {}


def test_a_line_that_was_cut_off_is_left_out_and_written_anew(tmp_path):
    metrics = MetricsFile(tmp_path)
    metrics.on_step(TrainState(iteration=1), report())
    with open(metrics.path, "a") as stream:
        stream.write('{"iteration": 2, "train/lm')
    again = MetricsFile(tmp_path)
    again.on_start(TrainState(iteration=1))
    again.on_step(TrainState(iteration=2), report())
    assert [line["iteration"] for line in read_metrics(metrics.path)] == [1, 2]


def test_picture(tmp_path):
    metrics = MetricsFile(tmp_path)
    for iteration in range(1, 4):
        metrics.on_step(TrainState(iteration=iteration), report(4.0 / iteration))
    metrics.on_end(TrainState(iteration=3))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError) as refused:
        MetricsFile(tmp_path / "file" / "logs")
    assert "log_dir" in str(refused.value)


def test_several_runs_in_one_picture(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    for name in ("a", "b"):
        run(tmp_path / name / "logs", {1: 4.0, 2: 3.0})
    script = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "plot_runs.py"))
    files = {name: script["metrics_file"](str(tmp_path / name)) for name in ("a", "b")}
    assert draw(files, tmp_path / "both.png", ["train/grad_norm", "train/lm_loss"])
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert not draw(files, tmp_path / "none.png", ["no/such"])
    monkeypatch.setattr(sys, "argv", ["plot_runs", str(tmp_path / "a"), "--metric", "no/such", "--output", "no.png"])
    with pytest.raises(DataError, match="train/grad_norm"):
        script["main"]()
    (tmp_path / "a" / "more").mkdir()
    (tmp_path / "a" / "more" / "metrics.jsonl").touch()
    for several_or_none in (tmp_path / "a", tmp_path / "none"):
        with pytest.raises(DataError):
            script["metrics_file"](str(several_or_none))


def test_a_picture_of_a_long_run_has_tokens_and_a_smoothed_line(tmp_path):
    file = tmp_path / METRICS_FILE
    with file.open("w") as stream:
        for iteration in range(2, 122, 2):
            row = {"iteration": iteration, "kind": "step", "train/lm_loss": 2.0 + iteration % 4}
            batch = 4.0 if iteration <= 60 else 8.0
            stream.write(json.dumps({**row, "train/batch_size": batch, "train/seq_length": 16.0}) + "\n")
    iterations, tokens = trained(file, "tokens")
    assert (iterations[0], iterations[-1]) == (0, 120)
    assert (tokens[0], tokens[30], tokens[-1]) == (0, 60 * 4 * 16, 60 * 4 * 16 + 60 * 8 * 16)
    assert draw({"run": file}, tmp_path / "loss.png")


def test_curves_against_tokens_and_seconds(tmp_path):
    file = tmp_path / METRICS_FILE
    rows = []
    for step, batch in ((1, 4.0), (2, 4.0), (3, 8.0)):
        row = {"iteration": step, "kind": "step", "train/lm_loss": 2.0, "train/batch_size": batch}
        rows.append({**row, "train/seq_length": 16.0, "runtime/iteration_time": 0.5})
    rows.append({"iteration": 3, "kind": "validation", "validation/lm_loss": 2.5})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert places_of(file, [1, 3], "tokens") == [64, 256]
    assert places_of(file, [2, 3], "seconds") == [1.0, 1.5]
    for against in ("tokens", "seconds"):
        assert draw({"run": file}, tmp_path / f"{against}.png", against=against)
    file.write_text("".join(json.dumps({"iteration": 1, "kind": "step", "train/lm_loss": 2.0}) + "\n"))
    assert trained(file, "seconds") == ([], [])
    assert not draw({"run": file}, tmp_path / "none.png", against="tokens")


def test_tasks_have_a_panel_with_standard_errors(tmp_path):
    file = tmp_path / METRICS_FILE
    rows = [{"iteration": step, "kind": "step", "train/lm_loss": 2.0} for step in (1, 2)]
    scores = {"eval/arc_acc": 0.5, "eval/arc_acc_stderr": 0.1, "eval/w_word_ppl": 20.0, "eval/w_word_ppl_stderr": 1.0}
    rows.append({"iteration": 2, "kind": "tasks", **scores, "eval/no_error_acc": 0.25})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert task_curves(file) == {"eval/arc_acc": {2: (0.5, 0.1)}}
    heights = []
    for names in ([], ["train/lm_loss"]):
        assert draw({"run": file}, tmp_path / "loss.png", names)
        heights.append(int.from_bytes((tmp_path / "loss.png").read_bytes()[20:24]))  # of the PNG's header
    assert heights[0] > heights[1]


def test_scores_of_steps_that_were_trained_again_do_not_count(tmp_path: Path) -> None:
    """Reported as tango#152 and wandb#6728: a run dies after a score and resumes before it."""
    file = tmp_path / METRICS_FILE
    rows = []
    for steps, evaluated in ((range(1, 7), {2: 0.1, 6: 0.9}), (range(5, 8), {7: 0.2})):
        for step in steps:
            rows.append({"iteration": step, "kind": "step", "train/lm_loss": 1.0})
            if step in evaluated:
                score = {"eval/arc_acc": evaluated[step], "eval/arc_acc_stderr": 0.1}
                rows.append({"iteration": step, "kind": "tasks", **score})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert task_curves(file) == {"eval/arc_acc": {2: (0.1, 0.1), 7: (0.2, 0.1)}}
    assert curves(file, ["eval/arc_acc"]) == {"eval/arc_acc": {2: 0.1, 7: 0.2}}


def test_smoothing_keeps_ends_and_mean():
    values = [float(position % 2) for position in range(100)]
    found = smoothed(values)
    assert [found[0], found[-1]] == [values[0], values[-1]]
    line = [10.0 - 0.01 * position for position in range(900)]
    assert smoothed(line) == pytest.approx(line)
    assert len(found) == 100
    assert max(found[10:-10]) - min(found[10:-10]) < 0.5
    assert smoothed([3.0] * 60) == [3.0] * 60


def test_a_step_without_labels_has_no_number(tmp_path):
    """Reported as trl issue 6668: such a step was logged with loss 0.0. Right: no number, which readers leave out."""
    run(tmp_path, {1: 4.0, 2: None, 3: 2.0})
    path = tmp_path / "metrics.jsonl"
    rows = [row for row in read_metrics(path) if row["kind"] == "step"]
    assert [row["train/lm_loss"] for row in rows] == [4.0, None, 2.0]
    assert curves(path)["train/lm_loss"] == {1: 4.0, 3: 2.0}
    assert "train/learning_rate" not in curves(path), "the trained loss is still the first scalar"
    assert ends_finite(path, "train/lm_loss")
    run(tmp_path, {1: 4.0, 2: math.nan, 3: None})
    assert not ends_finite(path, "train/lm_loss")


def test_a_disk_that_is_full_at_the_end_ends_no_training(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("neox.features.trackers.metrics_file.draw", full)
    run(tmp_path, {1: 4.0})
    assert "No space left" in caplog.text
