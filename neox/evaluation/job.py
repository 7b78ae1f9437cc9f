"""The tasks of a configuration: own texts as KIND=PATH, everything else through the harness."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from neox.config import NeoXConfig
from neox.evaluation.harness import check_loading, harness_tasks, open_tasks
from neox.evaluation.last_words import lambada
from neox.evaluation.perplexity import Scoring, corpus_perplexity, wikitext
from neox.evaluation.result import TaskResult
from neox.evaluation.scoring import ScoringModel
from neox.evaluation.tasks import check_own_tasks, parse_tasks
from neox.parallel import ParallelGrid
from neox.tokenizer import Tokenizer

SCORERS: dict[str, Callable[..., TaskResult]] = {
    "wikitext": wikitext,
    "lambada": lambada,
    "perplexity": corpus_perplexity,
}


def check_tasks(config: NeoXConfig, tokenizer: Tokenizer) -> None:
    """Raise EvaluationError for `eval_tasks` that a run would refuse, without a model; harness tasks load data."""
    check_own_tasks(config, tokenizer)
    _, names = parse_tasks(config.generation.eval_tasks or ())
    if names:
        check_loading(names, open_tasks(names))


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
    results = [SCORERS[task.kind](task.path, scoring, task.name) for task in own]
    if manager is not None:
        results += harness_tasks(names, manager, scoring, num_fewshot=keys.eval_num_fewshot, limit=keys.eval_limit)
    return results
