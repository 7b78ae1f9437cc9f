"""Tasks of EleutherAI's lm-evaluation-harness (package `lm-eval`), run through its model interface."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neox.engine import from_first_rank
from neox.errors import EvaluationError, NeoXError, install_command
from neox.evaluation.lambada import truncate
from neox.evaluation.results import TaskResult
from neox.evaluation.scoring import Scorer, Span, TokenIds, windows
from neox.generation.completion import generate_all
from neox.generation.request import SamplingParams

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager

_DEFAULT_NEW_TOKENS = 256  # the harness's own default for tasks that name no maximum
_RESAMPLES = 1000  # for standard errors of metrics without a formula; the harness's 100,000 take minutes for LAMBADA
_SECTIONS = (
    "results",
    "groups",
    "group_subtasks",
    "configs",
    "versions",
    "n-shot",
    "higher_is_better",
    "n-samples",
)  # of the harness's report: tables by task


def open_tasks(names: Sequence[str]) -> TaskManager:
    """Return the harness's task manager after checking that it knows all of `names` (or YAML files of tasks).

    Raises:
        EvaluationError: If the package is missing or a task is unknown.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise EvaluationError(
            f"eval_tasks names tasks of lm-evaluation-harness ({', '.join(names)}), which is not installed: "
            f"{install_command('requirements-eval.txt')}"
        )
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    files = [name for name in names if _is_file(name)]
    # Indexing the harness's thousands of own tasks takes seconds.
    manager = TaskManager(include_defaults=len(files) < len(names))
    check_names(names, manager)
    return manager


def check_names(names: Sequence[str], manager: TaskManager) -> None:
    """Raise EvaluationError naming every task that the harness does not know and every missing task file."""
    problems = [
        f"task {name!r} is unknown to lm-evaluation-harness"
        for name in names
        if not _is_file(name) and not manager.match_tasks([name])
    ]
    problems += [f"task file {name} does not exist" for name in names if _is_file(name) and not Path(name).is_file()]
    if problems:
        raise EvaluationError(
            f"eval_tasks: {'; '.join(problems)} (`lm-eval ls tasks` lists all names; text files are given as "
            "wikitext=FILE, lambada=FILE, perplexity=FILE)"
        )


def check_loading(names: Sequence[str], manager: TaskManager) -> None:
    """Raise EvaluationError for tasks that the harness cannot load or that need unsupported generation settings."""
    problems = []
    for name in names:
        try:
            for task in manager.load([name])["tasks"].values():
                if task.OUTPUT_TYPE == "generate_until":
                    sampling_params(task.config.generation_kwargs or {}, _DEFAULT_NEW_TOKENS)
        except NeoXError as error:
            problems.append(f"task {name}: {error}")
        except Exception as error:  # errors of YAML, of the harness, of data sets and of the network
            reason = " ".join(str(error).split())[:300]
            problems.append(f"task {name}: lm-evaluation-harness cannot load it ({type(error).__name__}: {reason})")
    if problems:
        raise EvaluationError("\n".join(problems))


def harness_tasks(
    names: Sequence[str],
    manager: TaskManager,
    scorer: Scorer,
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> list[TaskResult]:
    """Evaluate tasks of the harness; all ranks together.

    Args:
        names: Names or YAML files of tasks.
        manager: Result of `open_tasks`.
        scorer: Model and settings.
        num_fewshot: Examples before each question; None uses the task's setting.
        limit: Examples per task; None means all.

    Returns:
        The same results on every rank.
    """
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model=harness_model(scorer),
        tasks=list(names),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=_RESAMPLES,
        log_samples=False,
    )
    if scorer.grid.world_size == 1:
        return results_of(found)
    return from_first_rank(lambda: results_of(found))  # the harness returns results only where LOCAL_RANK is 0


def results_of(found: Any) -> list[TaskResult]:
    """Convert the harness's report; the standard error of a metric is `METRIC_stderr`, where there is one."""
    from lm_eval.utils import handle_non_serializable

    results = []
    for task, table in found["results"].items():
        metrics: dict[str, float] = {}
        for key, value in table.items():
            metric, _, name = key.partition(",")
            if isinstance(value, int | float) and not isinstance(value, bool) and name:
                error = "_stderr" if metric.endswith("_stderr") else ""
                metrics[metric.removesuffix("_stderr") + ("" if name == "none" else f"_{name}") + error] = float(value)
        samples = found.get("n-samples", {}).get(task, {}).get("effective")
        shots, version = found.get("n-shot", {}).get(task), found.get("versions", {}).get(task)
        settings = {"num_fewshot": shots, "version": version}
        record = {section: found[section][task] for section in _SECTIONS if task in found.get(section, {})}
        results.append(
            TaskResult(
                task,
                metrics,
                {"examples": int(samples)} if samples else {},
                {name: value for name, value in settings.items() if value is not None},
                json.loads(json.dumps(record, default=handle_non_serializable)),
            )
        )
    return results


