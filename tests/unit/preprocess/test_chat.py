"""Conversations to token ids and labels, and what is in the loss."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from neox.data import IndexedDataset, read_sidecar
from neox.errors import DataError, NeoXError, TokenizerError
from neox.preprocess import ChatSettings, PreprocessSettings, TokenizerSpec, preprocess
from neox.tokenizer import build_tokenizer
from neox.tokenizer.chat import ChatTemplate, read_chat_template
from tests.errors import raises_naming
from tools.dataset.verify import verify_dataset

ROOT = Path(__file__).parents[3]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
DATED = "{{ 'Today is ' + strftime_now('%Y-%m-%d') + '. ' }}"  # as gpt-oss begins
CHATS = [
    [("system", "Be kind."), ("user", "Hi é"), ("assistant", "Hello 你"), ("user", "Bye"), ("assistant", "Bye bye")],
    [("user", "One?"), ("assistant", "One")],
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Directory of a tokenizer with ChatML's tokens and template."""
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer = Tokenizer.from_file(str(ROOT / "tests" / "golden" / "data" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (directory / "chat_template.jinja").write_text(CHATML)
    return directory


def as_messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def settings(model: Path, records: list[Any], **chat: Any) -> PreprocessSettings:
    source = model.parent / "in.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    template = read_chat_template(model / "tokenizer.json")
    chosen = ChatSettings(**{"template": template, **chat})
    return PreprocessSettings(
        inputs=(str(source),),
        output_prefix=str(model.parent / "out"),
        tokenizer=TokenizerSpec("HFTokenizer", str(model / "tokenizer.json"), None, True),
        keys=chosen.datasets,
        workers=1,
        accelerator="off",
        chat=chosen,
    )


def made(model: Path, run: PreprocessSettings) -> list[tuple[str, str]]:
    """Whole text and counted text of each document."""
    preprocess(run)
    tokenizer = build_tokenizer("HFTokenizer", model / "tokenizer.json")
    texts, labels = (IndexedDataset(run.prefix(key)) for key in run.keys)
    assert len(texts) == len(labels)
    result = []
    for n in range(len(texts)):
        ids, targets = np.array(texts[n]), np.array(labels[n])
        assert (targets[targets != -100] == ids[targets != -100]).all()
        result.append((tokenizer.decode(ids.tolist()), tokenizer.decode(ids[targets != -100].tolist())))
    return result


def test_only_answers_are_counted(model: Path) -> None:
    from transformers import AutoTokenizer

    run = settings(model, [{"messages": as_messages(chat)} for chat in CHATS])
    (whole, counted), (_, last) = made(model, run)
    theirs = AutoTokenizer.from_pretrained(str(model))
    assert whole == theirs.apply_chat_template(as_messages(CHATS[0]), tokenize=False)
    expected = theirs.apply_chat_template(as_messages(CHATS[0]), tokenize=True, return_dict=True)["input_ids"]
    assert IndexedDataset(run.prefix("messages"))[0].tolist() == expected
    assert counted == "Hello 你<|im_end|>\nBye bye<|im_end|>\n"
    assert last == "One<|im_end|>\n"
    sidecar = read_sidecar(run.prefix("messages_label"))
    assert sidecar is not None
    assert sidecar.tokenizer_hash == build_tokenizer("HFTokenizer", model / "tokenizer.json").content_hash
    assert [verify_dataset(run.prefix(key)).problems for key in run.keys] == [(), ()]
    assert not preprocess(run).fresh
    assert preprocess(replace(run, append_eod=True)).fresh


def test_what_is_counted_can_be_chosen(model: Path) -> None:
    records = [{"messages": as_messages(CHATS[0])}]
    assert made(model, settings(model, records, only_last=True))[0][1] == "Bye bye<|im_end|>\n"
    whole, counted = made(model, settings(model, records, count_all=True))[0]
    assert whole == counted
    assert made(model, settings(model, records, role="system"))[0][1] == "<|im_start|>system\nBe kind.<|im_end|>\n"
    with_end = replace(settings(model, records), append_eod=True)
    assert made(model, with_end)[0][1].endswith("Bye bye<|im_end|>\n<|endoftext|>")


@pytest.mark.parametrize("as_lists", [False, True])
def test_prompts_and_answers(model: Path, as_lists: bool) -> None:
    prompt, answer = (as_messages([turn]) if as_lists else turn[1] for turn in CHATS[1])
    run = settings(model, [{"prompt": prompt, "response": answer}], keys=("prompt", "response"))
    assert run.keys == ("messages", "messages_label")
    assert made(model, run) == [
        ("<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nOne<|im_end|>\n", "One<|im_end|>\n")
    ]


def test_a_column_of_another_name_holds_the_messages(model: Path) -> None:
    plain = made(model, settings(model, [{"messages": as_messages(CHATS[1])}]))
    for key, record in (("turns", {"turns": as_messages(CHATS[1])}), ("a.b", {"a": {"b": as_messages(CHATS[1])}})):
        run = settings(model, [record], keys=(key,))
        assert run.keys[0] == {"turns": "turns", "a.b": "messages"}[key]
        assert made(model, run) == plain


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"text": "x"}, "'messages'"),
        ({"messages": "x"}, "'messages'"),
        ({"messages": [{"value": "x"}]}, "`role`"),
        ({"messages": [{"from": "nobody", "value": "x"}]}, "'nobody'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "'assistant'"),
        ({"messages": [{"role": "assistant", "content": 1}]}, "template"),
        ([1], "list"),
    ],
)
def test_bad_conversations_are_located(model: Path, record: Any, name: str) -> None:
    run = settings(model, [{"messages": as_messages(CHATS[1])}, record])
    with raises_naming(DataError, "in.jsonl:2 ", name):
        preprocess(run)
    assert preprocess(replace(run, skip_bad=1)).documents == {"messages": 1, "messages_label": 1}


