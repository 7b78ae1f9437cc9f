"""What a configuration asks to be scored, and what is wrong with that, known without a model.

No torch here: the head node asks before ranks start, and so does a dry run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from neox.config import NeoXConfig
from neox.errors import DataError, EvaluationError
from neox.evaluation.result import results_path
from neox.evaluation.texts import check_readable, is_token_file
from neox.files import unwritable_parent
from neox.tokenizer import Tokenizer

KINDS = ("wikitext", "lambada", "perplexity")


@dataclass(frozen=True)
class OwnTask:
    """A text of ours to be scored. name: under which its scores are told, different for every task."""

    kind: str
    path: str
    name: str


def parse_tasks(tasks: Sequence[str]) -> tuple[list[OwnTask], list[str]]:
    """Return own tasks, and the harness's. Raises EvaluationError for kinds and files that do not exist."""
    if not tasks:
        raise EvaluationError(
            "no eval_tasks: name tasks of lm-evaluation-harness, or own texts as "
            "wikitext=FILE, lambada=FILE, perplexity=FILE"
        )
    pairs = [task.partition("=") for task in tasks]
    own = [(kind, path) for kind, equals, path in pairs if equals]
    foreign = [kind for kind, equals, _ in pairs if not equals]
    problems = [
        f"eval_tasks: {kind} is no kind of task; there are {', '.join(KINDS)}" for kind, _ in own if kind not in KINDS
    ]
    problems += [f"eval_tasks: {kind}={path}: no such file" for kind, path in own if not _exists(path)]
    problems += [
        f"eval_tasks: {kind}={path}: there is no .idx beside it, without which a .bin cannot be read"
        for kind, path in own
        if path.endswith(".bin") and Path(path).exists() and not is_token_file(path)
    ]
    problems += [f"eval_tasks: {task} is there {times} times" for task, times in Counter(tasks).items() if times > 1]
    if problems:
        raise EvaluationError("\n".join(problems))
    return [OwnTask(*task, name) for task, name in zip(own, _names(own, foreign), strict=True)], foreign


def _names(own: Sequence[tuple[str, str]], foreign: Sequence[str]) -> list[str]:
    """Return a name for each own task: its kind; where that is taken more than once, with the file's name, or all of
    its path."""
    forms = [[kind, f"{kind}_{Path(path).stem}", f"{kind}_{Path(path).name}", f"{kind}_{path}"] for kind, path in own]
    taken = Counter([*foreign, *(name for names in forms for name in set(names))])
    return [next((name for name in names if taken[name] == 1), names[-1]) for names in forms]


def check_own_tasks(config: NeoXConfig, tokenizer: Tokenizer | None) -> None:
    """Raise EvaluationError for own tasks that a run would refuse: unknown kinds, files without text, a stride longer
    than the window.

    tokenizer: None where there is none to compare token files with.
    """
    keys, window = config.generation, config.model.seq_length
    own, _ = parse_tasks(keys.eval_tasks or ())
    problems = []
    if keys.eval_stride is not None and window is not None and keys.eval_stride > window:
        problems.append(f"eval_stride is {keys.eval_stride}: it must lie between 1 and the window, {window} tokens")
    if (closed := unwritable_parent(results_path(keys.eval_results_prefix, datetime.now()))) is not None:
        problems.append(f"eval_results_prefix {keys.eval_results_prefix}: nothing can be written in {closed}")
    for task in own:
        try:
            check_readable(task.kind, task.path, tokenizer)
        except (EvaluationError, DataError) as error:
            problems.append(f"eval_tasks: {task.kind}: {error}")
    if problems:
        raise EvaluationError("\n".join(problems))


def _exists(path: str) -> bool:
    return Path(path).exists() or is_token_file(path)
