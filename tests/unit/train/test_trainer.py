"""The loop with an engine that computes nothing: when it evaluates, saves, and ends."""

import math
import os
import signal
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from neox.data.run_data import DataIterators, EvaluationSet
from neox.engine import EvaluationResult, Feature, StepResult
from neox.errors import CheckpointError, TrainingError
from neox.evaluation.evaluation_scalars import evaluation_scalars
from neox.features.bits_per_byte.run import BitsPerByte
from neox.features.ledger.run import Ledger
from neox.launch.agent.agent_files import PROGRESS_VARIABLE, RankActivity
from neox.objectives import CausalLM, ScoreTable
from neox.parallel import ParallelGrid
from neox.train import Trainer
from tests.plans import small_plan


def evaluated(objective, *means, count=1.0):
    """The result of micro batches with these means."""
    rows = torch.tensor([[mean * count, count] for mean in means], dtype=torch.float64)
    return EvaluationResult(ScoreTable(objective), rows)


def labels(number=1):
    """Endless batches of some labels."""
    while True:
        yield {"loss_mask": torch.ones(1, number)}


class IdleEngine:
    """Counts instead of training. at: what to do when a training step or an evaluation batch comes to this number."""

    def __init__(self, iteration=0, at_step=None, at_evaluation=None, score=3.0):
        self.iteration, self.evaluated, self.score = iteration, 0, score
        self.features = ()
        self.objective = CausalLM()
        self.grid = ParallelGrid.single()
        self.at_step, self.at_evaluation = at_step or {}, at_evaluation or {}

    def train_batch(self, batches):
        next(batches)
        self.iteration += 1
        self.at_step.get(self.iteration, lambda: None)()
        return StepResult({"lm_loss": 2.0}, grad_norm=1.0, loss_scale=1.0, lr=1e-3, update_skipped=False)

    def eval_batch(self, batches, count):
        next(batches)
        self.evaluated += 1
        self.at_evaluation.get(self.evaluated, lambda: None)()
        return evaluated(self.objective, self.score)

    def any_rank(self, flag):
        return flag

    def gather(self, value):
        return [value]


def losses_of_batches(batches, count):
    """An evaluation whose loss each batch carries; that of the test set has none."""
    return evaluated(CausalLM(), next(batches).get("loss", 0.0), count=2.0)


class Diary(Feature):
    """What happened, in order."""

    def __init__(self):
        self.lines, self.taken = [], []

    def on_start(self, state):
        self.lines.append("start")

    def on_evaluation(self, state, name, scalars):
        self.lines.append(f"{name} {state.iteration}")
        self.scalars = scalars
        if name == "validation":
            self.validation = scalars

    def on_step(self, state, report):
        self.report = report
        self.taken.append((report.samples, report.seq_length))

    def on_save(self, state, path):
        self.lines.append(f"save {state.iteration}")

    def on_end(self, state):
        self.lines.append("end")

    def on_failure(self, state):
        self.lines.append("failure")


@pytest.fixture
def fit(monkeypatch, tmp_path):
    """Fit an engine; return (exit code, diary)."""
    monkeypatch.setattr("neox.train.trainer.save_checkpoint", lambda engine, save: save / str(engine.iteration))

    def run(engine, callbacks=(), sets=(), **keys):
        flat = {
            "train_iters": 6,
            "eval_interval": 2,
            "eval_iters": 2,
            "save": str(tmp_path),
            "checkpoint_factor": 4,
            **keys,
        }
        diary = Diary()
        valid = sets or (EvaluationSet(labels()),)
        data = DataIterators(iter(range(1000)), valid, (EvaluationSet(labels()),))
        return Trainer(small_plan(**flat), engine, data, more=[*callbacks, diary]).fit(), diary

    return run


def interrupt(signum=signal.SIGTERM):
    return lambda: os.kill(os.getpid(), signum)


