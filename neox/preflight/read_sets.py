"""Checks by the launcher of the sets that a training reads: parts of a dataset, whole sets, answers, teacher's logits.

Files that are missing, or that no run could use, are reported elsewhere (`neox.preflight.data_checks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from neox.config import NeoXConfig
from neox.config.sections.data import split_shares
from neox.data.pass_amounts import samples_of_set, usable_answers
from neox.data.samples.gpt_dataset import split_documents
from neox.data.token_files.indexed_dataset import IndexedDataset
from neox.errors import DataError
from neox.plan import used_vocabulary
from neox.problems import Missing, Problem
from neox.storage import is_remote

if TYPE_CHECKING:
    from neox.tokenizer import Tokenizer

_TEACHER = "teacher_logits"


class EvaluationFiles(NamedTuple):
    """One dataset of an evaluation.

    Attributes:
        name: Name of the set, as ranks call it.
        key: Key that names it.
        prefix: Prefix of its token files.
        labels: Prefix of those of its labels, if it has any.
        part: Number of the part of `split` whose documents it has; None for all documents.
    """

    name: str
    key: str
    prefix: str
    labels: str | None = None
    part: int | None = None


def read_set_problems(config: NeoXConfig, tokenizer: Tokenizer) -> list[Problem]:
    """Return why a training with readable token files would find nothing to read in one of its sets."""
    return [
        *_training_problems(config),
        *_whole_set_problems(config),
        *_answer_problems(config),
        *_teacher_problems(config, tokenizer),
    ]


def _training_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the training data without a document or a sample."""
    data = config.data
    if config.preferences.on_preferences:
        return
    least = 1
    if data.data_stages:  # their samples follow from one pass, so each dataset holds one
        least = (config.model.seq_length or 0) + 1
    for prefix in data.train_data_paths or filter(None, (data.data_path,)):
        if not _is_here(prefix):
            continue
        key = "train_data_paths" if data.train_data_paths is not None else "data_path"
        tokens = IndexedDataset(prefix, data.data_impl).num_tokens
        if tokens < least:
            message = f"{key}: {prefix} holds {tokens} tokens, not one sample; use more data"
            yield config.problem_about(message, key, "seq_length")
            continue
        has_share = data.train_data_paths is None and split_shares(data.split)[0] > 0  # a rule of the plan
        if has_share and not _documents_of_part(config, prefix, 0):
            rule = "gives training none of the documents of data_path (a .txt is one); raise its first part"
            yield config.problem("split", rule, "data_path")


def _whole_set_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the sets that `eval_iters: all` would read and that hold no sample."""
    length = config.model.seq_length
    if config.training.eval_iters != "all" or length is None or config.preferences.on_preferences:
        return
    for files in _evaluation_files(config):
        try:
            if samples_of_set(files.prefix, files.labels, config.data, length, split=files.part) != 0:
                continue
            reason = f"the {files.name} documents of {files.prefix} hold no sample of seq_length {length:,}"
        except DataError as error:
            reason = str(error)
        yield config.problem("eval_iters", f"reads whole sets, and {reason}", files.key, "seq_length")


def _answer_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield why a training cannot compare the answers of its files."""
    keys = config.preferences
    if not keys.on_preferences or config.model.seq_length is None:
        return
    for answers in keys.answers(config.data):
        files = (answers.paths, answers.others, answers.labels, answers.other_labels, answers.rewards)
        prefixes = [prefix for paths in files for prefix in paths or ()]
        if not answers.paths or not all(map(_is_here, prefixes)):
            continue
        try:
            usable_answers(config, answers, config.model.seq_length)
        except DataError as error:
            key = f"pos_{answers.split}_data_paths" if keys.is_paired else f"{answers.split}_data_paths"
            yield config.problem_about(str(error), key, "train_impl")


def _teacher_problems(config: NeoXConfig, tokenizer: Tokenizer) -> Iterator[Problem]:
    """Yield why the logits of a teacher do not serve the run. Their samples are compared as they are read."""
    directory = config.distillation.teacher_logits
    if directory is None:
        return
    if not Path(directory).is_dir():
        missing = config.problem(_TEACHER, "is no directory; write it with tools/teacher_logits.py")
        yield from Missing.of([missing])
        return
    from neox.data.teacher_file import TeacherFile  # torch, which a dry run without a teacher does not need

    vocab_size = used_vocabulary(config, tokenizer.vocab_size)
    names = ["train", *(files.name for files in _evaluation_files(config))]
    for name in dict.fromkeys(names):
        try:
            TeacherFile(Path(directory), name, vocab_size, tokenizer, config.distillation.distillation_top_k)
        except DataError as error:
            yield config.problem_about(str(error), _TEACHER, "distillation_top_k", "vocab_file")
            return


def _evaluation_files(config: NeoXConfig) -> Iterator[EvaluationFiles]:
    """Yield the datasets on this machine that evaluations read, those without documents left out."""
    data = config.data
    if config.training.eval_iters == 0:
        return
    found: list[EvaluationFiles] = []
    if data.train_data_paths is not None:
        for blend in data.blends[1:]:
            for path, labels in zip(blend.paths or (), blend.labels or [None] * len(blend.paths or ()), strict=False):
                found.append(EvaluationFiles(blend.split, f"{blend.split}_data_paths", path, labels))
    elif data.data_path is not None:
        found += [
            EvaluationFiles(name, "split", data.data_path, part=part) for part, name in ((1, "valid"), (2, "test"))
        ]
    for name, item in data.validation_sets.items():
        found.append(EvaluationFiles(f"valid-{name}", f"valid_data_paths.{name}", item.path, item.labels))
    for files in found:
        if _is_here(files.prefix) and (files.part is None or _documents_of_part(config, files.prefix, files.part)):
            yield files


def _documents_of_part(config: NeoXConfig, prefix: str, part: int) -> range:
    """Return the documents of a part of `split`."""
    indexed = IndexedDataset(prefix, config.data.data_impl)
    documents = indexed.num_documents if config.model.objective == "masked_lm" else len(indexed)
    return split_documents(config.data.split, documents)[part]


def _is_here(prefix: str) -> bool:
    return not is_remote(prefix) and Path(f"{prefix}.idx").is_file()
