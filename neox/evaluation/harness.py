"""Any task of EleutherAI's lm-evaluation-harness (package `lm-eval`), through its own interface for models."""

from __future__ import annotations

import importlib.util
import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from neox.errors import EvaluationError, NeoXError, install_command
from neox.evaluation.last_words import fit
from neox.evaluation.perplexity import Scoring
from neox.evaluation.result import TaskResult
from neox.evaluation.scoring import Span, windows
from neox.generation import SamplingParams, generate_all, over_replicas
from neox.parallel import ParallelGrid

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager

_DEFAULT_NEW_TOKENS = 256  # the harness's own, for tasks that name no maximum


def open_tasks(names: Sequence[str]) -> TaskManager:
    """Return the harness's list of tasks, with all of `names` (or YAML files of tasks) in it.

    Raises EvaluationError when the package is missing or a task is unknown.
    """
    require_harness()
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    files = [name for name in names if _is_file(name)]
    # Looking through the harness's thousands of own tasks takes seconds.
    manager = TaskManager(include_defaults=len(files) < len(names))
    check_names(names, manager)
    return manager


def check_loading(names: Sequence[str], manager: TaskManager) -> None:
    """Raise EvaluationError for tasks whose files or data cannot be read, or that ask for what does not exist here."""
    problems = []
    for name in names:
        try:
            for task in manager.load([name])["tasks"].values():
                if task.OUTPUT_TYPE == "generate_until":
                    sampling_params(task.config.generation_kwargs or {}, _DEFAULT_NEW_TOKENS)
        except NeoXError as error:
            problems.append(f"task {name}: {error}")
        except Exception as error:  # of YAML, of the harness, of data sets, of the network
            reason = " ".join(str(error).split())[:300]
            problems.append(f"task {name}: lm-evaluation-harness cannot load it ({type(error).__name__}: {reason})")
    if problems:
        raise EvaluationError("\n".join(problems))


