"""Evaluation tasks of a configuration and their text files, checked without a model.

No torch here: the launcher checks tasks before ranks start, and so does a dry run.
"""

from __future__ import annotations

import glob
import importlib.util
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import yaml

from neox.config import NeoXConfig
from neox.corpus import read_documents
from neox.corpus.contents import whole_text
from neox.corpus.document import CorruptInput
from neox.data import IndexedDataset, check_fits, read_sidecar
from neox.errors import DataError, EvaluationError
from neox.evaluation.results import results_path, task_scalar
from neox.files import unwritable_parent
from neox.problems import Missing, Problem
from neox.tokenizer import Tokenizer, positions

KINDS = ("wikitext", "lambada", "perplexity", "needle")
_LARGEST_TASK_FILE = 200_000
"""Bytes; larger files of the harness's tasks hold data."""
TASK_SCORES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "wikitext": ("ppl", "word_ppl", "loss", "bits_per_byte"),
        "lambada": ("acc", "strict_acc", "ppl"),
        "perplexity": ("ppl", "loss", "word_ppl", "byte_ppl", "bits_per_byte"),
        "needle": ("acc", "ppl", "acc_*_*"),  # of each length and depth
    }
)
"""Names or patterns of the scores of each kind; token files have no text."""
_OF_TEXT = ("word_ppl", "byte_ppl", "bits_per_byte")
_NEEDLE = "needle"
"""The kind whose file is the picture that it draws."""


@dataclass(frozen=True)
class FileTask:
    """Task of the form KIND=FILE.

    Attributes:
        kind: One of `KINDS`.
        path: Path of the file.
        name: Label of its scores, unique among all tasks.
    """

    kind: str
    path: str
    name: str


def parse_tasks(tasks: Sequence[str], *, files_here: bool = True) -> tuple[list[FileTask], list[str]]:
    """Split `eval_tasks` into file tasks (KIND=FILE) and names of tasks of lm-evaluation-harness.

    Args:
        tasks: Tasks in the form of `eval_tasks`.
        files_here: Whether files must be on this machine.

    Raises:
        EvaluationError: For unknown kinds, missing files and repeated tasks, all of them in one message.
    """
    problems = []
    for problem in _task_problems(tasks):
        if files_here or not isinstance(problem, Missing):
            problems.append(str(problem))
    if problems:
        raise EvaluationError("\n".join(problems))
    return _split(tasks)


def _task_problems(tasks: Sequence[str]) -> list[Problem]:
    """Return what is wrong with tasks as far as it shows without reading a file; `Missing` for files not here."""
    if not tasks:
        message = (
            "eval_tasks is empty: name tasks of lm-evaluation-harness, or text files as "
            "wikitext=FILE, lambada=FILE, perplexity=FILE, or needle=PICTURE.svg"
        )
        return [Problem(("eval_tasks",), message)]
    problems: list[Problem] = []
    for task in tasks:
        kind, equals, path = task.partition("=")
        if equals:
            problems += _file_problems(kind, path)
    for task, times in Counter(tasks).items():
        if times > 1:
            problems.append(Problem(("eval_tasks",), f"eval_tasks: {task} is listed {times} times"))
    return problems


def _split(tasks: Sequence[str]) -> tuple[list[FileTask], list[str]]:
    """Return the file tasks, of whatever kind, and the names of the others."""
    files = []
    harness = []
    for task in tasks:
        kind, equals, path = task.partition("=")
        if equals:
            files.append((kind, path))
        else:
            harness.append(task)
    names = _unique_names(files, harness)
    return [FileTask(kind, path, name) for (kind, path), name in zip(files, names, strict=True)], harness


def _file_problems(kind: str, path: str) -> Iterator[Problem]:
    """Yield the reasons why a file task cannot be run, as far as they show without reading the file."""
    keys = ("eval_tasks",)
    task = f"eval_tasks: {kind}={path}"
    if kind not in KINDS:
        yield Problem(keys, f"eval_tasks: {kind} is not a kind of task; known kinds are {', '.join(KINDS)}")
    if kind == _NEEDLE:
        if not path.endswith(".svg"):
            yield Problem(keys, f"{task}: give the picture to draw, a file that ends in .svg")
        return
    if is_token_file(path):
        return
    if not Path(path).exists():
        yield Missing(keys, f"{task}: no such file")
    elif path.endswith(".bin"):
        yield Problem(keys, f"{task}: the .idx file, without which a .bin file cannot be read, is missing")


