"""Tiny tokenizers in the forms of those that others publish."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = [
    *("the", "capital", "of", "France", "is", "Paris", "and", "a", "dog", "ran", "over", "to", "see", "what", "people"),
    *("talk", "about", "today", "in", "this", "old", "town", "how", "many", "yes", "music", "river", "house"),
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def corpus(count: int = 150) -> list[str]:
    """Return sentences of WORDS."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=8)).capitalize() + draw.choice(".?!") for _ in range(count)]


def _trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def _sentencepiece_bpe() -> Tokenizer:
    """BPE with bytes as fallback and no pre-tokenizer, as converted from SentencePiece; without a normalizer."""
    specials = ["<unk>", "<s>", "</s>", "<|end|>"]
    first = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    first.normalizer = normalizers.Replace(" ", "▁")
    first.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    _trained(first, trainers.BpeTrainer(vocab_size=360, special_tokens=specials + BYTES, show_progress=False))
    model = json.loads(first.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    made = Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return made


def llama2() -> Tokenizer:
    """Llama 2's form: a blank before each text, which the decoder removes, and `<s>`."""
    made = _sentencepiece_bpe()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_template(made, "<s> $A")


def gemma() -> Tokenizer:
    """Gemma's form: the same without the first blank."""
    made = _sentencepiece_bpe()
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return with_template(made, "<s> $A")


def _byte_level(prefix_space: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    made.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    return _trained(made, trainer)


def llama3() -> Tokenizer:
    """Llama 3's form: bytes, and a token before each text."""
    made = with_template(_byte_level(), "<s> $A")
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), made.post_processor])
    return made


def neox() -> Tokenizer:
    """GPT-NeoX's form: bytes, and nothing around a text."""
    return _byte_level()


def prefix_space() -> Tokenizer:
    """RoBERTa's form: bytes, and a blank before each text."""
    return _byte_level(prefix_space=True)


def both_ends() -> Tokenizer:
    """Llama 3's form with an end after each text."""
    return with_template(_byte_level(), "<s> $A </s>")


def unigram(scheme: str) -> Tokenizer:
    """T5's form: Unigram with a blank at the start of each text, of the whole or never, and an end after it."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    specials = ["<pad>", "</s>", "<unk>", "<s>", "<|end|>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=specials, unk_token="<unk>", show_progress=False, initial_alphabet=[":", ","]
    )
    return with_template(_trained(made, trainer), "$A </s>")


def word_piece() -> Tokenizer:
    """BERT's form with another end of documents."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    specials = ["[UNK]", "<s>", "</s>", "<|end|>"]
    return _trained(made, trainers.WordPieceTrainer(vocab_size=150, special_tokens=specials, show_progress=False))


def with_template(tokenizer: Tokenizer, single: str) -> Tokenizer:
    """Let a tokenizer write special tokens around each text."""
    specials = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>") if token in single]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B:1", special_tokens=specials
    )
    return tokenizer


FORMS = {
    "llama2": llama2,
    "llama3": llama3,
    "gemma": gemma,
    "neox": neox,
    "prefix_space": prefix_space,
    "both_ends": both_ends,
    "unigram_first": lambda: unigram("first"),
    "unigram_always": lambda: unigram("always"),
    "unigram_never": lambda: unigram("never"),
    "word_piece": word_piece,
}


def save(tokenizer: Tokenizer, directory: Path, **config: Any) -> Path:
    """Write `tokenizer.json` and its configuration; return the path of the former."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    keys = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**keys, **config}))
    return directory / "tokenizer.json"
