"""Scores: perplexities, LAMBADA, and the tasks of lm-evaluation-harness."""

from neox.evaluation.harness import harness_model, harness_tasks, open_tasks
from neox.evaluation.in_training import evaluate_in_training
from neox.evaluation.job import check_tasks, evaluate_tasks, parse_tasks
from neox.evaluation.lambada import lambada
from neox.evaluation.perplexity import Scoring, corpus_perplexity, wikitext
from neox.evaluation.result import TaskResult, check_writable, flat_metrics, format_table, write_results
from neox.evaluation.scoring import ScoringModel, Span, SpanScore, score_spans, windows

__all__ = [
    "Scoring",
    "ScoringModel",
    "Span",
    "SpanScore",
    "TaskResult",
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
