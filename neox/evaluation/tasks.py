"""Evaluation tasks of a configuration and their text files, checked without a model.

No torch here: the launcher checks tasks before ranks start, and so does a dry run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from neox.config import NeoXConfig
from neox.corpus import read_documents
from neox.data import IndexedDataset, check_fits
from neox.errors import DataError, EvaluationError
from neox.evaluation.results import results_path
from neox.files import unwritable_parent
from neox.tokenizer import Tokenizer

KINDS = ("wikitext", "lambada", "perplexity")


@dataclass(frozen=True)
class FileTask:
    """Task of the form KIND=FILE. `name` is unique among all tasks and labels its scores."""

    kind: str
    path: str
    name: str


def parse_tasks(tasks: Sequence[str]) -> tuple[list[FileTask], list[str]]:
    """Split `eval_tasks` into file tasks (KIND=FILE) and tasks of lm-evaluation-harness.

    Raises:
        EvaluationError: For unknown kinds, missing files and repeated tasks; all of them in one message.
    """
    if not tasks:
        raise EvaluationError(
            "eval_tasks is empty: name tasks of lm-evaluation-harness, or text files as "
            "wikitext=FILE, lambada=FILE, perplexity=FILE"
        )
    pairs = [task.partition("=") for task in tasks]
    files = [(kind, path) for kind, equals, path in pairs if equals]
    harness = [kind for kind, equals, _ in pairs if not equals]
    problems = [
        f"eval_tasks: {kind} is not a kind of task; known kinds are {', '.join(KINDS)}"
        for kind, _ in files
        if kind not in KINDS
    ]
    problems += [
        f"eval_tasks: {kind}={path}: no such file"
        for kind, path in files
        if not Path(path).exists() and not is_token_file(path)
    ]
    problems += [
        f"eval_tasks: {kind}={path}: the .idx file, without which a .bin file cannot be read, is missing"
        for kind, path in files
        if path.endswith(".bin") and Path(path).exists() and not is_token_file(path)
    ]
    problems += [f"eval_tasks: {task} is listed {times} times" for task, times in Counter(tasks).items() if times > 1]
    if problems:
        raise EvaluationError("\n".join(problems))
    return [FileTask(*task, name) for task, name in zip(files, _names(files, harness), strict=True)], harness


def _names(files: Sequence[tuple[str, str]], harness: Sequence[str]) -> list[str]:
    """Return a unique name for each file task: its kind, extended by the file's name or its whole path if needed."""
    forms = [[kind, f"{kind}_{Path(path).stem}", f"{kind}_{Path(path).name}", f"{kind}_{path}"] for kind, path in files]
    taken = Counter([*harness, *(name for names in forms for name in set(names))])
    return [next((name for name in names if taken[name] == 1), names[-1]) for names in forms]


def check_file_tasks(config: NeoXConfig, tokenizer: Tokenizer | None) -> None:
    """Check everything about `eval_tasks` that needs neither a model nor the harness.

    Args:
        config: Configuration with `eval_tasks`.
        tokenizer: Tokenizer that token files must have been made with; None skips this check.

    Raises:
        EvaluationError: For unknown kinds, unreadable or empty files, an `eval_stride` longer than the window and an
            unwritable `eval_results_prefix`; all of them in one message.
    """
    keys, window = config.generation, config.model.seq_length
    tasks, _ = parse_tasks(keys.eval_tasks or ())
    problems = []
    if keys.eval_stride is not None and window is not None and keys.eval_stride > window:
        problems.append(f"eval_stride is {keys.eval_stride}: it must be between 1 and the window, {window} tokens")
    if (parent := unwritable_parent(results_path(keys.eval_results_prefix, datetime.now()))) is not None:
        problems.append(f"eval_results_prefix {keys.eval_results_prefix}: nothing can be written in {parent}")
    for task in tasks:
        try:
            _check_readable(task, tokenizer)
        except (EvaluationError, DataError) as error:
            problems.append(f"eval_tasks: {task.kind}: {error}")
    if problems:
        raise EvaluationError("\n".join(problems))


def _check_readable(task: FileTask, tokenizer: Tokenizer | None) -> None:
    """Read the beginning of a task's file. Raises EvaluationError or DataError."""
    if task.kind == "wikitext":
        read_text(task.path)
    elif task.kind == "lambada":
        next(read_passages(task.path))
    elif not is_token_file(task.path):
        next(read_corpus(task.path))
    elif tokenizer is not None:
        _open_token_file(task.path, tokenizer)


def read_text(path: str | Path) -> str:
    """Return a whole file as one text. Raises EvaluationError if it is not UTF-8 text or empty."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    if not text.strip():
        raise EvaluationError(f"{path}: contains no text")
    return text


def read_passages(path: str | Path) -> Iterator[str]:
    """Yield the passages of a file: the lines of a `.txt` file, the documents of any other.

    Raises:
        EvaluationError: For a file without passages.
        DataError: For a broken file.
    """
    texts = read_text(path).splitlines() if Path(path).suffix == ".txt" else read_corpus(path)
    passages = (text for text in texts if text.strip())
    message = f"{path}: contains no passages; expected one per line of a .txt file, or .jsonl with the key `text`"
    yield from _not_empty(passages, message)


def read_corpus(path: str | Path) -> Iterator[str]:
    """Yield the texts of a corpus. Raises EvaluationError if it has none, DataError if it is broken."""
    texts = (document.text for document in read_documents(path, skip_bad=None))
    yield from _not_empty(texts, f"{path}: contains no documents with text")


def _not_empty(texts: Iterator[str], message: str) -> Iterator[str]:
    first = next(texts, None)
    if first is None:
        raise EvaluationError(message)
    yield first
    yield from texts


def is_token_file(path: str | Path) -> bool:
    """Return whether a path names a `.bin` and `.idx` pair: either of them, or their common prefix."""
    return Path(f"{_prefix(path)}.idx").exists()


def token_documents(path: str | Path, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the token ids of each document after an end-of-document token, int32.

    Raises:
        EvaluationError: For ids outside the tokenizer's vocabulary, and for a file without tokens.
        DataError: For a broken file or one that another tokenizer made.
    """
    dataset, found = _open_token_file(path, tokenizer), False
    if dataset.num_tokens and (largest := int(dataset.tokens.max())) >= tokenizer.vocab_size:
        raise EvaluationError(
            f"{path}: contains token {largest}, but the tokenizer has {tokenizer.vocab_size} ids; the file was made "
            "with another tokenizer"
        )
    for first, last in zip(dataset.document_index[:-1], dataset.document_index[1:], strict=True):
        sequences = [dataset[sequence] for sequence in range(first, last)]
        if any(map(len, sequences)):
            found = True
            yield np.concatenate(([tokenizer.eod], *sequences), dtype=np.int32)
    if not found:
        raise EvaluationError(f"{path}: contains no documents with text")


def _open_token_file(path: str | Path, tokenizer: Tokenizer) -> IndexedDataset:
    dataset = IndexedDataset(_prefix(path))
    check_fits(dataset, vocab_size=tokenizer.vocab_size, tokenizer_hash=tokenizer.content_hash)
    return dataset


def _prefix(path: str | Path) -> str:
    return str(path).removesuffix(".bin").removesuffix(".idx")
