"""A chat template on its way: from the data to the checkpoint, to the export, and back by an import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from neox.checkpoint import find_chat_template, saved_chat_template, write_chat_template
from neox.config import NeoXConfig
from neox.convert import from_hf, to_hf
from neox.data import IndexedDataset
from neox.data.token_files.sidecar import chat_templates
from neox.errors import CheckpointError
from neox.preflight.chat_checks import chat_template_notes, chat_template_problems
from neox.preprocess import ChatSettings, PreprocessSettings, TokenizerSpec, preprocess
from neox.tokenizer import build_tokenizer
from neox.tokenizer.chat import CHAT_TEMPLATE, ChatTemplate, read_chat_template
from tests.errors import raises_naming
from tests.unit.convert.test_to_hf import checkpoint

VOCAB = Path(__file__).parents[2] / "golden" / "data" / "tokenizer.json"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHAT = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Hello 你"}]


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    """Tokenizer with ChatML's tokens and without a configuration."""
    tokenizer = Tokenizer.from_file(str(VOCAB))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    path = tmp_path / "model" / "tokenizer.json"
    path.parent.mkdir()
    tokenizer.save(str(path))
    return path


def chats(tmp_path: Path, vocab: Path, name: str, source: str) -> str:
    """Make a dataset of one conversation; return its prefix."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    (tmp_path / "chat.jinja").write_text(source)
    spec = TokenizerSpec("HFTokenizer", str(vocab), None, True)
    chat = ChatSettings(read_chat_template(vocab, tmp_path / "chat.jinja", spec.build()))
    settings = PreprocessSettings(
        inputs=(str(tmp_path / "in.jsonl"),),
        output_prefix=str(tmp_path / name),
        tokenizer=spec,
        keys=chat.datasets,
        workers=1,
        accelerator="off",
        chat=chat,
    )
    preprocess(settings)
    return settings.prefix("messages")


def test_the_template_of_the_data_reaches_the_export_and_comes_back(tmp_path: Path, vocab: Path) -> None:
    from transformers import AutoTokenizer

    prefix = chats(tmp_path, vocab, "chats", TEMPLATE)
    keys = {"tokenizer_type": "HFTokenizer", "vocab_file": str(vocab)}
    config = NeoXConfig.from_flat({**keys, "train_data_paths": [prefix]})
    assert chat_template_notes(config) == []
    (template,) = chat_templates(config.data).values()
    rows = build_tokenizer("HFTokenizer", vocab).vocab_size
    directory, config, _ = checkpoint(tmp_path, rows=rows + rows % 2, tp_size=1, **keys)
    write_chat_template(directory, template)
    to_hf(directory, config, tmp_path / "hf", verify=False)

    exported = AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    ids = exported.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    assert ids == IndexedDataset(prefix)[0].tolist()
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [exported.eos_token_id, exported.convert_tokens_to_ids("<|im_end|>")]

    result = from_hf(tmp_path / "hf", tmp_path / "imported")
    imported = tmp_path / "imported" / "tokenizer.json"
    tokenizer = build_tokenizer("HFTokenizer", imported)
    found = find_chat_template(None, result.checkpoint, imported, tokenizer)
    assert found is not None
    assert found.source == TEMPLATE
    assert found.tokens["bos_token"] == template.tokens["bos_token"] == "<|endoftext|>"


def test_the_given_template_wins_and_a_missing_file_is_the_saved_one(tmp_path: Path, vocab: Path) -> None:
    tokenizer = build_tokenizer("HFTokenizer", vocab)
    given = tmp_path / "given.jinja"
    assert find_chat_template(None, tmp_path, vocab, tokenizer) is None
    vocab.with_name("chat_template.jinja").write_text("own")
    assert find_chat_template(None, tmp_path, vocab, tokenizer) == ChatTemplate("own", {})
    write_chat_template(tmp_path, ChatTemplate("saved", {}))
    assert find_chat_template(None, tmp_path, vocab, tokenizer) == ChatTemplate("saved", {})
    assert find_chat_template(given, tmp_path, vocab, tokenizer) == ChatTemplate("saved", {})
    given.write_text("given")
    assert find_chat_template(given, tmp_path, vocab, tokenizer) == ChatTemplate("given", {})
    (tmp_path / CHAT_TEMPLATE).write_text('{"source": 1}')
    with raises_naming(CheckpointError, tmp_path / CHAT_TEMPLATE):
        saved_chat_template(tmp_path)


def test_the_launcher_says_that_datasets_disagree(tmp_path: Path, vocab: Path) -> None:
    one = chats(tmp_path, vocab, "one", TEMPLATE)
    two = chats(tmp_path, vocab, "two", TEMPLATE.replace("im_start", "im_end"))
    keys = {"tokenizer_type": "HFTokenizer", "vocab_file": str(vocab), "train_data_paths": [one, one, two]}
    (note,) = chat_template_notes(NeoXConfig.from_flat(keys))
    assert one in note
    assert two in note
    given = tmp_path / "given.jinja"
    given.write_text(TEMPLATE)
    (note,) = chat_template_notes(NeoXConfig.from_flat({**keys, "chat_template": str(given)}))
    assert f"chat_template: {given}" in note
    assert two in note
    given.write_text("{% if %}")
    (problem,) = chat_template_problems(NeoXConfig.from_flat({**keys, "chat_template": str(given)}), None)
    assert problem.keys == ("chat_template",)
