"""Training of tokenizers: byte-level BPE as in GPT-NeoX-20B or GPT-2, SentencePiece, and BERT's WordPiece."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal, NamedTuple, get_args

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from neox.errors import TokenizerError, needs_package, os_errors, refusals
from neox.files import atomic_write, check_writable
from neox.log import get_logger, progress
from neox.tokenizer.base import END_OF_DOCUMENT, PADDING
from neox.tokenizer.huggingface import BERT_SPECIALS, BERT_UNKNOWN, word_piece_backend

TokenizerKind = Literal[
    "byte-level-bpe",
    "gpt2",
    "sentencepiece",
    "sentencepiece-bert",
    "sentencepiece-char",
    "wordpiece",
    "wordpiece-cased",
]
TOKENIZER_KINDS: tuple[TokenizerKind, ...] = get_args(TokenizerKind)

_BYTES_AND_SPECIALS = 256 + 2
_PIECE_CHARS = 100_000

log = get_logger(__name__)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, out_path: str | Path, kind: TokenizerKind = "byte-level-bpe"
) -> tuple[Path, ...]:
    """Train a tokenizer and write its files. A file appears only when it is complete.

    The same texts in the same order give the same files. Memory holds each distinct word once for byte-level kinds, and
    a sample of sentences for SentencePiece. Ctrl-C ends the training at once. Progress is shown on stderr.

    | kind | for the tokenizer type | files |
    |---|---|---|
    | `byte-level-bpe` | HFTokenizer | `tokenizer.json` as of GPT-NeoX-20B (NFC, `<|endoftext|>` 0, `<|padding|>` 1) |
    | `gpt2` | GPT2BPETokenizer, HFGPT2Tokenizer | directory with `vocab.json` (`<|endoftext|>` last) and `merges.txt` |
    | `sentencepiece` | SPMTokenizer | `.model` |
    | `sentencepiece-bert` | SPMTokenizer | `.model` with <CLS>, <SEP>, <MASK> and <PAD> for masked language models |
    | `sentencepiece-char` | SPMTokenizer | `.model` with frequent characters as pieces, for Chinese text |
    | `wordpiece`, `wordpiece-cased` | BertWordPieceLowerCase, BertWordPieceCase | `vocab.txt`, one token per line |

    The pieces of `sentencepiece-char` include a symbol for the newline, and 256 bytes that represent all other
    characters.

    Args:
        texts: Texts to train on. They are read once, one at a time.
        vocab_size: Number of ids. If the texts give fewer, a warning names both numbers.
        out_path: File or directory to write, according to the kind.
        kind: Kind of tokenizer, see the table.

    Returns:
        Paths of the written files.

    Raises:
        TokenizerError: If the vocabulary cannot hold the 256 bytes and the special tokens, the files cannot be written
            (this is checked before a text is read), or there is no text.
    """
    if kind not in TOKENIZER_KINDS:
        raise TokenizerError(f"tokenizer kind {kind!r} is unknown; known: {', '.join(TOKENIZER_KINDS)}")
    if kind in ("byte-level-bpe", "gpt2") and vocab_size < _BYTES_AND_SPECIALS:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: a byte-level vocabulary starts with 256 bytes and 2 special tokens"
        )
    files = tokenizer_files(Path(out_path), kind)
    for file in files:
        with refusals(), os_errors(TokenizerError, f"{file}: cannot be written, nothing has been trained"):
            check_writable(file)
            if file.is_dir():
                raise IsADirectoryError(0, "a directory has this name")
    trained = _trainer(kind)(_TextSource(texts), vocab_size)
    if trained.vocab_size < vocab_size:
        log.warning(
            "the texts give a vocabulary of %s ids, not the %s asked for", f"{trained.vocab_size:,}", f"{vocab_size:,}"
        )
    for file, content in zip(files, trained.contents, strict=True):
        with os_errors(TokenizerError, f"{file}: cannot be written"), atomic_write(file) as stream:
            stream.write(content)
    return files


def tokenizer_files(out_path: Path, kind: TokenizerKind) -> tuple[Path, ...]:
    """Return the paths of the files that `train_tokenizer` writes."""
    if kind == "gpt2":
        return (out_path / "vocab.json", out_path / "merges.txt")
    return (out_path,)


class _TrainedTokenizer(NamedTuple):
    """Result of a training.

    Attributes:
        contents: Content of each file.
        vocab_size: Number of ids.
    """

    contents: list[bytes]
    vocab_size: int


def _trainer(kind: TokenizerKind) -> Callable[[_TextSource, int], _TrainedTokenizer]:
    """Return the function that trains a kind of tokenizer. It takes the texts and the number of ids."""
    trainers_of_kinds: dict[TokenizerKind, Callable[[_TextSource, int], _TrainedTokenizer]] = {
        "byte-level-bpe": _train_20b,
        "gpt2": _train_gpt2,
        "sentencepiece": partial(_train_sentencepiece, model_type="bpe", user_defined_symbols=[END_OF_DOCUMENT]),
        "sentencepiece-bert": partial(
            _train_sentencepiece,
            model_type="bpe",
            user_defined_symbols=[END_OF_DOCUMENT, "<CLS>", "<SEP>", "<MASK>", "<PAD>"],
        ),
        "sentencepiece-char": partial(
            _train_sentencepiece,
            model_type="char",
            user_defined_symbols=[END_OF_DOCUMENT, "\n"],
            required_chars="\u2581",  # represents the blank, which Chinese text may lack
            add_dummy_prefix=False,
            hard_vocab_limit=False,
        ),
        "wordpiece": partial(_train_wordpiece, lowercase=True),
        "wordpiece-cased": partial(_train_wordpiece, lowercase=False),
    }
    return trainers_of_kinds[kind]


def _train_20b(texts: _TextSource, vocab_size: int) -> _TrainedTokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    _run_bpe(backend, texts, vocab_size, [END_OF_DOCUMENT, PADDING])
    return _TrainedTokenizer([backend.to_str(pretty=True).encode()], backend.get_vocab_size())


def _train_gpt2(texts: _TextSource, vocab_size: int) -> _TrainedTokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _run_bpe(backend, texts, vocab_size - 1, [])
    model = json.loads(backend.to_str())["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    vocab[END_OF_DOCUMENT] = len(vocab)
    lines = ["#version: 0.2\n"]
    for pair in model["merges"]:
        if not isinstance(pair, str):  # `tokenizers` from 0.20 on
            pair = " ".join(pair)
        lines.append(f"{pair}\n")
    return _TrainedTokenizer([json.dumps(vocab, ensure_ascii=False).encode(), "".join(lines).encode()], len(vocab))


def _run_bpe(backend: tokenizers.Tokenizer, texts: _TextSource, vocab_size: int, specials: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    _run(lambda: backend.train_from_iterator(texts, trainer), texts, bars=sys.stderr.isatty())


def _train_wordpiece(texts: _TextSource, vocab_size: int, *, lowercase: bool) -> _TrainedTokenizer:
    backend = word_piece_backend(models.WordPiece(unk_token=BERT_UNKNOWN), lowercase=lowercase)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=list(BERT_SPECIALS.values()), show_progress=sys.stderr.isatty()
    )
    _run(lambda: backend.train_from_iterator(texts, trainer), texts, bars=sys.stderr.isatty())
    found = backend.get_vocab_size()
    if found > vocab_size:
        raise TokenizerError(f"vocab_size {vocab_size} is too small: the characters of the texts need {found}")
    vocabulary = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    return _TrainedTokenizer(["".join(f"{token}\n" for token, _ in vocabulary).encode()], found)


def _train_sentencepiece(texts: _TextSource, vocab_size: int, **options: Any) -> _TrainedTokenizer:
    with needs_package(TokenizerError, "training of SentencePiece", "sentencepiece", "requirements-corpus.txt"):
        import sentencepiece
    model = io.BytesIO()

    def train() -> None:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            input_sentence_size=2_000_000,
            minloglevel=2,
            **options,
        )

    try:
        _run(train, texts)
    except RuntimeError as error:
        texts.check()
        raise TokenizerError(f"SentencePiece could not train {vocab_size} pieces: {error}") from error
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return _TrainedTokenizer([model.getvalue()], processor.get_piece_size())


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of texts, except blank ones."""
    for text in texts:
        for line in text.splitlines():
            if line.strip():
                yield line


