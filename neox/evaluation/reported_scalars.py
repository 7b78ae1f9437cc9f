"""Names of the scalars that the evaluations of a training report, known before it starts.

The objective's scores come from the code that reports them (`evaluation_scalars`), those of file tasks from
`TASK_SCORES`, which tests of the tasks compare with what they report.
"""

from __future__ import annotations

from pathlib import Path

from neox.data.run_data import EvaluationSet
from neox.data.token_files.sidecar import bytes_per_token
from neox.evaluation.evaluation_scalars import evaluation_scalars, set_of_scalar
from neox.evaluation.tasks import file_task_scalars, parse_tasks
from neox.objectives import build_objective, evaluated_objective
from neox.plan import RunPlan


def reported_scalars(plan: RunPlan) -> list[str]:
    """Return the names of all scalars of validation, and of those tasks whose scores are known without the harness.

    Scores of `needle` at one length and depth are a pattern. Bits per byte are among them also if the data does not say
    how many bytes its tokens are.

    Args:
        plan: Plan of the training.

    Raises:
        EvaluationError: `eval_tasks` is wrong, whatever files are here.
    """
    config = plan.config
    objective = evaluated_objective(build_objective(plan))
    scores = dict.fromkeys(objective.names, 0.0)
    sets = []
    for item in config.data.evaluated_sets:
        sets.append(EvaluationSet(iter(()), item.name, bytes_per_token=1.0))  # type: ignore[arg-type]
    if not sets:
        sets.append(EvaluationSet(iter(()), bytes_per_token=1.0))  # type: ignore[arg-type]
    densities = [1.0] * len(sets) if config.training.char_level_ppl else []
    names: list[str] = []
    for kind in ("validation", "validation_ema") if config.optimizer.eval_ema else ("validation",):
        names += evaluation_scalars(kind, sets, [scores] * len(sets), objective.per_token, [1.0] * len(sets), densities)
    if config.generation.eval_tasks:
        names += file_task_scalars(parse_tasks(config.generation.eval_tasks, files_here=False)[0])
    return names


def validation_without_bytes(plan: RunPlan, metric: str) -> list[str]:
    """Return the prefixes of data without which bits per byte are not reported: its bytes of text are not known.

    Data that is not on this machine is left out.

    Args:
        plan: Plan of the training.
        metric: Bits per byte of all validation sets, or of one that has a name.

    Raises:
        DataError: A sidecar cannot be read.
    """
    config = plan.config
    sets = config.data.evaluated_sets
    one_set = set_of_scalar(metric, [item.name for item in sets if item.name is not None])
    tokens = dict(plan.amounts.validation_tokens)
    is_plain = config.model.objective != "masked_lm"
    found: dict[str, None] = {}  # each one once
    for item in sets:
        is_read = tokens.get(item.name) != 0
        if not is_read or one_set not in (None, item.name):  # that of all sets needs the bytes of all
            continue
        for prefix, labels in item.files:
            is_known = is_plain and labels is None and bytes_per_token(prefix) is not None
            if Path(f"{prefix}.idx").exists() and not is_known:
                found[prefix] = None
    return [*found]