def test_a_whole_run_evaluates_and_saves_each_once(fit):
    code, diary = fit(IdleEngine())
    assert code == 0
    assert diary.lines == [
        *("start", "validation 2", "validation 4", "save 4", "validation 6", "save 6", "test 6", "end"),
    ]
    assert {"test/lm_loss", "test/lm_loss_ppl", "test/tokens", "timers/test"} == set(diary.scalars)
    assert diary.scalars["test/lm_loss_ppl"] == pytest.approx(math.exp(3.0))
    assert 0.0 <= diary.report.reading <= diary.report.seconds


def test_each_set_has_its_scores_and_the_first_are_the_weighted_means(fit):
    def batches(loss):
        return iter([{"loss_mask": torch.ones(1, 4), "loss": loss}] * 100)

    sets = [EvaluationSet(batches(1.0), "a", 1.0), EvaluationSet(batches(5.0), "b", 3.0)]
    engine = IdleEngine()
    engine.eval_batch = losses_of_batches
    _, diary = fit(engine, sets=sets)
    scores = {name: value for name, value in diary.validation.items() if not name.startswith("timers/")}
    assert scores == {
        "validation/lm_loss": 4.0,
        "validation/lm_loss_ppl": pytest.approx(math.exp(4.0)),
        "validation/a/lm_loss": 1.0,
        "validation/a/lm_loss_ppl": pytest.approx(math.exp(1.0)),
        "validation/b/lm_loss": 5.0,
        "validation/b/lm_loss_ppl": pytest.approx(math.exp(5.0)),
        **{"validation/tokens": 16.0, "validation/a/tokens": 8.0, "validation/b/tokens": 8.0},
    }
    assert next(iter(diary.validation)) == "validation/lm_loss", "readers take the first for the trained loss"


def test_the_start_is_evaluated_once_if_asked_for(fit):
    _, diary = fit(IdleEngine(), eval_at_start=True, eval_interval=100)
    assert diary.lines == ["start", "validation 0", "save 4", "save 6", "validation 6", "test 6", "end"]
    _, diary = fit(IdleEngine(iteration=4), eval_at_start=True, eval_interval=100)
    assert diary.lines == ["start", "save 6", "validation 6", "test 6", "end"]


class Ranking:
    """An objective whose loss is not in nats per token."""

    label_mask = "loss_mask"
    names = ("ranking_loss", "accuracy", "token_loss")
    per_token = ("token_loss",)
    reductions: ClassVar[dict[str, str]] = {}


def test_no_score_has_a_special_name(fit):
    engine = IdleEngine()
    engine.objective = Ranking()
    engine.eval_batch = lambda batches, count: evaluated(Ranking(), 1.0, 0.5, 2.0)
    _, diary = fit(engine)
    names = (*Ranking.names, "token_loss_ppl", "tokens")
    assert set(diary.scalars) == {*(f"test/{name}" for name in names), "timers/test"}
    assert next(iter(diary.scalars)) == "test/ranking_loss", "readers take the first for the trained loss"


class Counter(Feature):
    """Adds numbers of its own."""

    def evaluation_numbers(self, state, name):
        return {f"{name}/evaluated_at": float(state.iteration)}


def test_callbacks_add_numbers_to_what_others_report(fit):
    _, diary = fit(IdleEngine(), callbacks=[Counter()])
    assert diary.scalars["test/evaluated_at"] == 6.0


def test_a_save_that_fails_is_tried_again(monkeypatch, tmp_path):
    tries = []

    def save(engine, directory):
        tries.append(engine.iteration)
        if len(tries) == 1:
            raise CheckpointError("full")
        return directory

    monkeypatch.setattr("neox.train.trainer.save_checkpoint", save)
    plan = small_plan(save=str(tmp_path))
    trainer = Trainer(plan, IdleEngine(iteration=3), DataIterators(iter(()), (), ()))
    with pytest.raises(CheckpointError):
        trainer.save()
    trainer.save()
    trainer.save()
    assert tries == [3, 3]


