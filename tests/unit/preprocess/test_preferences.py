"""Preferences to token ids and labels, and the lines that are refused."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from neox.data import IndexedDataset, read_sidecar
from neox.errors import DataError, NeoXError, TokenizerError
from neox.preprocess import PreferenceSettings, PreprocessSettings, TokenizerSpec, preprocess
from neox.tokenizer import build_tokenizer
from neox.tokenizer.chat import ChatTemplate
from tests.errors import raises_naming

ROOT = Path(__file__).parents[3]
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    {},
)
PAIR = {"prompt": "Two and two?", "chosen": " Four.", "rejected": " Five."}
LABELLED = {"prompt": "Two and two?", "completion": " Four.", "label": True}


def said(*contents: str) -> list[dict[str, str]]:
    """Messages in turn of a user and an assistant."""
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    """Tokenizer with the template's tokens."""
    tokenizer = Tokenizer.from_file(str(ROOT / "tests" / "golden" / "data" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def settings(vocab: Path, records: list[Any], skip_bad: int = 0, **preferences: Any) -> PreprocessSettings:
    source = vocab.parent / "in.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    chosen = PreferenceSettings(**{"template": TEMPLATE, **preferences})
    return PreprocessSettings(
        inputs=(str(source),),
        output_prefix=str(vocab.parent / "out"),
        tokenizer=TokenizerSpec("HFTokenizer", str(vocab), None, True),
        keys=chosen.datasets,
        workers=1,
        skip_bad=skip_bad,
        accelerator="off",
        preferences=chosen,
    )


def made(vocab: Path, run: PreprocessSettings, answer: str) -> list[tuple[str, str]]:
    """Whole text and text of the answer of each document."""
    tokenizer = build_tokenizer("HFTokenizer", vocab)
    texts = IndexedDataset(run.prefix(answer))
    labels = IndexedDataset(run.prefix(f"{answer}_label"))
    result = []
    for ids, own_labels in zip(texts, labels, strict=True):
        trained = [label for label in own_labels.tolist() if label >= 0]
        result.append((tokenizer.decode(ids.tolist()), tokenizer.decode(trained)))
    return result


def test_texts_end_with_the_end_of_document(vocab: Path) -> None:
    run = settings(vocab, [PAIR])
    preprocess(run)
    assert made(vocab, run, "chosen") == [("Two and two? Four.<|endoftext|>", " Four.<|endoftext|>")]
    assert made(vocab, run, "rejected") == [("Two and two? Five.<|endoftext|>", " Five.<|endoftext|>")]
    sidecars = {key: read_sidecar(run.prefix(key)) for key in run.keys}
    marked = [key for key, sidecar in sidecars.items() if sidecar is not None and sidecar.settings.get("labels")]
    assert marked == ["chosen_label", "rejected_label"]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": said("Hi"), "chosen": said("Hi", "Hello")[1:], "rejected": said("Hi", "No")[1:]},
        {"chosen": said("Hi", "Hello"), "rejected": said("Hi", "No")},
        {"prompt": "Hi", "chosen": said("Hi", "Hello"), "rejected": said("Hi", "No")},
        {"messages": said("Hi", "Hello"), "chosen": said("Hi", "Hello"), "rejected": said("Hi", "No")},
    ],
    ids=["explicit", "implicit", "prompt as text next to conversations", "the chosen one under another key, too"],
)
def test_messages_pass_through_the_template(vocab: Path, record: dict[str, Any]) -> None:
    run = settings(vocab, [record])
    preprocess(run)
    assert made(vocab, run, "chosen") == [
        ("<|user|>Hi<|endoftext|><|assistant|>Hello<|endoftext|>", "Hello<|endoftext|>")
    ]
    assert made(vocab, run, "rejected")[0][1] == "No<|endoftext|>"


def test_a_prompt_that_both_texts_begin_with(vocab: Path) -> None:
    run = settings(vocab, [{"chosen": "Two and two? Four.", "rejected": "Two and two? Six."}])
    preprocess(run)
    assert made(vocab, run, "chosen")[0][1] == " Four.<|endoftext|>"
    assert made(vocab, run, "rejected")[0][1] == " Six.<|endoftext|>"


def test_labels_become_rewards_of_the_tokens(vocab: Path) -> None:
    run = settings(vocab, [LABELLED, {**LABELLED, "label": False}], labelled=True)
    preprocess(run)
    rewards = IndexedDataset(run.prefix("completion_reward"))
    assert [set(reward.tolist()) for reward in rewards] == [{1}, {-1}]
    assert rewards.sizes.tolist() == IndexedDataset(run.prefix("completion")).sizes.tolist()
    assert made(vocab, run, "completion")[1][1] == " Four.<|endoftext|>"


BAD_PAIRS = {
    "equal": {**PAIR, "rejected": " Four."},
    "equal tokens": {"prompt": said("Hi"), "chosen": said("a", "A")[1:], "rejected": [{**said("a", "A")[1], "x": 1}]},
    "no prompt": {"chosen": "Four.", "rejected": "Two."},
    "empty prompt": {**PAIR, "prompt": ""},
    "empty messages": {"prompt": [], "chosen": said("a"), "rejected": said("b")},
    "no answer": {"prompt": "Two?", "chosen": "Four."},
    "empty answer": {**PAIR, "chosen": ""},
    "number": {**PAIR, "chosen": 4},
    "mixed": {**PAIR, "rejected": said("b")},
    "no object": ["Two?"],
    "no role": {"prompt": said("Hi"), "chosen": [{"content": "a"}], "rejected": said("b")},
    "too long": {**PAIR, "chosen": " four" * 100},
}
BAD_LABELLED = {
    "number": {**LABELLED, "label": 2},
    "text": {**LABELLED, "label": "true"},
    "missing": {"prompt": "Two?", "completion": "Four."},
    "no prompt": {"completion": "Four.", "label": True},
}