def harness_tasks(
    names: Sequence[str],
    manager: TaskManager,
    scoring: Scoring,
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> list[TaskResult]:
    """Evaluate tasks that `open_tasks` has found; all ranks together.

    num_fewshot: examples before each question, None for what the task says. limit: examples of each task.
    """
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model=harness_model(scoring),
        tasks=list(names),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    return from_first_rank(None if found is None else results_of(found), scoring.grid)


def from_first_rank(results: list[TaskResult] | None, grid: ParallelGrid) -> list[TaskResult]:
    """Return rank 0's results on every rank: the harness answers only where LOCAL_RANK is 0."""
    box = [results]
    if grid.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


def require_harness() -> None:
    """Raise EvaluationError unless the harness is installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise EvaluationError(
            "eval_tasks names tasks of lm-evaluation-harness, which is not installed: "
            f"{install_command('requirements-eval.txt')}"
        )


def check_names(names: Sequence[str], manager: Any) -> None:
    """Raise EvaluationError naming every task that the harness does not know."""
    unknown = [name for name in names if not _is_file(name) and not manager.match_tasks([name])]
    missing = [name for name in names if _is_file(name) and not Path(name).is_file()]
    problems = [f"task {name!r} is unknown to lm-evaluation-harness" for name in unknown]
    problems += [f"task file {name} does not exist" for name in missing]
    if problems:
        raise EvaluationError(
            "; ".join(problems)
            + " (`lm-eval ls tasks` lists all; own texts are wikitext=FILE, lambada=FILE, perplexity=FILE)"
        )


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def results_of(found: Any) -> list[TaskResult]:
    """Turn the harness's `metric,filter` -> value tables into ours; standard errors keep their name `..._stderr`."""
    results = []
    for task, table in found["results"].items():
        metrics: dict[str, float] = {}
        for key, value in table.items():
            metric, _, name = key.partition(",")
            if isinstance(value, int | float) and not isinstance(value, bool) and name:
                metrics[metric if name == "none" else f"{metric}_{name}"] = float(value)
        samples = found.get("n-samples", {}).get(task, {}).get("effective")
        results.append(TaskResult(task, metrics, {"examples": int(samples)} if samples else {}))
    return results


def harness_model(scoring: Scoring) -> TemplateLM:
    """Return our model as the harness knows models."""
    from lm_eval.api.model import TemplateLM

    class HarnessModel(TemplateLM):
        """loglikelihood, loglikelihood_rolling and generate_until over our runner."""

        # Every rank of a split model answers every request, and replicas share them among themselves.
        _rank, _world_size = 0, 1

        @property
        def eot_token_id(self) -> int:
            return scoring.tokenizer.eod

        @property
        def max_length(self) -> int:
            return scoring.model.max_length

        @property
        def tokenizer_name(self) -> str:
            return scoring.tokenizer.name

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return scoring.tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            spans = [
                fit(Span((*context, *continuation), len(context)), scoring.model.max_length)
                for _, context, continuation in requests
            ]
            scores = over_replicas(spans, lambda mine: scoring.score(mine, "loglikelihood"), scoring.grid)
            return [(score.log_probability, score.greedy) for score in scores]

        def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
            texts = [[scoring.tokenizer.eod, *self.tok_encode(request.args[0])] for request in requests]
            longest = scoring.model.max_length
            cut = [(n, span) for n, text in enumerate(texts) for span in full_windows(text, longest)]
            spans = [span for _, span in cut]
            scores = over_replicas(spans, lambda mine: scoring.score(mine, "rolling"), scoring.grid)
            totals = [0.0] * len(texts)
            for (n, _), score in zip(cut, scores, strict=True):
                totals[n] += score.log_probability
            return totals

        def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
            groups: dict[SamplingParams, list[int]] = defaultdict(list)
            for number, request in enumerate(requests):
                groups[sampling_params(request.args[1], scoring.model.max_length)].append(number)
            texts: dict[int, str] = {}
            for params, numbers in groups.items():
                prompts = [self._shortened(requests[n].args[0], params) for n in numbers]
                done = generate_all(
                    scoring.model,  # type: ignore[arg-type]
                    prompts,
                    params,
                    scoring.tokenizer,
                    scoring.grid,
                    batch_size=scoring.batch_size,
                )
                texts.update((n, completion.text) for n, completion in zip(numbers, done, strict=True))
            return [texts[n] for n in range(len(requests))]

        def _shortened(self, prompt: str, params: SamplingParams) -> str:
            """Drop the beginning of a prompt that leaves too little room for the answer, as the harness does."""
            room = scoring.model.max_length - params.max_new_tokens
            tokens = scoring.tokenizer.encode(prompt)
            return prompt if len(tokens) <= room else scoring.tokenizer.decode(tokens[-room:])

    return HarnessModel()


def full_windows(text: Sequence[int], length: int) -> list[Span]:
    """Cut a text into windows that do not overlap, except that the last reaches back to be full: its context is then as
    long as can be, which is how the harness counts."""
    spans = list(windows(text, length, length))
    if len(spans) > 1 and len(spans[-1].tokens) < length + 1:
        new = len(spans[-1].tokens) - 1
        spans[-1] = Span(text[-(length + 1) :], length - new + 1)
    return spans


def sampling_params(asked: dict[str, Any], max_length: int) -> SamplingParams:
    """Turn a task's `generation_kwargs` into our settings. Raises EvaluationError for what we do not know."""
    asked = dict(asked)
    until = asked.pop("until", None) or []
    limits = [asked.pop(key, None) for key in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")]
    limit = next((int(value) for value in limits if value is not None), _DEFAULT_NEW_TOKENS)
    do_sample, temperature = asked.pop("do_sample", None), float(asked.pop("temperature", 0.0) or 0.0)
    known = {name: asked.pop(name) for name in ("top_k", "top_p", "repetition_penalty", "num_beams") if name in asked}
    if asked:
        raise EvaluationError(f"a task asks for generation settings that do not exist here: {', '.join(sorted(asked))}")
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
