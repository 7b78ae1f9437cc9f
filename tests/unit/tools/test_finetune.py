"""Fine-tuning of a small BERT on tasks that are learnt quickly."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="accelerate (requirements/requirements-eval.txt) is not installed")

ROOT = Path(__file__).parents[3]
NAMES = ["anna", "bert", "carl", "dora", "emil", "finn", "gina", "hugo"]
WORDS = ["the", "is", "who", "here", "and", "there", "not", "?", ".", "sings", "runs", *NAMES]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with random weights and its tokenizer, as an export has them."""
    from transformers import BertConfig, BertForPreTraining, BertTokenizerFast, set_seed

    path = tmp_path_factory.mktemp("bert") / "model"
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    set_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForPreTraining(config).half().save_pretrained(path)  # as of a run in fp16
    BertTokenizerFast(vocab=vocabulary).save_pretrained(path)
    return path


def run(tool: str, model: Path, folder: Path, *options: str, code: int = 0) -> Any:
    command = [sys.executable, str(ROOT / "tools" / tool), "--model", str(model), "--output", str(folder / "out")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=folder)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads((folder / "out" / "scores.json").read_text()) if code == 0 else done.stderr


def squad(seed: int, count: int) -> dict[str, Any]:
    chance, paragraphs = random.Random(seed), []
    for i in range(count):
        names = chance.sample(NAMES, 2)
        context = f"{names[0]} sings and {names[1]} runs ."
        answer = {"text": names[0], "answer_start": 0}
        entry = {"id": str(i), "question": "who sings ?", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [entry]})
    return {"data": [{"paragraphs": paragraphs}]}


@pytest.mark.slow
def test_questions(model: Path, tmp_path: Path) -> None:
    for name, seed, count in (("train", 0, 400), ("dev", 1, 50)):
        (tmp_path / f"{name}.json").write_text(json.dumps(squad(seed, count)))
    files = ("--train", "train.json", "--dev", "dev.json")
    shape = ("--epochs", "8", "--lr", "1e-3", "--seq-length", "32", "--stride", "8")
    scores = run("finetune_squad.py", model, tmp_path, *files, *shape)
    assert scores["f1"] >= scores["exact"] > 90  # a guess among the names gives 50
    predictions = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert len(predictions) == 50
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
def test_classes(model: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    for name, count in (("train", 300), ("dev", 60)):
        rows = ["first\tsecond\tlabel"]
        for _ in range(count):
            first, second = chance.choice(NAMES), chance.choice(NAMES[:4])
            rows.append(f"{first} sings\t{second} runs\t{'yes' if first in NAMES[:4] else 'no'}")
        (tmp_path / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    files = ("--train", "train.tsv", "--dev", "dev.tsv", "--text-keys", "first", "second")
    scores = run("finetune_classifier.py", model, tmp_path, *files, "--epochs", "4", "--lr", "1e-3")
    assert scores["accuracy"] > 85
    (tmp_path / "bad.tsv").write_text("first\tsecond\tlabel\nanna\t\tyes\n")
    (tmp_path / "out").rename(tmp_path / "first")
    error = run("finetune_classifier.py", model, tmp_path, "--train", "bad.tsv", *files[2:], code=1)
    assert "bad.tsv:2" in error
    assert not (tmp_path / "out").exists()