@pytest.mark.parametrize("name", BAD_PAIRS)
def test_bad_pairs_are_refused_by_line_or_skipped(vocab: Path, name: str) -> None:
    records = [PAIR, BAD_PAIRS[name], PAIR]
    with raises_naming(DataError, "in.jsonl:2"):
        preprocess(settings(vocab, records, seq_length=64))
    run = settings(vocab, records, skip_bad=1, seq_length=64)
    report = preprocess(run)
    assert (report.skipped, set(report.documents.values())) == (1, {2})


@pytest.mark.parametrize("name", BAD_LABELLED)
def test_bad_labels_are_refused_by_line_or_skipped(vocab: Path, name: str) -> None:
    records = [LABELLED, BAD_LABELLED[name]]
    with raises_naming(DataError, "in.jsonl:2"):
        preprocess(settings(vocab, records, labelled=True))
    report = preprocess(settings(vocab, records, skip_bad=1, labelled=True))
    assert (report.skipped, set(report.documents.values())) == (1, {1})


def test_fields_of_other_names(vocab: Path) -> None:
    expected = settings(vocab, [PAIR])
    preprocess(expected)
    plain = [made(vocab, expected, answer) for answer in ("chosen", "rejected")]
    record = {"question": "Two and two", "answers": {"best": " Four.", "worst": " Five."}}
    fields = (("prompt", "{question}?"), ("chosen", "answers.best"), ("rejected", "answers.worst"))
    run = settings(vocab, [record], fields=fields)
    preprocess(run)
    assert [made(vocab, run, answer) for answer in ("chosen", "rejected")] == plain
    with raises_naming(DataError, "in.jsonl:1", "question"):
        preprocess(settings(vocab, [PAIR], fields=fields))


def test_a_template_that_writes_todays_date_needs_one_before_ranks_start(
    vocab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts need no template: a tokenizer with a dated one asks for the date at the first line of messages."""
    dated = replace(TEMPLATE, source="{{ strftime_now('%Y') }}" + TEMPLATE.source)
    assert preprocess(settings(vocab, [PAIR], template=dated)).documents["chosen"] == 1
    record = {"chosen": said("a", "b"), "rejected": said("a", "c")}
    with raises_naming(NeoXError, "strftime_now", "--date"):
        preprocess(replace(settings(vocab, [record], template=dated), skip_bad=1))

    (vocab.parent / "dated.jinja").write_text(dated.source)
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = runpy.run_path(str(ROOT / "tools" / "preprocess_preferences.py"))
    line = "--input {0}/in.jsonl --output-prefix {0}/out --vocab-file {0}/tokenizer.json"
    words = [*line.format(vocab.parent).split(), "--chat-template", str(vocab.parent / "dated.jinja")]
    with raises_naming(TokenizerError, "--date"):
        tool["check"](tool["parser"]().parse_args(words))
    tool["check"](tool["parser"]().parse_args([*words, "--date", "2025-01-31"]))


def test_messages_need_a_template(vocab: Path) -> None:
    record = {"chosen": said("Hi", "Hello"), "rejected": said("Hi", "No")}
    with raises_naming(DataError, "--chat-template", "in.jsonl:1"):
        preprocess(settings(vocab, [record], template=None))
    assert preprocess(settings(vocab, [PAIR], template=None)).documents["chosen"] == 1


def test_rows_of_parquet_are_pairs(vocab: Path) -> None:
    rows = [PAIR, {**PAIR, "rejected": " Six."}]
    file = vocab.parent / "pairs.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    expected = settings(vocab, rows)
    preprocess(expected)
    preprocess(replace(expected, inputs=(str(file),), output_prefix=str(vocab.parent / "table")))
    made = [
        Path(f"{prefix}_rejected_document.bin").read_bytes()
        for prefix in (expected.output_prefix, vocab.parent / "table")
    ]
    assert made[0] == made[1]
    file.write_bytes(b"PAR1")
    with raises_naming(DataError, "pairs.parquet"):
        preprocess(replace(expected, inputs=(str(file),), output_prefix=str(vocab.parent / "broken")))


def test_the_command_writes_what_the_keys_of_gpt_neox_name(vocab: Path) -> None:
    (vocab.parent / "chat.jinja").write_text(TEMPLATE.source)
    source = vocab.parent / "in.jsonl"
    source.write_text(
        json.dumps(PAIR) + "\n" + json.dumps({"chosen": said("a", "b"), "rejected": said("a", "c")}) + "\n"
    )
    command = [sys.executable, "tools/preprocess_preferences.py", "--input", source, "--output-prefix"]
    command += [
        vocab.parent / "out",
        "--vocab-file",
        vocab,
        "--chat-template",
        vocab.parent / "chat.jinja",
        "--workers",
        "1",
    ]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in vocab.parent.glob("out*.bin"))
    assert names == [
        "out_chosen_document.bin",
        "out_chosen_label_document.bin",
        "out_rejected_document.bin",
        "out_rejected_label_document.bin",
    ]