def test_perplexities_of_untrained_networks_are_finite(fit):
    _, diary = fit(IdleEngine(score=1000.0))
    assert math.isfinite(diary.scalars["test/lm_loss_ppl"])


def test_steps_report_what_they_took(fit):
    growth = {"difficulty": [4, 16], "max_step": [4]}
    lengths = {"enabled": True, "min_difficulty": 4, "max_difficulty": 16, "schedule_type": "fixed_discrete"}
    keys = {"train_batch_size": 6, "rampup_batch_size": [2, 2, 8]}
    _, diary = fit(IdleEngine(), **keys, curriculum_learning={**lengths, "schedule_config": growth})
    assert diary.taken == [(2, 4), (2, 4), (4, 4), (6, 4), (6, 16), (6, 16)]
    report = diary.report
    assert report.samples_per_second * report.seconds == pytest.approx(6)
    assert report.tokens_per_second * report.seconds == pytest.approx(96)


@pytest.mark.parametrize(
    ("read", "words"), [(12, "2 samples are skipped"), (14, None), (15, "1 samples are read again")]
)
def test_a_resume_with_another_batch_says_what_it_reads(caplog, read, words):
    counters = SimpleNamespace(global_samples=read)
    plan = small_plan(rampup_batch_size=[2, 2, 8], train_batch_size=6)
    Ledger().opening_data(SimpleNamespace(iteration=4, deepspeed_engine=counters, plan=plan))
    messages = [record.getMessage() for record in caplog.records]
    assert not messages if words is None else words in messages[0]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_after_the_step(fit, signum, code):
    assert fit(IdleEngine(at_step={3: interrupt(signum)}))[0] == code
    assert fit(IdleEngine(at_step={3: interrupt(signum)}))[1].lines == ["start", "validation 2", "save 3", "end"]


def test_a_signal_cuts_an_evaluation_off(fit):
    _, diary = fit(IdleEngine(at_evaluation={1: interrupt()}), eval_iters=50)
    assert diary.lines == ["start", "save 2", "end"]
    engine = IdleEngine(at_evaluation={151: interrupt()})  # the first batch of the test
    _, diary = fit(engine, eval_iters=50)
    assert diary.lines[-3:] == ["validation 6", "save 6", "end"]
    assert engine.evaluated == 151


def test_a_rank_that_saves_need_not_answer_a_signal_yet(fit, monkeypatch, tmp_path):
    progress = RankActivity(tmp_path / "progress", tmp_path)
    monkeypatch.setenv(PROGRESS_VARIABLE, str(progress.file))
    monkeypatch.setenv("RANK", "0")
    answered = []
    monkeypatch.setattr("neox.train.trainer.save_checkpoint", lambda *_: answered.append(progress.has_answered(0)))
    fit(IdleEngine(at_step={5: lambda: answered.append(progress.has_answered(0))}))
    assert answered == [True, False, True]  # the saves after steps 4 and 6


def test_exit_interval_saves_and_ends(fit):
    code, diary = fit(IdleEngine(), exit_interval=5)
    assert code == 0
    assert diary.lines[-3:] == ["save 4", "save 5", "end"]
    _, diary = fit(IdleEngine(iteration=5), exit_interval=5)
    assert diary.lines == ["start", "validation 6", "save 6", "test 6", "end"]


@pytest.mark.parametrize("iteration", [6, 9])
def test_a_finished_run_only_evaluates(fit, iteration):
    _, diary = fit(IdleEngine(iteration=iteration))
    assert diary.lines == ["start", f"validation {iteration}", f"test {iteration}", "end"]


def test_an_error_ends_what_watches(fit):
    def fail():
        raise TrainingError("no")

    diaries = []
    engine = IdleEngine(at_step={3: fail})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Diary, "on_failure", lambda self, state: diaries.append((state.iteration, self.lines)))
        with pytest.raises(TrainingError):
            fit(engine)
    assert diaries == [(2, ["start", "validation 2"])]