def _unique_names(files: Sequence[tuple[str, str]], harness: Sequence[str]) -> list[str]:
    """Return a name for each file task that no other task has.

    It is the first unique one of: its kind, its kind with the file's name without and with ending, its kind with the
    path.

    Args:
        files: (kind, path) of the file tasks.
        harness: Names of the other tasks.
    """
    candidates = []
    taken = Counter(harness)
    for kind, path in files:
        names = [kind, f"{kind}_{Path(path).stem}", f"{kind}_{Path(path).name}", f"{kind}_{path}"]
        candidates.append(names)
        taken.update(set(names))
    chosen = []
    for names in candidates:
        unique = [name for name in names if taken[name] == 1]
        chosen.append(unique[0] if unique else names[-1])
    return chosen


def check_file_tasks(config: NeoXConfig, tokenizer: Tokenizer | None) -> None:
    """Check everything about `eval_tasks` that needs no model, and of the harness only its files.

    Args:
        config: Configuration with `eval_tasks`.
        tokenizer: Tokenizer that token files must have been made with; None skips this check.

    Raises:
        EvaluationError: For everything that `eval_problems` returns, in one message.
    """
    problems = eval_problems(config, tokenizer)
    if problems:
        raise EvaluationError("\n".join(map(str, problems)))


def eval_problems(config: NeoXConfig, tokenizer: Tokenizer | None) -> list[Problem]:
    """Return the problems of `eval_tasks` and the keys around it. Arguments as for `check_file_tasks`.

    Returns:
        Unknown kinds and tasks, unreadable or empty files, and an `eval_stride` longer than the window. Files that are
        not on this machine, and directories that cannot be written on it, are `Missing`.
    """
    keys = config.generation
    window = config.model.seq_length
    problems = _task_problems(keys.eval_tasks or ())
    tasks, names = _split(keys.eval_tasks or ())
    for name in unknown_harness_tasks(names):
        message = (
            f"eval_tasks: task {name!r} is unknown to lm-evaluation-harness (`lm-eval ls tasks` lists all names; text "
            "files are given as wikitext=FILE, lambada=FILE, perplexity=FILE)"
        )
        problems.append(Problem(("eval_tasks",), message))
    if keys.eval_stride is not None and window is not None and keys.eval_stride > window:
        message = f"eval_stride is {keys.eval_stride}: it must be between 1 and the window, {window} tokens"
        problems.append(Problem(("eval_stride",), message))
    parent = unwritable_parent(results_path(keys.eval_results_prefix, datetime.now()))
    if parent is not None:
        message = f"eval_results_prefix {keys.eval_results_prefix}: nothing can be written in {parent}"
        problems.append(Missing(("eval_results_prefix",), message))
    for task in tasks:
        if list(_file_problems(task.kind, task.path)):
            continue
        try:
            problems += _unwritable_picture(task)
            _check_readable(task, tokenizer)
        except (EvaluationError, DataError) as error:
            problems.append(Problem(("eval_tasks",), f"eval_tasks: {task.kind}: {error}"))
    return problems


def _unwritable_picture(task: FileTask) -> Iterator[Problem]:
    """Yield the problem that the picture of `needle` cannot be written on this machine."""
    if task.kind == _NEEDLE and (parent := unwritable_parent(Path(task.path))) is not None:
        message = f"eval_tasks: {task.kind}: {task.path}: nothing can be written in {parent}"
        yield Missing(("eval_tasks",), message)


def file_task_scalars(tasks: Sequence[FileTask]) -> list[str]:
    """Return the names of the scalars that file tasks report, `eval/TASK_SCORE`, some of them as patterns."""
    names = []
    for task in tasks:
        for score in TASK_SCORES[task.kind]:
            if task.kind == "perplexity" and score in _OF_TEXT and is_token_file(task.path):
                continue
            name = glob.escape(task.name) if "*" in score else task.name
            names.append(task_scalar(name, score))
    return names


