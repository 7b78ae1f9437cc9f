"""Texts of the tasks of lm-evaluation-harness, for the removal of evaluation texts from training data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from neox.corpus import Document
from neox.errors import EvaluationError
from neox.evaluation.harness import harness_scalars, open_tasks


def task_documents(names: Sequence[str]) -> Iterator[Document]:
    """Yield a document for each example of the tasks: its prompt with each of its answers, one below the other.

    These are the examples that the harness scores. Few-shot examples of other splits are not among them.

    Args:
        names: Names of tasks or groups, or YAML files of tasks.

    Raises:
        EvaluationError: If the harness is missing, or a task is unknown or cannot be loaded.
    """
    manager = open_tasks(names)
    harness_scalars(names, manager)  # refuses those that cannot be loaded
    for name in names:
        for task_name, task in manager.load([name])["tasks"].items():
            try:
                for example in task.eval_docs:
                    text = "\n".join(_texts(task, example))
                    if text.strip():
                        yield Document(text, {"task": task_name})
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise EvaluationError(f"task {task_name}: an example has no text ({error})") from error


def _texts(task: Any, example: Any) -> Iterator[str]:
    """Yield the prompt of an example with each of its answers."""
    prompts = task.doc_to_text(example)
    if isinstance(prompts, int):  # the number of the right one of several prompts
        prompts = task.doc_to_choice(example)
    if isinstance(prompts, str):
        prompts = [prompts]
    answers = task.doc_to_target(example)
    if task.OUTPUT_TYPE == "multiple_choice":
        answers = task.doc_to_choice(example)
    if not isinstance(answers, list):
        answers = [answers]
    for start in prompts:
        for answer in answers:
            yield f"{start} {answer}".strip()
