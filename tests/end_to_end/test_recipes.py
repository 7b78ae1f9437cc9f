"""docs/recipes/: the files of each page are written, and its commands run one after another, as a reader would."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.pages import type_page

START = "recipes/index.md"
QUESTIONS = "7 + 1?\n8 + 1?\n"


def _write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory with data in the forms that the recipes take, and the configurations that `-d configs` names."""
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "configs").symlink_to(Path(__file__).resolve().parents[2] / "configs")
    texts = [f"Document {n} says that {n} and {n + 1} make {2 * n + 1}, not {n}. " * (1 + n % 7) for n in range(400)]
    _write_lines(data / "own.jsonl", [{"text": text} for text in texts])
    chats = []
    pairs = []
    alpaca = []
    for n in range(60):
        question = {"role": "user", "content": f"{n} + 1?"}
        right = {"role": "assistant", "content": str(n + 1)}
        wrong = {"role": "assistant", "content": str(n + 2)}
        chats.append({"messages": [question, right]})
        pairs.append({"prompt": [question], "chosen": [right], "rejected": [wrong]})
        alpaca.append({"instruction": "Add one.", "input": str(n), "output": str(n + 1)})
    _write_lines(data / "chats.jsonl", chats)
    _write_lines(data / "pairs.jsonl", pairs)
    _write_lines(data / "alpaca.jsonl", alpaca)
    return tmp_path


def _loads(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(str(directory))
    return AutoModelForCausalLM.from_pretrained(str(directory))


PAGES = {
    "01-pretrain": "own-model",
    "02-domain": "domain-model",
    "05-long-context": "long-model",
    "06-experts": "moe-model",
    "08-from-gpt-neox": "hf",
    "09-from-others": "tuned-model",
}
"""Page -> directory of the model that it ends with."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_ends_in_a_model_that_loads(page: str, own: Path) -> None:
    type_page(START, own)
    printed = type_page(f"recipes/{page}.md", own)
    model = _loads(own / PAGES[page])
    if page == "01-pretrain":
        watched = type_page("recipes/overfitting.md", own)
        assert "validation/lm_loss" in next(line for line in watched.splitlines() if line.startswith("validation "))
        assert (own / "runs" / "watch" / "best").resolve().name.startswith("global_step")
        _loads(own / "best-model")
    if page == "05-long-context":
        assert model.config.max_position_embeddings == 512
        assert "context" in printed
    if page == "06-experts":
        assert model.config.num_local_experts == 4
    if page == "09-from-others":
        assert (own / "tuned-adapter" / "adapter_config.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_chat_then_dpo(own: Path) -> None:
    type_page(START, own)
    chat = type_page("recipes/03-chat.md", own, QUESTIONS)
    assert "tokens/s]" in chat  # it answers, until its context of 128 tokens is full
    _loads(own / "chat-model")
    assert (own / "chat-model" / "chat_template.jinja").is_file()
    dpo = type_page("recipes/04-dpo.md", own)
    assert "runs/chat" in next(line for line in dpo.splitlines() if line.startswith("start "))
    metrics = (own / "runs" / "dpo" / "logs" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[0])["train/loss"] == pytest.approx(math.log(2), abs=1e-5)  # it starts at the reference
    _loads(own / "preferred-model")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_scores_of_own_text(own: Path) -> None:
    texts = [f"Document {n} says that {n} and {n + 1} make {2 * n + 1}, not {n}. " for n in range(400, 420)]
    _write_lines(own / "data" / "unseen.jsonl", [{"text": text} for text in texts])
    pair = {"chosen": "Document 7 says that 7 and 8 make 15.", "rejected": "says 7 make that Document 15 and 7 8."}
    completion = {"prompt": "Document 7 says", "completion": " that 7 and 8 make 15."}
    _write_lines(own / "data" / "sentences.jsonl", [{"text": texts[0]}, completion, pair])
    type_page("recipes/01-pretrain.md", own)
    printed = type_page("recipes/scores.md", own)
    text, completed, compared = map(json.loads, (own / "scores.jsonl").read_text().splitlines())
    assert (text["bytes"], completed["bytes"]) == (len(texts[0]), len(completion["completion"]))
    assert compared["chosen_log_probability"] > compared["rejected_log_probability"]
    assert "pairs: 1, accuracy 1.0000" in printed
    for model in ("first", "second"):
        (file,) = (own / "runs").glob(f"{model}_eval_results_*.json")
        (task,) = json.loads(file.read_text())["results"].values()
        assert task["bits_per_byte"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_plans_of_a_cluster(own: Path) -> None:
    printed = type_page("recipes/07-slurm.md", own)
    assert "32 ranks" in printed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_run_that_moves_to_other_ranks_goes_on(own: Path) -> None:
    type_page(START, own)
    printed = type_page("recipes/10-other-gpus.md", own)
    assert (own / "runs" / "moved" / "latest").read_text() == "global_step16"
    metrics = (own / "runs" / "moved" / "logs" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, metrics) if line["kind"] == "step"]
    assert [line["iteration"] for line in steps] == list(range(1, 17))
    assert {line["train/batch_size"] for line in steps} == {8.0}
    assert "mi300x" in printed
