"""Tasks of EleutherAI's lm-evaluation-harness (package `lm-eval`), run through its model interface.

    names     open_tasks      known to the harness, or YAML files
        |     harness_tasks   calls the harness's `simple_evaluate` with a
        |       HarnessModel    loglikelihood            text after a context -> span of tokens -> `Scorer.score`
        |                       loglikelihood_rolling    whole text -> windows -> `Scorer.score`
        |                       generate_until           prompt -> `generate_all`
        v
    report    results_of      a `TaskResult` for each task

All ranks call these functions together and get the same results.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neox.engine import from_first_rank
from neox.errors import ConfigError, EvaluationError, NeoXError, install_command
from neox.evaluation.lambada import truncate
from neox.evaluation.results import TaskResult, task_scalar
from neox.evaluation.scoring import Scorer, Span
from neox.evaluation.tasks import TaskScalars
from neox.generation.completion import generate_all
from neox.generation.request import SamplingParams
from neox.log import get_logger
from neox.tokenizer import positions

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager

_log = get_logger(__name__)
_DEFAULT_NEW_TOKENS = 256
"""The harness's own default for tasks that name no maximum."""
_RESAMPLES = 1000
"""Samples for standard errors of metrics without a formula. The harness's 100,000 take minutes for LAMBADA."""
_SECTIONS = (
    "results",
    "groups",
    "group_subtasks",
    "configs",
    "versions",
    "n-shot",
    "higher_is_better",
    "n-samples",
)
"""Sections of the harness's report that are tables by task."""
_LIMIT_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the largest number of new tokens in `generation_kwargs`."""
_SAMPLING_KEYS = ("top_k", "top_p", "repetition_penalty", "num_beams")
"""Names in `generation_kwargs` that are names of `SamplingParams` too."""


def open_tasks(names: Sequence[str]) -> TaskManager:
    """Return the harness's task manager, after checking that it knows all tasks.

    Args:
        names: Names of tasks, or YAML files of tasks.

    Raises:
        ConfigError: If the package is missing or a task is unknown. A run that ends so is not started again.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            f"eval_tasks names tasks of lm-evaluation-harness ({', '.join(names)}), which is not installed: "
            f"{install_command('requirements-eval.txt')}"
        )
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    # Indexing the harness's thousands of tasks takes seconds and is not needed for files.
    manager = TaskManager(include_defaults=not all(map(_is_file, names)))
    check_names(names, manager)
    return manager


def check_names(names: Sequence[str], manager: TaskManager) -> None:
    """Raise ConfigError naming every task that the harness does not know and every missing task file."""
    problems = []
    for name in names:
        if _is_file(name):
            if not Path(name).is_file():
                problems.append(f"task file {name} does not exist")
        elif not manager.match_tasks([name]):
            problems.append(f"task {name!r} is unknown to lm-evaluation-harness")
    if problems:
        raise ConfigError(
            f"eval_tasks: {'; '.join(problems)} (`lm-eval ls tasks` lists all names; text files are given as "
            "wikitext=FILE, lambada=FILE, perplexity=FILE)"
        )


def harness_scalars(names: Sequence[str], manager: TaskManager) -> TaskScalars:
    """Load tasks, and return the names of the scalars that they report, without standard errors.

    Raises:
        EvaluationError: For tasks that the harness cannot load, or that need unsupported generation settings.
    """
    problems = []
    known: dict[str, None] = {}
    possible: dict[str, None] = {}
    for name in names:
        try:
            loaded = manager.load([name])
            for group in loaded["groups"]:
                known[task_scalar(glob.escape(group), "*")] = None
            for title, task in loaded["tasks"].items():
                possible[task_scalar(glob.escape(title), "*")] = (
                    None  # of a score that has no aggregation it takes the mean
                )
                for metric in task.aggregation():
                    for chosen in task._filters or ():
                        known[task_scalar(title, _score_name(metric, chosen.name))] = None
                if task.OUTPUT_TYPE == "generate_until":
                    sampling_params(task.config.generation_kwargs or {}, _DEFAULT_NEW_TOKENS)
        except NeoXError as error:
            problems.append(f"task {name}: {error}")
        except Exception as error:  # errors of YAML, of the harness, of data sets and of the network
            reason = " ".join(str(error).split())[:300]
            problems.append(f"task {name}: lm-evaluation-harness cannot load it ({type(error).__name__}: {reason})")
    if problems:
        raise EvaluationError("\n".join(problems))
    return TaskScalars(list(known), list(possible))