def _run(train: Callable[[], None], texts: _TextSource, *, bars: bool = False) -> None:
    """Run a native trainer in another thread, so that this thread can show progress and react to signals.

    Args:
        train: Function that reads `texts`. It does not block the interpreter while it works.
        texts: Texts of the trainer. If this thread is interrupted, they end, and the process can exit although `train`
            is still running.
        bars: Whether the trainer shows its own progress.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            train()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)
        finally:
            texts.ended.set()

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        texts.ended.wait()
        if thread.is_alive():
            log.info("%s characters have been read; the vocabulary is being trained", f"{texts.characters:,}")
        if bars:
            thread.join()
        elif thread.is_alive():
            with progress("training", unit="s") as seconds:
                while thread.is_alive():
                    thread.join(1)
                    seconds.update(1)
    except BaseException:
        texts.stopped = True
        thread.join(0.1)  # a thread that is reading must not call Python while the interpreter exits
        raise
    future.result()
    texts.check()


class _TextSource:
    """Texts for a trainer, in pieces of bounded size, because a trainer copies each piece several times.

    Attributes:
        texts: The texts.
        characters: Number of characters read so far.
        ended: Event that is set when all texts have been read.
        stopped: Whether reading must stop.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = texts
        self.characters = 0
        self.ended = Event()
        self.stopped = False

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            if self.stopped:
                return
            self.characters += len(text)

            # A long text is cut at ends of lines, so that no word is divided. A text of one line is not cut.
            start = 0
            while len(text) - start > _PIECE_CHARS:
                end = text.find("\n", start + _PIECE_CHARS)
                if end < 0:
                    break
                yield text[start:end]
                start = end
            yield text[start:]
        self.ended.set()

    def check(self) -> None:
        """Raise TokenizerError if there was no text."""
        if not self.characters:
            raise TokenizerError("there is no text to train a tokenizer on: every input is empty")