def test_perplexity_per_character_of_several_sets_is_that_of_their_joined_text():
    """100 tokens of 500 characters with 300 nats, and 700 tokens of 1,000 characters with 700 nats."""
    sets = [EvaluationSet(iter(()), "a"), EvaluationSet(iter(()), "b")]
    scores = [{"lm_loss": 3.0}, {"lm_loss": 1.0}]
    found = evaluation_scalars("validation", sets, scores, ["lm_loss"], [100, 700], [0.2, 0.7])
    assert found["validation/a/lm_loss_char_ppl"] == pytest.approx(math.exp(0.6))
    assert found["validation/b/lm_loss_char_ppl"] == pytest.approx(math.exp(0.7))
    assert found["validation/lm_loss_char_ppl"] == pytest.approx(math.exp((300 + 700) / (500 + 1000)))


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_bits_of_joined_sets_are_those_of_their_labels_and_not_of_padding(fit, weight):
    """2 of 16 labels in each row with 8 bits over 8 bytes a token, and 16 of 16 with 1 bit over 2 bytes."""

    def batches(labels, bits):
        mask = torch.zeros(4, 16)
        mask[:, :labels] = weight
        return iter([{"loss_mask": mask, "loss": bits * math.log(2)}] * 100)

    sets = [
        EvaluationSet(batches(2, 8.0), "short", bytes_per_token=8.0),
        EvaluationSet(batches(16, 1.0), "long", bytes_per_token=2.0),
    ]
    engine = IdleEngine()
    engine.eval_batch = losses_of_batches
    _, diary = fit(engine, sets=sets)
    expected = (2 * 8 + 16 * 1) / (2 * 8 + 16 * 2)
    assert diary.validation["validation/lm_loss_bits_per_byte"] == pytest.approx(expected)
    assert diary.validation["validation/tokens"] == 2 * 4 * (2 + 16), "two steps of four rows of each set"
    assert diary.validation["validation/short/tokens"] == 2 * 4 * 2


def test_losses_have_their_bits_per_byte_if_the_data_know_their_bytes():
    """Bits of text that takes 4 bytes a token, and 2 in the other set, which counts three times."""
    sets = [EvaluationSet(None, "a", 1.0, None, 4.0), EvaluationSet(None, "b", 3.0, None, 2.0)]
    scores = [{"lm_loss": 4 * math.log(2)}, {"lm_loss": 6 * math.log(2)}]
    found = evaluation_scalars("validation", sets, scores, ("lm_loss",), [5, 5])
    assert found["validation/a/lm_loss_bits_per_byte"] == pytest.approx(1.0)
    assert found["validation/lm_loss_bits_per_byte"] == pytest.approx((4 + 3 * 6) / (4 + 3 * 2))
    unknown = evaluation_scalars("validation", [sets[0], EvaluationSet(None, "b")], scores, ("lm_loss",), [5, 5])
    assert [name for name in unknown if "bits" in name] == ["validation/a/lm_loss_bits_per_byte"]
    # 3.5 nats of 2 tokens of 9 bytes, and 2.25 nats of 5 tokens of 2 bytes: lm-eval sums both, then divides.
    whole = [EvaluationSet(None, bytes_per_token=9 / 2), EvaluationSet(None, bytes_per_token=2 / 5)]
    losses = [{"lm_loss": 3.5 / 2}, {"lm_loss": 2.25 / 5}]
    joined = evaluation_scalars("validation", whole, losses, ("lm_loss",), [2, 5])
    assert joined["validation/lm_loss_bits_per_byte"] == pytest.approx((3.5 + 2.25) / (9 + 2) / math.log(2))
    observer = BitsPerByte()
    result = StepResult({"lm_loss": 4 * math.log(2)}, grad_norm=1.0, loss_scale=1.0, lr=1e-3, update_skipped=False)
    assert observer.after_step(IdleEngine(), result) == {}
    observer.on_data(IdleEngine(), DataIterators(None, (), (), None, 4.0))
    assert observer.after_step(IdleEngine(), result) == {"train/lm_loss_bits_per_byte": pytest.approx(1.0)}