def test_a_template_that_rewrites_earlier_answers(model: Path) -> None:
    rewriting = ChatTemplate(
        "{% for m in messages %}{{ m.role }}:{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %};"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
        {},
    )
    records = [{"messages": as_messages(CHATS[0])}]
    with raises_naming(DataError, "in.jsonl:1 ", "--only-last", "--split-answers"):
        preprocess(settings(model, records, template=rewriting))
    assert made(model, settings(model, records, template=rewriting, only_last=True))[0][1] == "Bye bye;"


QWEN3 = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}{{ m.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Like Qwen 3's template: thoughts stand only in the answers after the last question."""


def test_each_answer_in_a_sample_of_its_own(model: Path) -> None:
    """The template drops thoughts of earlier turns, so no text holds all answers as generated."""
    from transformers import AutoTokenizer

    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "One.", "reasoning_content": "Hm."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "Oh."},
        {"role": "tool", "content": "Too."},
        {"role": "assistant", "content": "Three.", "weight": 0},
        {"role": "assistant", "content": "Four."},
    ]
    template = ChatTemplate(QWEN3, {})
    records = [{"messages": messages}, {"messages": messages[:2]}]
    with raises_naming(DataError, "in.jsonl:1 ", "--split-answers"):
        preprocess(settings(model, records, template=template))
    samples = made(model, settings(model, records, template=template, split_answers=True))
    assert [trained for _, trained in samples] == [
        "<think>\nHm.\n</think>\n\nOne.<|im_end|>\n",
        "<think>\nOh.\n</think>\n\nTwo.<|im_end|>\n",
        "<think>\n\n</think>\n\nFour.<|im_end|>\n",
        "<think>\nHm.\n</think>\n\nOne.<|im_end|>\n",
    ]
    theirs = AutoTokenizer.from_pretrained(str(model))
    for number, (whole, _) in zip((2, 4, 7, 2), samples, strict=True):
        assert whole == theirs.apply_chat_template(messages[:number], chat_template=QWEN3, tokenize=False)
    assert "split_answers" not in ChatSettings(template).as_json()


def test_a_tokenizer_that_ignores_special_tokens_is_refused(model: Path) -> None:
    run = settings(model, [{"messages": as_messages(CHATS[0])}])
    with raises_naming(TokenizerError, "HFTokenizer"):
        preprocess(replace(run, tokenizer=replace(run.tokenizer, special_in_text=False)))


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--no-mask", "--only-last"], "--only-last"),
        (["--split-answers", "--only-last"], "--split-answers"),
        (["--jsonl-keys", "a", "b", "c"], "--jsonl-keys"),
        (["--chat-template", "{0}/bad.jinja"], "line 1"),
        (["--chat-template", "{0}/none.jinja"], "none.jinja"),
        (["--input", "{0}/none.jsonl"], "none.jsonl"),
        (["--chat-template", "{0}/dated.jinja"], "--date"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_ranks_start(
    model: Path, flags: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(model, [])
    (model.parent / "bad.jinja").write_text("{% if %}")
    (model.parent / "dated.jinja").write_text(DATED + CHATML)
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = runpy.run_path(str(ROOT / "tools" / "preprocess_chat.py"))
    line = "--input {0}/in.jsonl --output-prefix {0}/out --tokenizer-path {0}/model"
    words = [word.format(model.parent) for word in [*line.split(), *flags]]
    with raises_naming(NeoXError, name):
        tool["check"](tool["parser"]().parse_args(words))


def test_a_template_that_writes_todays_date_takes_a_given_one(model: Path) -> None:
    dated = ChatTemplate(DATED + CHATML, {})
    run = settings(model, [{"messages": as_messages(CHATS[1])}], template=dated)
    with raises_naming(DataError, "strftime_now", "--date"):
        preprocess(run)
    ((whole, counted),) = made(model, replace(run, chat=ChatSettings(template=dated, date="2025-01-31")))
    assert whole.startswith("Today is 2025-01-31. <|im_start|>user")
    assert counted == "One<|im_end|>\n"
    sidecar = read_sidecar(run.prefix("messages"))
    assert sidecar is not None
    assert sidecar.settings["chat"]["date"] == "2025-01-31"


def test_gpt_neoxs_command_and_what_it_made(model: Path) -> None:
    records = [{"messages": as_messages(chat)} for chat in CHATS * 3]
    settings(model, records)
    line = (
        "tools/datasets/preprocess_data_with_chat_template.py --input {0}/in.jsonl --output-prefix {0}/out "
        "--tokenizer-path {0}/model --jsonl-keys messages --dataset-impl mmap --workers 2"
    )
    command = [sys.executable, *line.format(model.parent).split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "out_messages_label_document: 6 documents" in done.stdout
    prefix = f"{model.parent}/out_messages"
    shown = "tools/dataset.py show {0}_document --labels {0}_label_document --samples 0 --pack-impl unpacked"
    more = ["--vocab-file", str(model / "tokenizer.json"), "--seq-length", "40", "--split", "1"]
    done = subprocess.run(
        [sys.executable, *shown.format(prefix).split(), *more], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "in the loss" in done.stdout.splitlines()[0]
    lines = done.stdout.splitlines()[1:]
    assert {line[0] for line in lines} == {"+", "-"}
    assert any(line.startswith("+ ") and "<|im_end|>" in line for line in lines)
