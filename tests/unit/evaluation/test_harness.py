"""lm-evaluation-harness on our model: a local task of each kind of request, equal to the harness's own model class."""

from pathlib import Path

import pytest
import torch

from neox.convert import to_hf
from neox.errors import ConfigError, EvaluationError
from neox.evaluation.evaluate import evaluate_tasks
from neox.evaluation.harness import (
    check_names,
    full_windows,
    harness_scalars,
    harness_tasks,
    open_tasks,
    sampling_params,
)
from neox.evaluation.results import flat_metrics
from neox.evaluation.scoring import Scorer
from neox.generation.load import load_model
from neox.generation.request import SamplingParams
from neox.generation.startup import one_process
from neox.parallel import ParallelGrid
from neox.plan import config_from_files, resolve
from neox.tokenizer import build_tokenizer
from tests.errors import raises_naming
from tests.unit.evaluation.local_tasks import write_tasks

pytest.importorskip("lm_eval", reason="lm-eval (requirements/requirements-eval.txt) is not installed")

GOLDEN = Path(__file__).parents[2] / "golden"
NAME = "v2_pp2_mp2_dp1_fp32"
TOKENIZER_FILE = GOLDEN / "data" / "tokenizer.json"


@pytest.fixture(scope="module")
def scoring():
    tokenizer = build_tokenizer("HFTokenizer", TOKENIZER_FILE)
    config = one_process(config_from_files([GOLDEN / NAME / f"{NAME}.yml"]))
    plan = resolve(config, 1, tokenizer.vocab_size)
    model = load_model(plan, GOLDEN / NAME / "global_step30", ParallelGrid.single(), torch.device("cpu"))
    return Scorer(model, tokenizer, ParallelGrid.single(), 128)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_every_kind_of_request_scores_as_the_harnesss_own_model_does(scoring, tasks, tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="the harness's own model class needs accelerate")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    ours = {result.task: result for result in harness_tasks(tasks, open_tasks(tasks), scoring)}
    reported = {name for name in flat_metrics(list(ours.values())) if not name.endswith("_stderr")}
    scalars = harness_scalars(tasks, open_tasks(tasks))
    assert set(scalars.known) == reported  # before the tasks are scored
    assert scalars.possible == ["eval/local_choice_*", "eval/local_rolling_*", "eval/local_until_*"]
    to_hf(
        GOLDEN / NAME / "global_step30",
        config_from_files([GOLDEN / NAME / f"{NAME}.yml"]),
        tmp_path / "hf",
        tokenizer_file=TOKENIZER_FILE,
        verify=False,
    )
    theirs = simple_evaluate(
        model=HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=2),
        tasks=tasks,
        log_samples=False,
    )["results"]
    assert set(ours) == set(theirs) == {"local_choice", "local_rolling", "local_until"}
    for task, metrics in theirs.items():
        for name in ("acc", "acc_stderr", "acc_norm", "word_perplexity", "byte_perplexity", "exact_match"):
            if f"{name},none" in metrics:
                assert ours[task].metrics[name] == pytest.approx(metrics[f"{name},none"], rel=1e-4), (task, name)
        assert ours[task].counts == {"examples": 3}
        assert ours[task].settings == {"num_fewshot": 0, "version": 2.5 if task == "local_choice" else "Yaml"}
        assert set(ours[task].record["results"]) == set(metrics)
    assert "acc_stderr" in ours["local_choice"].metrics
    assert ours["local_rolling"].metrics["word_perplexity"] > 1
    limited = harness_tasks(tasks[:1], open_tasks(tasks[:1]), scoring, limit=2)
    assert limited[0].counts == {"examples": 2}


class Manager:
    """What the harness answers about names."""

    def match_tasks(self, names):
        return [name for name in names if name == "arc_easy"]


def test_unknown_tasks_are_named():
    with raises_naming(ConfigError, "eval_tasks", "no_such_task", "nor_this"):
        check_names(["no_such_task", "nor_this", "arc_easy"], Manager())
    with raises_naming(ConfigError, "eval_tasks", "none.yaml"):
        open_tasks(["none.yaml"])


def test_tasks_that_cannot_be_loaded_are_named_with_the_reason(tasks, tmp_path):
    until = Path(tasks[2]).read_text()
    texts = {
        "yaml": "task: [unclosed",
        "data": until.replace("data.jsonl", "none.jsonl"),
        "asks": until.replace("max_gen_toks", "typical_p"),
    }
    files = []
    for name, text in texts.items():
        files.append(str(tmp_path / f"{name}.yaml"))
        Path(files[-1]).write_text(text)
    with pytest.raises(EvaluationError) as caught:
        harness_scalars([*files, tasks[0]], open_tasks(files))
    broken, missing, asking = str(caught.value).splitlines()
    assert "yaml.yaml: " in broken
    assert "ParserError" in broken
    assert "none.jsonl" in missing
    assert "asks.yaml: " in asking
    assert asking.endswith("typical_p")


def test_an_unknown_task_is_said_before_another_is_scored(scoring, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n')
    config = one_process(config_from_files([GOLDEN / NAME / f"{NAME}.yml"]))
    with raises_naming(ConfigError, "none.yaml"):
        evaluate_tasks(
            [f"perplexity={tmp_path / 'text.jsonl'}", "none.yaml"],
            None,  # no model is asked
            scoring.tokenizer,
            scoring.grid,
            config,
        )


def test_generation_settings_of_tasks():
    assert sampling_params({"until": "\n\n"}, 2048) == SamplingParams(max_new_tokens=256, stop=("\n\n",))
    assert sampling_params({"until": ["a"], "max_gen_toks": 9999, "do_sample": False, "temperature": 0.7}, 100) == (
        SamplingParams(max_new_tokens=99, stop=("a",))
    )
    assert sampling_params({"do_sample": True, "top_p": 0.9}, 2048).temperature == 1.0
    with raises_naming(EvaluationError, "typical_p"):
        sampling_params({"typical_p": 0.3}, 2048)


def test_the_last_window_reaches_back():
    spans = full_windows(range(10), 4)
    assert [(tuple(span.tokens), span.first) for span in spans] == [
        ((0, 1, 2, 3, 4), 1),
        ((4, 5, 6, 7, 8), 1),
        ((5, 6, 7, 8, 9), 4),
    ]