def files_of_scalar(tasks: Sequence[str], scalar: str) -> list[str]:
    """Return those of the tasks that report a scalar `eval/TASK_SCORE` that are files: texts, and tasks in YAML.

    Of several that may report it, as `mmlu` and `mmlu_anatomy`, it is the one with the longest name.

    Args:
        tasks: Tasks in the form of `eval_tasks`.
        scalar: Name of the scalar.
    """
    files, harness = _split(tasks)
    titles: dict[str, list[str]] = {}  # patterns of the names of what a task reports
    are_files = {}
    for file in files:
        titles[f"{file.kind}={file.path}"] = [glob.escape(file.name)]
        are_files[f"{file.kind}={file.path}"] = True
    for name in harness:
        are_files[name] = name.endswith((".yaml", ".yml"))
        if are_files[name]:
            titles[name] = _names_in_task_file(Path(name))
        else:
            titles[name] = [name if _is_pattern(name) else glob.escape(name)]
    found: list[str] = []
    longest = 0
    for task, patterns in titles.items():
        fitting = [len(pattern) for pattern in patterns if fnmatchcase(scalar, task_scalar(pattern, "*"))]
        if fitting and max(fitting) > longest:
            longest = max(fitting)
            found = []
        if fitting and max(fitting) == longest:
            found.append(task)
    return [task for task in found if are_files[task]]


def _names_in_task_file(file: Path) -> list[str]:
    """Return patterns of the names of the tasks and groups that a YAML file of the harness defines.

    The harness reports by the keys `task` and `group`, whatever the file is called; a file may take them from one that
    it includes. A file that does not tell its names may report any.
    """
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _TaskFileLoader)  # noqa: S506 (a SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return ["*"]
    if not isinstance(content, dict):
        return ["*"]
    names: list[str] = []
    tasks = content.get("task")
    for item in [content.get("group"), *(tasks if isinstance(tasks, list) else [tasks])]:
        name = item.get("task") if isinstance(item, dict) else item
        if isinstance(name, str):
            names.append(glob.escape(name))
    included = content.get("include")
    if not names and isinstance(included, str):
        return _names_in_task_file(file.parent / included)
    return names or ["*"]


class _TaskFileLoader(yaml.SafeLoader):
    """Loader of the harness's YAML files, whose tag `!function` names Python code, which is not loaded here."""


_TaskFileLoader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _is_pattern(name: str) -> bool:
    """Return whether a name stands for all tasks of the harness that it fits."""
    return bool(set("*?[") & set(name))


class TaskScalars(NamedTuple):
    """Scalars that tasks report.

    Attributes:
        known: Their names `eval/TASK_SCORE`, and patterns of names, as `eval/GROUP_*` for means over a group's tasks.
        possible: Patterns `eval/TASK_*` for tasks of the harness, whose results may hold scores that they do not list.
    """

    known: list[str]
    possible: list[str]


def is_scalar_of(name: str, known: Sequence[str]) -> bool:
    """Return whether a scalar is one of known names or fits one of known patterns, such as `eval/GROUP_*`."""
    return name in known or any(map(partial(fnmatchcase, name), known))


def unknown_scalar(name: str, known: Sequence[str]) -> str:
    """Return that no evaluation reports a scalar, and names that are close to it, or without such all of its group."""
    near = get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f"{name} is no scalar of this run's evaluations; did you mean {', '.join(near)}?"
    group = name.partition("/")[0]
    of_group = [other for other in known if other.startswith(f"{group}/")] or known
    return f"{name} is no scalar of this run's evaluations, which are {', '.join(of_group)}"


def unknown_harness_tasks(names: Sequence[str]) -> list[str]:
    """Return the names that no file of the installed lm-evaluation-harness contains as words; none without the harness.

    Importing the harness and indexing its tasks takes many seconds. So a start only looks for misspelt names, and the
    ranks check the rest.
    """
    unknown = set()
    for name in names:
        if not _is_pattern(name) and not name.endswith((".yaml", ".yml")):
            unknown.add(name)
    package = importlib.util.find_spec("lm_eval")
    if package is None or package.origin is None or not unknown:
        return []
    for path in (Path(package.origin).parent / "tasks").rglob("*"):
        if path.is_file() and path.stat().st_size < _LARGEST_TASK_FILE:  # names also stand in files without an ending
            text = path.read_text(encoding="utf-8", errors="replace")
            unknown -= {name for name in unknown if name in text and _is_word(name, text)}
            if not unknown:
                break
    return [name for name in names if name in unknown]