def harness_model(scorer: Scorer) -> TemplateLM:
    """Return the model behind the harness's interface; its class is made here because the package is optional."""
    from lm_eval.api.model import TemplateLM

    class HarnessModel(TemplateLM):  # type: ignore[misc, unused-ignore] # Any where lm-eval is not installed
        """loglikelihood, loglikelihood_rolling and generate_until with a `Scorer`."""

        # Every rank of a split model answers every request; replicas divide the requests among themselves.
        _rank, _world_size = 0, 1

        @property
        def eot_token_id(self) -> int:
            """End-of-document id."""
            return scorer.tokenizer.eod

        @property
        def max_length(self) -> int:
            """Context of the model in tokens."""
            return scorer.model.max_length

        @property
        def tokenizer_name(self) -> str:
            """Name under which the harness caches requests."""
            return scorer.tokenizer.name

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            """Return token ids."""
            return scorer.tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            spans = [
                truncate(Span((*context, *continuation), len(context)), self.max_length)
                for _, context, continuation in requests
            ]
            return [(score.log_probability, score.greedy) for score in scorer.score(spans, "loglikelihood")]

        def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
            """Return the log-probability of each whole text."""
            texts = [[scorer.tokenizer.eod, *self.tok_encode(request.args[0])] for request in requests]
            cut = [(n, span) for n, text in enumerate(texts) for span in full_windows(text, self.max_length)]
            totals = [0.0] * len(texts)
            for (n, _), score in zip(cut, scorer.score([span for _, span in cut], "rolling"), strict=True):
                totals[n] += score.log_probability
            return totals

        def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
            """Return the continuation of each prompt up to its stop strings."""
            groups: dict[SamplingParams, list[int]] = defaultdict(list)
            for number, request in enumerate(requests):
                groups[sampling_params(request.args[1], self.max_length)].append(number)
            texts: dict[int, str] = {}
            for params, numbers in groups.items():
                prompts = [self._truncated(requests[n].args[0], params) for n in numbers]
                done = generate_all(
                    scorer.model,  # type: ignore[arg-type] # a ModelRunner offers both protocols
                    prompts,
                    params,
                    scorer.tokenizer,
                    scorer.grid,
                    batch_size=scorer.batch_size,
                )
                texts.update((n, completion.text) for n, completion in zip(numbers, done, strict=True))
            return [texts[n] for n in range(len(requests))]

        def _truncated(self, prompt: str, params: SamplingParams) -> str:
            """Drop the beginning of a prompt that leaves too few tokens for the answer, as the harness does."""
            longest = self.max_length - params.max_new_tokens
            tokens = scorer.tokenizer.encode(prompt)
            return prompt if len(tokens) <= longest else scorer.tokenizer.decode(tokens[-longest:])

    return HarnessModel()


def full_windows(text: TokenIds, length: int) -> list[Span]:
    """Cut a text into windows without overlap, but extend the last one backwards to full length.

    This gives the last window the longest possible context, which is how the harness computes rolling likelihoods.
    """
    spans = list(windows(text, length, length))
    if len(spans) > 1 and len(spans[-1].tokens) < length + 1:
        new = len(spans[-1].tokens) - 1
        spans[-1] = Span(text[-(length + 1) :], length - new + 1)
    return spans


def sampling_params(asked: dict[str, Any], max_length: int) -> SamplingParams:
    """Convert a task's `generation_kwargs`. Raises EvaluationError naming unsupported settings."""
    asked = dict(asked)
    until = asked.pop("until", None) or []
    limits = [asked.pop(key, None) for key in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")]
    limit = next((int(value) for value in limits if value is not None), _DEFAULT_NEW_TOKENS)
    do_sample, temperature = asked.pop("do_sample", None), float(asked.pop("temperature", 0.0) or 0.0)
    known = {name: asked.pop(name) for name in ("top_k", "top_p", "repetition_penalty", "num_beams") if name in asked}
    if asked:
        raise EvaluationError(f"the task needs unsupported generation settings: {', '.join(sorted(asked))}")
    if do_sample is False or (do_sample is None and temperature == 0):
        temperature = 0.0
    elif temperature == 0:
        temperature = 1.0
    return SamplingParams(
        max_new_tokens=min(limit, max_length - 1),
        temperature=temperature,
        stop=tuple(text for text in ([until] if isinstance(until, str) else until) if text),
        **known,
    )


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))
