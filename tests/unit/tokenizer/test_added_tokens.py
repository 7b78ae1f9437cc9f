"""Tokens that are added after a vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from neox.errors import TokenizerError
from neox.tokenizer import build_tokenizer, train_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "data" / "tokenizer.json"
TOKENS = ["<|user|>", "<|assistant|>"]
TEXT = "<|user|>What is it?<|assistant|>It is.<|endoftext|>"


def grown(special_in_text=None):
    return build_tokenizer("HFTokenizer", GOLDEN, special_in_text=special_in_text, added_tokens=TOKENS)


@pytest.mark.parametrize("special_in_text", [None, False])
def test_added_tokens_are_recognised_in_every_text(special_in_text):
    plain = build_tokenizer("HFTokenizer", GOLDEN, special_in_text=special_in_text)
    tokenizer = grown(special_in_text)
    size = plain.vocab_size
    assert tokenizer.vocab_size == size + 2
    ids = tokenizer.encode(TEXT)
    assert [i for i in ids if i >= size] == [size, size + 1]
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode("What is it?") == plain.encode("What is it?")
    assert (tokenizer.eod in ids) == (special_in_text is None)


def test_data_of_the_vocabulary_without_them_are_known():
    plain = build_tokenizer("HFTokenizer", GOLDEN)
    assert grown().known_hashes == (grown().content_hash, plain.content_hash)
    assert grown().content_hash != plain.content_hash
    assert plain.known_hashes == (plain.content_hash,)


def test_a_file_that_has_them_is_the_same_tokenizer(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(grown().to_json())
    whole = build_tokenizer("HFTokenizer", file)
    again = build_tokenizer("HFTokenizer", file, added_tokens=TOKENS)
    assert whole.content_hash == again.content_hash == grown().content_hash
    assert again.vocab_size == whole.vocab_size
    before = grown().with_vocabulary(whole.vocab_size - 2)
    assert before.encode(TEXT) == build_tokenizer("HFTokenizer", GOLDEN).encode(TEXT)
    with pytest.raises(TokenizerError):
        grown().with_vocabulary(10)


def test_the_files_of_gpt2_take_them_too(tmp_path):
    texts = [line * 3 for line in ("what is it? it is. ", "user and assistant say what it is. ")]
    files = train_tokenizer(texts, 300, tmp_path / "tokenizer.json")
    plain = build_tokenizer("HFGPT2Tokenizer", files[0])
    tokenizer = build_tokenizer("HFGPT2Tokenizer", files[0], added_tokens=TOKENS)
    assert tokenizer.encode(TEXT)[0] == plain.vocab_size
    assert tokenizer.original_hash == plain.content_hash


@pytest.mark.parametrize("tokens", [["<|endoftext|>"], ["<|user|>", "<|user|>"], ["the"]])
def test_tokens_of_the_vocabulary_are_refused(tokens):
    assert build_tokenizer("HFTokenizer", GOLDEN).token_id("the") is not None
    with pytest.raises(TokenizerError):
        build_tokenizer("HFTokenizer", GOLDEN, added_tokens=tokens)


def test_vocabularies_that_cannot_grow_are_refused():
    with pytest.raises(TokenizerError):
        build_tokenizer("CharLevelTokenizer", None, added_tokens=TOKENS)
