"""Tokenizers of Hugging Face's families: the ids of transformers, the right end of a document, and their export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from neox.config import NeoXConfig
from neox.convert.hf_tokenizer import TokenizerSource, find_tokenizer, import_tokenizer, write_tokenizer
from neox.data.token_files.indexed_dataset import best_dtype
from neox.errors import TokenizerError
from neox.families import FAMILIES
from neox.tokenizer import HFTokenizer, build_tokenizer
from neox.tokenizer.accelerators import choose_encoder
from tests.errors import raises_naming
from tests.transformers_versions import IS_4, IS_5_0

LINES = ("the cat sat on the mat\n", "a dog and the cat é ü 猫 😀\r\n", "  indented\n\tline it's we'll 12345\n")
TEXTS = (*LINES, "", " leading", "a  b   c", "☃ unseen ∰", "x</s>y <s>", "<|im_end|>\n<|im_start|>user", "a\n\n\nb")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CHAT = [{"role": "user", "content": "the cat"}]


def _sentencepiece_like() -> tokenizers.Tokenizer:
    """BPE with bytes for unknown characters and a bos before each text, as in Llama 2."""
    specials = ["<unk>", "<s>", "</s>"]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(LINES * 20, trainers.BpeTrainer(vocab_size=400, special_tokens=tokens))
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][: len(specials)]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def _byte_level(specials: list[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE with special tokens behind the vocabulary, as in Llama 3 and Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"(?i:'s|'ll)|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(LINES * 20, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    backend.add_special_tokens(specials)
    return backend


def _llama3() -> tokenizers.Tokenizer:
    backend = _byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    bos = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    backend.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return backend


TOKENIZERS = {
    "llama2": (_sentencepiece_like, "LlamaTokenizer", "<s>", "</s>"),
    "llama3": (_llama3, "PreTrainedTokenizerFast", "<|begin_of_text|>", "<|eot_id|>"),
    "qwen": (
        lambda: _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        "Qwen2Tokenizer",
        None,
        {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
    ),
}


@pytest.fixture(params=TOKENIZERS)
def directory(request, tmp_path) -> Path:
    build, name, bos, eos = TOKENIZERS[request.param]
    (tmp_path / "hf").mkdir()
    build().save(str(tmp_path / "hf" / "tokenizer.json"))
    config = {"tokenizer_class": name, "bos_token": bos, "eos_token": eos, "chat_template": TEMPLATE}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path / "hf"


def test_an_export_keeps_ids_special_tokens_and_the_chat_template(directory, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "checkpoints").mkdir()
    path = import_tokenizer(directory, tmp_path / "checkpoints")
    keys = {"tokenizer_type": "HFTokenizer", "vocab_file": str(path)}
    source = find_tokenizer(NeoXConfig.from_flat(keys))
    assert isinstance(source, TokenizerSource)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text('{"model_type": "llama"}')
    write_tokenizer(source, tmp_path / "out", FAMILIES["llama"], max_length=32)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert loaded.eos_token_id == source.tokenizer.eod
    assert loaded.bos_token_id == source.bos
    assert loaded.apply_chat_template(CHAT, tokenize=False) == "the cat"
    ids = [source.tokenizer.encode(text) for text in TEXTS]
    assert [loaded(text).input_ids for text in TEXTS] == ids == source.tokenizer.encode_batch(TEXTS)


@pytest.mark.parametrize("pattern", [FAMILIES["qwen2"].tokenizer_pattern, r"\p{N}{1,3}|\p{L}+|."])
@pytest.mark.skipif(IS_4 or IS_5_0, reason="it reads these tokenizers as they are")
def test_exports_of_qwen2_warn_of_other_ids_in_transformers_5(pattern, tmp_path, caplog):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    backend = _byte_level(["<|endoftext|>"])
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.train_from_iterator(["12 " * 20, *LINES * 9], trainers.BpeTrainer(vocab_size=300))
    backend.save(str(tmp_path / "tokenizer.json"))
    keys = {"tokenizer_type": "HFTokenizer", "vocab_file": str(tmp_path / "tokenizer.json")}
    source = find_tokenizer(NeoXConfig.from_flat(keys))
    assert isinstance(source, TokenizerSource)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text('{"model_type": "qwen2"}')
    write_tokenizer(source, tmp_path / "out", FAMILIES["qwen2"], max_length=32)
    texts = ["tokens 12 12345", *LINES]
    ours = [source.tokenizer.encode(text) for text in texts]
    theirs = [AutoTokenizer.from_pretrained(str(tmp_path / "out"))(text).input_ids for text in texts]
    assert ("PreTrainedTokenizerFast.from_pretrained" in caplog.text) == (ours != theirs)
    assert [PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "out"))(text).input_ids for text in texts] == ours


def test_many_texts_have_the_ids_of_each_one(directory):
    tokenizer = build_tokenizer("HFTokenizer", directory / "tokenizer.json")
    encoder = choose_encoder(tokenizer, "auto", TEXTS).encoder
    texts = [text * 50 for text in TEXTS]
    ids, lengths = encoder.encode_flat(texts)
    wanted = [tokenizer.encode(text) for text in texts]
    assert lengths.tolist() == [len(each) for each in wanted]
    assert ids.tolist() == [token for each in wanted for token in each]


def test_the_end_of_a_document_is_the_eos_token(directory):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    eos = config["eos_token"] if isinstance(config["eos_token"], str) else config["eos_token"]["content"]
    tokenizer = build_tokenizer("HFTokenizer", directory / "tokenizer.json")
    assert isinstance(tokenizer, HFTokenizer)
    assert tokenizer.eod == tokenizer.backend.token_to_id(eos)
    alone = directory / "alone.json"
    (directory / "tokenizer.json").rename(alone)
    usual = {"</s>": "</s>", "<|eot_id|>": "<|end_of_text|>", "<|im_end|>": "<|endoftext|>"}[eos]
    assert build_tokenizer("HFTokenizer", alone).eod == tokenizer.backend.token_to_id(usual)


def test_an_end_of_document_that_the_vocabulary_lacks_is_refused(directory):
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with raises_naming(TokenizerError, "<end>", "tokenizer.json"):
        build_tokenizer("HFTokenizer", directory / "tokenizer.json")
    (directory / "tokenizer_config.json").write_text("[]")
    with raises_naming(TokenizerError, "tokenizer_config"):
        build_tokenizer("HFTokenizer", directory / "tokenizer.json")


def test_transformers_writes_the_file_of_a_directory_without_one(directory, tmp_path):
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "out").mkdir()
    assert import_tokenizer(tmp_path / "out", tmp_path / "out") is None  # a directory without any
    (tmp_path / "gpt2").mkdir()
    vocab = {character: i for i, character in enumerate([*"abĠ", "ab", "<|endoftext|>"])}
    (tmp_path / "gpt2" / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "gpt2" / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "gpt2" / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    path = import_tokenizer(tmp_path / "gpt2", tmp_path / "out")
    assert path is not None
    tokenizer = build_tokenizer("HFTokenizer", path)
    assert tokenizer.encode("abb<|endoftext|>") == [3, 1, tokenizer.eod]
    assert PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "out"))("abb").input_ids == [3, 1]


OWN_IDS = [name for name, family in FAMILIES.items() if family.tokenizer_pattern is None]


@pytest.mark.parametrize("model_type", OWN_IDS)
def test_auto_tokenizer_gives_our_ids_for_exports_of_each_family(model_type, tmp_path):
    from transformers import AutoTokenizer

    _byte_level(["<|endoftext|>"]).save(str(tmp_path / "tokenizer.json"))
    keys = {"tokenizer_type": "HFTokenizer", "vocab_file": str(tmp_path / "tokenizer.json")}
    source = find_tokenizer(NeoXConfig.from_flat(keys))
    assert source is not None
    output = tmp_path / "out"
    output.mkdir()
    (output / "config.json").write_text(json.dumps({"model_type": model_type}))
    write_tokenizer(source, output, FAMILIES[model_type], max_length=32)
    loaded = AutoTokenizer.from_pretrained(str(output))
    assert [loaded(text).input_ids for text in TEXTS] == source.tokenizer.encode_batch(TEXTS)


def test_ids_beyond_two_bytes_are_stored_whole(tmp_path):
    state = json.loads(_byte_level(["<|endoftext|>"]).to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary |= {f"unused{i}": i for i in range(len(vocabulary), 70_000)}
    state["added_tokens"][-1]["id"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.eod) == (70_001, 70_000)
    assert best_dtype(tokenizer.vocab_size) == np.int32
