"""Scores: perplexities, LAMBADA, and the tasks of lm-evaluation-harness.

Names are loaded when first used: the head node checks tasks without waiting for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neox.evaluation.harness import harness_model, harness_tasks, open_tasks
    from neox.evaluation.in_training import evaluate_in_training
    from neox.evaluation.job import check_tasks, evaluate_tasks
    from neox.evaluation.last_words import lambada
    from neox.evaluation.perplexity import Scoring, corpus_perplexity, wikitext
    from neox.evaluation.result import TaskResult, check_writable, flat_metrics, format_table, write_results
    from neox.evaluation.scoring import ScoringModel, Span, SpanScore, score_spans, windows
    from neox.evaluation.tasks import check_own_tasks, parse_tasks

_HOMES = {
    "harness_model": "harness",
    "harness_tasks": "harness",
    "open_tasks": "harness",
    "evaluate_in_training": "in_training",
    "check_tasks": "job",
    "evaluate_tasks": "job",
    "lambada": "last_words",
    "Scoring": "perplexity",
    "corpus_perplexity": "perplexity",
    "wikitext": "perplexity",
    "TaskResult": "result",
    "check_writable": "result",
    "flat_metrics": "result",
    "format_table": "result",
    "write_results": "result",
    "ScoringModel": "scoring",
    "Span": "scoring",
    "SpanScore": "scoring",
    "score_spans": "scoring",
    "windows": "scoring",
    "check_own_tasks": "tasks",
    "parse_tasks": "tasks",
}

__all__ = [
    "Scoring",
    "ScoringModel",
    "Span",
    "SpanScore",
    "TaskResult",
    "check_own_tasks",
    "check_tasks",
    "check_writable",
    "corpus_perplexity",
    "evaluate_in_training",
    "evaluate_tasks",
    "flat_metrics",
    "format_table",
    "harness_model",
    "harness_tasks",
    "lambada",
    "open_tasks",
    "parse_tasks",
    "score_spans",
    "wikitext",
    "windows",
    "write_results",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
