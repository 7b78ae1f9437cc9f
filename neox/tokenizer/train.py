"""Training of tokenizers: byte-level BPE like GPT-NeoX-20B's, GPT-2's two files, or SentencePiece."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from neox.errors import TokenizerError, install_command
from neox.files import atomic_write, write_text
from neox.tokenizer.base import END_OF_DOCUMENT, PADDING

TokenizerKind = Literal["byte-level-bpe", "gpt2", "sentencepiece"]
TOKENIZER_KINDS: tuple[TokenizerKind, ...] = ("byte-level-bpe", "gpt2", "sentencepiece")

_BYTES_AND_SPECIALS = 256 + 2
_PIECE_CHARS = 100_000


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, out_path: str | Path, kind: TokenizerKind = "byte-level-bpe"
) -> tuple[Path, ...]:
    """Train a tokenizer and write its files atomically.

    The same texts in the same order give the same files. Byte-level kinds hold each distinct pre-token in memory once,
    SentencePiece its sample of sentences.

    Args:
        texts: Read once, one at a time.
        vocab_size: Number of ids.
        out_path: File or directory to write, by kind.
        kind: `byte-level-bpe` writes a `tokenizer.json` like GPT-NeoX-20B's (NFC, ByteLevel, `<|endoftext|>` 0,
            `<|padding|>` 1) for HFTokenizer. `gpt2` writes `vocab.json` and `merges.txt` into a directory (no
            normalizer, `<|endoftext|>` last) for GPT2BPETokenizer and HFGPT2Tokenizer. `sentencepiece` writes a
            `.model` for SPMTokenizer.

    Returns:
        The files written.

    Raises:
        TokenizerError: If the vocabulary cannot hold the 256 bytes and the special tokens, or there is no text.
    """
    if kind not in TOKENIZER_KINDS:
        raise TokenizerError(f"tokenizer kind {kind!r} is unknown; known: {', '.join(TOKENIZER_KINDS)}")
    if kind != "sentencepiece" and vocab_size < _BYTES_AND_SPECIALS:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: a byte-level vocabulary starts with 256 bytes and 2 special tokens"
        )
    out = Path(out_path)
    if kind == "byte-level-bpe":
        return (_train_20b(texts, vocab_size, out),)
    if kind == "gpt2":
        return _train_gpt2(texts, vocab_size, out)
    return (_train_sentencepiece(texts, vocab_size, out),)


def _train_20b(texts: Iterable[str], vocab_size: int, out: Path) -> Path:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    _run_bpe(backend, texts, vocab_size, [END_OF_DOCUMENT, PADDING])
    write_text(out, backend.to_str(pretty=True))
    return out


def _train_gpt2(texts: Iterable[str], vocab_size: int, out: Path) -> tuple[Path, ...]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _run_bpe(backend, texts, vocab_size - 1, [])
    model = json.loads(backend.to_str())["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    vocab[END_OF_DOCUMENT] = len(vocab)
    merges = "".join(f"{pair if isinstance(pair, str) else ' '.join(pair)}\n" for pair in model["merges"])
    write_text(out / "vocab.json", json.dumps(vocab, ensure_ascii=False))
    write_text(out / "merges.txt", "#version: 0.2\n" + merges)
    return out / "vocab.json", out / "merges.txt"


def _run_bpe(backend: tokenizers.Tokenizer, texts: Iterable[str], vocab_size: int, specials: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    counted = _Counted(texts)
    backend.train_from_iterator(counted, trainer)
    counted.check()


def _train_sentencepiece(texts: Iterable[str], vocab_size: int, out: Path) -> Path:
    try:
        import sentencepiece
    except ImportError as error:
        raise TokenizerError(
            f"kind sentencepiece needs the package sentencepiece: {install_command('requirements-corpus.txt')}"
        ) from error
    counted = _Counted(texts)
    try:
        with atomic_write(out) as stream:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(line for text in counted for line in text.splitlines() if line.strip()),
                model_writer=stream,
                vocab_size=vocab_size,
                model_type="bpe",
                byte_fallback=True,
                character_coverage=0.9995,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                user_defined_symbols=[END_OF_DOCUMENT],
                input_sentence_size=2_000_000,
                minloglevel=2,
            )
            counted.check()
    except RuntimeError as error:
        counted.check()
        raise TokenizerError(f"SentencePiece could not train {vocab_size} pieces: {error}") from error
    return out


class _Counted:
    """Texts in pieces of bounded size (a trainer copies each piece several times), with a count of characters."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts, self.characters = texts, 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.characters += len(text)
            yield from _pieces(text)

    def check(self) -> None:
        if not self.characters:
            raise TokenizerError("there is no text to train a tokenizer on: every input is empty")


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text at ends of lines, so that no word is cut in two (a text without lines stays whole)."""
    start = 0
    while len(text) - start > _PIECE_CHARS:
        end = text.find("\n", start + _PIECE_CHARS)
        if end < 0:
            break
        yield text[start:end]
        start = end
    yield text[start:] if start else text