def harness_tasks(
    names: Sequence[str],
    manager: TaskManager,
    scorer: Scorer,
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> list[TaskResult]:
    """Evaluate tasks of the harness. All ranks call it together.

    Args:
        names: Names of tasks, or YAML files of tasks.
        manager: Result of `open_tasks`.
        scorer: Model and settings.
        num_fewshot: Number of examples before each question; None uses the task's setting.
        limit: Number of examples per task; None means all.

    Returns:
        The same results on every rank.
    """
    from lm_eval import simple_evaluate

    report = simple_evaluate(
        model=harness_model(scorer),
        tasks=list(names),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=_RESAMPLES,
        log_samples=False,
    )
    if scorer.grid.world_size == 1:
        return results_of(report)
    return from_first_rank(lambda: results_of(report))  # the harness returns results only on local rank 0


def results_of(report: Any) -> list[TaskResult]:
    """Convert the harness's report.

    Args:
        report: Its report. Section -> task -> entry.
    """
    from lm_eval.utils import handle_non_serializable

    results = []
    for task, table in report["results"].items():
        counts = {}
        samples = report.get("n-samples", {}).get(task, {}).get("effective")
        if samples:
            counts["examples"] = int(samples)
        settings = {}
        for name, section in (("num_fewshot", "n-shot"), ("version", "versions")):
            value = report.get(section, {}).get(task)
            if value is not None:
                settings[name] = value
        record = {}
        for section in _SECTIONS:
            if task in report.get(section, {}):
                record[section] = report[section][task]
        plain_record = json.loads(json.dumps(record, default=handle_non_serializable))
        results.append(TaskResult(task, _metrics(table), counts, settings, plain_record))
    return results


def _metrics(table: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics in the harness's results of one task.

    Args:
        table: `METRIC,FILTER` -> value, and `METRIC_stderr,FILTER` -> standard error, next to other entries.

    Returns:
        `METRIC` or `METRIC_FILTER` -> value, with `_stderr` at the end for a standard error.
    """
    metrics = {}
    for key, value in table.items():
        metric, _, filter_name = key.partition(",")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not filter_name:
            continue
        name = _score_name(metric.removesuffix("_stderr"), filter_name)
        if metric.endswith("_stderr"):
            name += "_stderr"
        metrics[name] = float(value)
    return metrics


def _score_name(metric: str, filter_name: str) -> str:
    """Return the name of a metric of answers that went through a filter."""
    return metric if filter_name == "none" else f"{metric}_{filter_name}"


def harness_model(scorer: Scorer) -> TemplateLM:
    """Return the model behind the harness's interface. Its class is made here because the package is optional."""
    from lm_eval.api.model import TemplateLM

    tokenizer = scorer.tokenizer
    longest = scorer.model.max_length

    class HarnessModel(TemplateLM):  # type: ignore[misc, unused-ignore] # Any if lm-eval is not installed
        """loglikelihood, loglikelihood_rolling and generate_until with a `Scorer`."""

        # Every rank of a split model answers every request. Replicas divide the requests among themselves.
        _rank = 0
        _world_size = 1

        @property
        def eot_token_id(self) -> int:
            """End-of-document id."""
            return tokenizer.eod

        @property
        def max_length(self) -> int:
            """Context of the model in tokens."""
            return longest

        @property
        def tokenizer_name(self) -> str:
            """Name under which the harness caches requests."""
            return tokenizer.name

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            """Return the ids of a text that begins a document."""
            return positions.document(tokenizer, string)

        def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            """Return the log-probability of each text after its context, and whether its tokens were the best ones."""
            spans = []
            empty = []
            for context, text in [request.args for request in requests]:
                spans.append(Span(*positions.scored(tokenizer, context, text)))
                if spans[-1].first == len(spans[-1].tokens):
                    empty.append(text)
            if empty:
                _log.warning(
                    "%d of %d answers have no tokens, such as %r: their log-probability is 0, more than that of any "
                    "other",
                    len(empty),
                    len(requests),
                    empty[0],
                )
            return self._scores(spans)

        def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            return self._scores([Span((*context, *text), len(context)) for _, context, text in requests])

        def _scores(self, spans: Sequence[Span]) -> list[tuple[float, bool]]:
            fitting = [truncate(span, longest) for span in spans]
            scores = scorer.score(fitting, "loglikelihood")
            return [(score.log_probability, score.greedy) for score in scores]

        def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
            """Return the log-probability of each whole text."""
            texts = [request.args[0] for request in requests]
            spans = starmap(Span, positions.scored_documents(tokenizer, texts))
            whole_context = replace(scorer, window=longest, stride=None)
            return [score.log_probability for score in whole_context.rolling(spans, "rolling")]

        def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
            """Return the continuation of each prompt up to its stop strings. Equal settings are generated together."""
            groups: dict[SamplingParams, list[int]] = defaultdict(list)
            for number, request in enumerate(requests):
                _, settings = request.args
                groups[sampling_params(settings, longest)].append(number)
            texts = [""] * len(requests)
            for params, numbers in groups.items():
                # A prompt loses the beginning that leaves too few tokens for the answer, as in the harness itself.
                room = longest - params.max_new_tokens
                prompts = []
                for number in numbers:
                    prompt, _ = requests[number].args
                    prompts.append(tuple(positions.prompt(tokenizer, prompt)[-room:]))
                completions = generate_all(
                    scorer.model,  # type: ignore[arg-type] # a ModelRunner offers both protocols
                    prompts,
                    params,
                    tokenizer,
                    scorer.grid,
                    batch_size=scorer.batch_size,
                )
                for number, completion in zip(numbers, completions, strict=True):
                    texts[number] = completion.text
            return texts

    return HarnessModel()


def sampling_params(asked: Mapping[str, Any], max_length: int) -> SamplingParams:
    """Convert a task's `generation_kwargs`.

    Args:
        asked: The settings.
        max_length: Context of the model in tokens.

    Raises:
        EvaluationError: For settings that are not supported, by name.
    """
    left = dict(asked)
    stops = left.pop("until", None) or []
    if isinstance(stops, str):
        stops = [stops]
    limit = _DEFAULT_NEW_TOKENS
    for key in reversed(_LIMIT_KEYS):
        value = left.pop(key, None)
        if value is not None:
            limit = int(value)
    temperature = float(left.pop("temperature", 0.0) or 0.0)  # 0 takes the most probable token
    do_sample = left.pop("do_sample", None)  # if it is not given, the temperature decides
    if do_sample is False:
        temperature = 0.0
    elif do_sample and temperature == 0:
        temperature = 1.0
    known = {key: left.pop(key) for key in _SAMPLING_KEYS if key in left}
    if left:
        raise EvaluationError(f"the task needs unsupported generation settings: {', '.join(sorted(left))}")
    return SamplingParams(
        max_new_tokens=min(limit, max_length - 1),
        temperature=temperature,
        stop=tuple(filter(None, stops)),
        **known,
    )


def _is_file(name: str) -> bool:
    """Return whether a task is named by a YAML file."""
    return name.endswith((".yaml", ".yml"))