def _is_word(name: str, text: str) -> bool:
    """Return whether a text has a name that is not a part of a longer one, as `lambada_open` is of `lambada_openai`."""
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


def _check_readable(task: FileTask, tokenizer: Tokenizer | None) -> None:
    """Read the beginning of a task's file, if it has one. Raises EvaluationError or DataError."""
    if task.kind == _NEEDLE:
        return
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
        text = whole_text(Path(path).read_bytes())
    except (OSError, CorruptInput) as error:
        raise EvaluationError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    if not text.strip():
        raise EvaluationError(f"{path}: contains no text")
    return text


def read_passages(path: str | Path) -> Iterator[str]:
    """Yield the passages of a file: the lines of a `.txt` file, or the documents of any other file.

    Raises:
        EvaluationError: For a file without passages.
        DataError: For a broken file.
    """
    is_empty = True
    texts = read_text(path).splitlines() if Path(path).suffix == ".txt" else read_corpus(path)
    for text in texts:
        if text.strip():
            is_empty = False
            yield text
    if is_empty:
        raise EvaluationError(
            f"{path}: contains no passages; expected one per line of a .txt file, or .jsonl with the key `text`"
        )


def read_corpus(path: str | Path) -> Iterator[str]:
    """Yield the texts of a corpus. Raises EvaluationError if it has none, DataError if it is broken."""
    is_empty = True
    for document in read_documents(path, skip_bad=None):
        is_empty = False
        yield document.text
    if is_empty:
        raise EvaluationError(f"{path}: contains no documents with text")


def is_token_file(path: str | Path) -> bool:
    """Return whether a path names a pair of a `.bin` and an `.idx` file: either of them, or their common prefix."""
    return Path(f"{_prefix(path)}.idx").exists()


def token_documents(path: str | Path, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the token ids of each document, int32, as those of a text that is scored from its first token on.

    They follow `positions.before_first`, and the end of the document is left out. A file whose sidecar says that its
    documents do not end with the end-of-document token keeps one that is text.

    Raises:
        EvaluationError: For ids outside the tokenizer's vocabulary, and for a file without tokens.
        DataError: For a broken file or one that another tokenizer made.
    """
    dataset = _open_token_file(path, tokenizer)
    if dataset.num_tokens == 0:
        raise EvaluationError(f"{path}: contains no documents with text")
    largest = int(dataset.tokens[:].max())
    if largest >= tokenizer.vocab_size:
        raise EvaluationError(
            f"{path}: contains token {largest}, but the tokenizer has {tokenizer.vocab_size} ids; the file was made "
            "with another tokenizer"
        )
    sidecar = read_sidecar(dataset.prefix)
    has_ends = sidecar is None or sidecar.append_eod
    beginning = np.array(positions.before_first(tokenizer), dtype=np.int32)
    for first, last in itertools.pairwise(dataset.document_index):
        sequences = [dataset[sequence] for sequence in range(first, last)]
        if not any(map(len, sequences)):
            continue
        ids = np.concatenate(sequences, dtype=np.int32)
        if has_ends and ids[-1] == tokenizer.eod:
            ids = ids[:-1]
        after = tokenizer.after_text
        if after and np.array_equal(ids[-len(after) :], after):
            ids = ids[: -len(after)]
        if not np.array_equal(ids[: len(beginning)], beginning):
            ids = np.concatenate((beginning, ids))
        if len(ids) > len(beginning):
            yield ids


def _open_token_file(path: str | Path, tokenizer: Tokenizer) -> IndexedDataset:
    """Open a token file. Raises DataError if it is broken or another tokenizer made it."""
    dataset = IndexedDataset(_prefix(path))
    check_fits(dataset, vocab_size=tokenizer.vocab_size, tokenizer_hashes=tokenizer.known_hashes)
    return dataset


def _prefix(path: str | Path) -> str:
    """Return the common prefix of a `.bin` and an `.idx` file."""
    return str(path).removesuffix(".bin").removesuffix(".idx")
