"""What the head node can know to be missing, broken or too large before ranks start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from neox.config import NeoXConfig, RunPlan, inference_memory_problem, memory_problem, missing_for_training
from neox.errors import EvaluationError, GenerationError, TokenizerError
from neox.launch.accelerators import smallest_memory
from neox.launch.placement import Placement
from neox.launch.preflight import data_prefixes, is_of_quickstart, missing_data

if TYPE_CHECKING:
    from neox.tokenizer import Tokenizer

# A dry run without the tokenizer's files assumes these many ids.
_ASSUMED_VOCABULARY = {"GPT2BPETokenizer": 50257, "HFGPT2Tokenizer": 50257, "HFTokenizer": 50277}
_ASSUMED_OTHERWISE = 50257


def vocabulary(config: NeoXConfig) -> tuple[int, Tokenizer | None, list[str]]:
    """Return the tokenizer and its number of ids; where it cannot be built, an assumed number and what is missing."""
    settings = config.tokenizer
    try:
        from neox.tokenizer import build_tokenizer

        tokenizer = build_tokenizer(settings.tokenizer_type, settings.vocab_file, settings.merge_file)
        return tokenizer.vocab_size, tokenizer, []
    except TokenizerError as error:
        problem = str(error)
        if is_of_quickstart(settings.vocab_file or ""):
            problem += " (`make quickstart` makes it)"
        elif "train_tokenizer" not in problem:
            problem += " (`python tools/train_tokenizer.py` makes one)"
    except ModuleNotFoundError as error:  # a plan needs pydantic and PyYAML alone
        problem = f"the tokenizer cannot be read: the package {error.name} is not installed (`make install`)"
    where = f"{config.source('vocab_file')}: " if config.given("vocab_file") else ""
    return _ASSUMED_VOCABULARY.get(settings.tokenizer_type, _ASSUMED_OTHERWISE), None, [where + problem]


def unusable_data(config: NeoXConfig, tokenizer: Tokenizer | None, dry_run: bool) -> list[str]:
    """Return what is missing for training, and token files that are broken or were made with another tokenizer."""
    problems = [*missing_for_training(config), *missing_data(config)]
    prefixes = data_prefixes(config)
    if tokenizer is not None and any(Path(prefix + ".idx").exists() for prefix in prefixes):
        from neox.data.sidecar import data_problems  # numpy, which a dry run without data does not wait for

        found = data_problems(prefixes, config.data.data_impl, tokenizer, open_files=not dry_run)
        problems += [f"{config.source(key)}: {key}: {problem}" for key, problem in found]
    return problems


def refused_work(config: NeoXConfig, script: str, tokenizer: Tokenizer | None) -> list[str]:
    """Return why prompts, or tasks to be scored (in training too), would be refused."""
    try:
        if script == "generate":
            from neox.generation.request import check_generation

            check_generation(config, tokenizer)
        elif script == "evaluate" or config.generation.eval_tasks:
            from neox.evaluation.tasks import check_file_tasks  # numpy, which a dry run without tasks does not wait for

            check_file_tasks(config, tokenizer)
    except (GenerationError, EvaluationError) as error:
        return str(error).splitlines()
    return []


def too_little_memory(plan: RunPlan, placement: Placement, *, training: bool, dry_run: bool) -> list[str]:
    """Return why the run does not fit: on GPUs of gpu_memory_gib; before a launch, where that is not given, on the
    GPUs of this machine if it is the only one."""
    runner = plan.config.runner
    size: float | None = runner.gpu_memory_gib * 2**30
    if not dry_run and not plan.config.given("gpu_memory_gib"):
        size = smallest_memory() if placement.is_local and placement.accelerators else None
    problem_with = memory_problem if training else inference_memory_problem
    problem = None if size is None else problem_with(plan, size)
    more = "gpu_memory_gib is the size of a GPU; with a larger one the run starts all the same"
    return [] if problem is None else [f"{problem} ({more})"]
