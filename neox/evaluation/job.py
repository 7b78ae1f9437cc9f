"""The tasks of a configuration: own texts as KIND=PATH, everything else through the harness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from neox.config import NeoXConfig
from neox.errors import EvaluationError
from neox.evaluation.harness import harness_tasks, open_tasks
from neox.evaluation.lambada import lambada
from neox.evaluation.perplexity import Scoring, corpus_perplexity, wikitext
from neox.evaluation.result import TaskResult
from neox.evaluation.scoring import ScoringModel
from neox.parallel import ParallelGrid
from neox.tokenizer import Tokenizer

_KINDS: dict[str, Callable[..., TaskResult]] = {
    "wikitext": wikitext,
    "lambada": lambada,
    "perplexity": corpus_perplexity,
}


@dataclass(frozen=True)
class OwnTask:
    """A text of ours to be scored. name: the kind, with the file's stem where a kind comes more than once."""

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
    problems = [
        f"eval_tasks: {kind} is no kind of task; there are {', '.join(_KINDS)}" for kind, _ in own if kind not in _KINDS
    ]
    problems += [f"eval_tasks: {kind}={path}: no such file" for kind, path in own if not _exists(path)]
    if problems:
        raise EvaluationError("\n".join(problems))
    often = Counter(kind for kind, _ in own)
    named = [OwnTask(kind, path, kind if often[kind] == 1 else f"{kind}_{Path(path).stem}") for kind, path in own]
    return named, [kind for kind, equals, _ in pairs if not equals]


def check_tasks(tasks: Sequence[str]) -> None:
    """Raise EvaluationError for tasks (as in `eval_tasks`) that do not exist, without a model."""
    _, names = parse_tasks(tasks)
    if names:
        open_tasks(names)


def evaluate_tasks(
    tasks: Sequence[str], model: ScoringModel, tokenizer: Tokenizer, grid: ParallelGrid, config: NeoXConfig
) -> list[TaskResult]:
    """Evaluate tasks (as in `eval_tasks`) with any model; all ranks call it together and get the same results.

    Windows are `seq_length` long. Raises EvaluationError for tasks that do not exist before anything is scored.
    """
    own, names = parse_tasks(tasks)
    manager = open_tasks(names) if names else None
    keys = config.generation
    assert config.model.seq_length
    scoring = Scoring(
        model, tokenizer, grid, config.model.seq_length, stride=keys.eval_stride, batch_size=keys.generation_batch_size
    )
    results = [_KINDS[task.kind](task.path, scoring, task.name) for task in own]
    if manager is not None:
        results += harness_tasks(names, manager, scoring, num_fewshot=keys.eval_num_fewshot, limit=keys.eval_limit)
    return results


def _exists(path: str) -> bool:
    return Path(path).exists() or Path(f"{path}.idx").exists()
