"""lm-evaluation-harness on our model: a local task of each kind of request, equal to the harness's own model class."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from neox.convert import to_hf
from neox.errors import ConfigError, EvaluationError
from neox.evaluation.evaluate import evaluate_tasks
from neox.evaluation.harness import (
    check_names,
    harness_scalars,
    harness_tasks,
    open_tasks,
    sampling_params,
)
from neox.evaluation.perplexity import corpus_perplexity
from neox.evaluation.results import flat_metrics
from neox.evaluation.scoring import Scorer, Span, rolling_windows
from neox.evaluation.text_probabilities import TextSummary, lines_with_probabilities
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
def export(tmp_path_factory):
    """The harness's own model class on the export of the model."""
    pytest.importorskip("accelerate", reason="the harness's own model class needs accelerate")
    from lm_eval.models.huggingface import HFLM

    directory = tmp_path_factory.mktemp("hf")
    config = config_from_files([GOLDEN / NAME / f"{NAME}.yml"])
    to_hf(GOLDEN / NAME / "global_step30", config, directory, tokenizer_file=TOKENIZER_FILE, verify=False)
    return HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=2)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_every_kind_of_request_scores_as_the_harnesss_own_model_does(scoring, export, tasks, tmp_path, monkeypatch):
    from lm_eval import simple_evaluate

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    ours = {result.task: result for result in harness_tasks(tasks, open_tasks(tasks), scoring)}
    reported = {name for name in flat_metrics(list(ours.values())) if not name.endswith("_stderr")}
    scalars = harness_scalars(tasks, open_tasks(tasks))
    assert set(scalars.known) == reported  # before the tasks are scored
    assert scalars.possible == ["eval/local_choice_*", "eval/local_rolling_*", "eval/local_until_*"]
    theirs = simple_evaluate(
        model=export,
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


@pytest.mark.parametrize("stride", [1, 3, 4])
def test_windows_of_a_text_are_the_harnesss(stride):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for size in range(1, 15):
        theirs = []
        for pair in get_rolling_token_windows(list(range(1, size + 1)), 0, 4, 4 - stride + 1):
            context, scored = make_disjoint_window(pair)
            theirs.append(([*context, *scored], len(context)))
        ours = rolling_windows(Span(range(size + 1), 1), 4, stride)
        assert [(list(span.tokens), span.first) for span in ours] == theirs


def test_the_perplexity_of_documents_is_the_harnesss(scoring, export, tmp_path):
    """Tokens, nats and bytes of its `loglikelihood_rolling`, for texts shorter and longer than the context."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.metrics import bits_per_byte, weighted_perplexity

    texts = [
        "Ten words stand on\n  the three lines\n\nof this text.",
        "def f(x): return x",
        "Käse for all. " * 60 + "End",
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ours = corpus_perplexity(tmp_path / "c.jsonl", scoring)
    requests = [Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(texts)]
    sums = export.loglikelihood_rolling(requests, disable_tqdm=True)
    tokens = sum(len(export.tok_encode(text)) for text in texts)
    of_words = [(nats, len(re.split(r"\s+", text))) for nats, text in zip(sums, texts, strict=True)]
    of_bytes = [(nats, len(text.encode())) for nats, text in zip(sums, texts, strict=True)]
    assert len(export.tok_encode(texts[2])) > export.max_length
    assert of_words[0][1] == 10
    assert ours.counts["scored"] == tokens
    assert ours.counts["words"] == sum(words for _, words in of_words)
    assert ours.metrics["loss"] == pytest.approx(-sum(sums) / tokens, rel=1e-5)
    assert ours.metrics["ppl"] == pytest.approx(math.exp(-sum(sums) / tokens), rel=1e-4)
    assert ours.metrics["word_ppl"] == pytest.approx(weighted_perplexity(of_words), rel=1e-3)
    assert ours.metrics["byte_ppl"] == pytest.approx(weighted_perplexity(of_bytes), rel=1e-4)
    assert ours.metrics["bits_per_byte"] == pytest.approx(bits_per_byte(of_bytes), rel=1e-5)
    files = [str(tmp_path / "c.jsonl")]
    lines = lines_with_probabilities(scoring.model, scoring.tokenizer, files, TextSummary(), batch=2, skip_bad=0)
    by_text = [json.loads(line)["log_probability"] for line in lines]
    assert by_text == pytest.approx(sums, rel=1e-5)
