"""docs/finetuning.md: its files are written, and its commands run one after another, as a reader would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neox.data import IndexedDataset
from tests.end_to_end.pages import type_page

QUESTIONS = "7 + 1?\n/reset\n/system In words.\n8 + 1?\n"


def check_chat_template(directory: Path) -> None:
    """The export's template gives the ids that preprocessing gave."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory / "chat-model"))
    first = json.loads((directory / "data" / "chats.jsonl").read_text().splitlines()[0])["messages"]
    ids = tokenizer.apply_chat_template(first, tokenize=True, return_dict=True)["input_ids"]
    assert ids == IndexedDataset(directory / "data" / "chats_messages_document")[0].tolist()


@pytest.mark.slow
@pytest.mark.timeout(3600)  # more than twenty commands, each with a limit of its own
def test_every_command_of_the_page(tmp_path: Path) -> None:
    for package in ("peft", "openai", "starlette", "uvicorn"):
        pytest.importorskip(package, reason=f"{package} (requirements/requirements-dev.txt) is not installed")
    documents = [
        f'{{"text": "Document {n} says that {n} and {n + 1} make {2 * n + 1}, not {n}."}}\n' for n in range(400)
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.jsonl").write_text("".join(documents))
    chats = [
        f'{{"messages": [{{"role": "user", "content": "{n} + 1?"}}, {{"role": "assistant", "content": "{n + 1}"}}]}}\n'
        for n in range(40)
    ]
    (tmp_path / "data" / "chats.jsonl").write_text("".join(chats))
    whole = type_page("finetuning.md", tmp_path, QUESTIONS)
    assert whole.count("tokens/s]") == 2  # two of the lines that are typed are questions
    assert "system message: In words." in whole
    check_chat_template(tmp_path)
    assert whole.count("runs/own/global_step10, 10 steps") >= 2  # text and export
    assert "parameters are trained" in whole
    assert "\n+  1<|endoftext|>" in whole
    for made in ("own-model/model.safetensors", "lora-model/model.safetensors", "lora-adapter/adapter_config.json"):
        assert (tmp_path / made).is_file()
    assert (tmp_path / "runs" / "own" / "latest").read_text() == "global_step10"
    assert (tmp_path / "runs" / "chat" / "latest").read_text() == "global_step10"
    assert (tmp_path / "runs" / "chat" / "global_step10" / "chat_template.json").is_file()
    assert (tmp_path / "runs" / "more" / "latest").read_text() == "global_step2"
