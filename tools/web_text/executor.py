"""Recipes as datatrove pipelines: local processes, Slurm or Ray.

Each step becomes one or two pipelines. The first computes shards of the chunks, if the step is a function of chunks.
The second is one task that runs the step with their results. All tasks share a file system.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from neox.errors import ConfigError, DataError, NeoXError, needs_package
from neox.log import setup_logging
from tools.web_text.chunks import shard_directory
from tools.web_text.recipe import RecipeStep
from tools.web_text.run import check_packages, run_step
from tools.web_text.step import Job

Executor = Literal["local", "slurm", "ray"]


@dataclass(frozen=True)
class ShardTask:
    """Callable of a datatrove pipeline that computes one shard of a step."""

    chosen: RecipeStep

    def __call__(self, data: object, rank: int = 0, world_size: int = 1) -> None:
        """Compute the shard of task `rank`."""
        step = self.chosen.step
        settings = self.chosen.settings
        try:
            check_packages(step)
            step.run(Job(step.name, settings, step.expand(settings.input), "", shard=(rank, world_size)))
        except NeoXError:
            raise
        except Exception as error:  # a pool waits forever for an exception that cannot be unpickled
            raise DataError(f"{step.name}, task {rank}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class StepTask:
    """Callable of a datatrove pipeline that runs a step with the results in its shards."""

    chosen: RecipeStep

    def __call__(self, data: object, rank: int = 0, world_size: int = 1) -> None:
        """Run the step."""
        setup_logging()
        run_step(self.chosen.step, self.chosen.settings)
        shutil.rmtree(shard_directory(self.chosen.settings.output), ignore_errors=True)


def pipelines(
    recipe: Sequence[RecipeStep], executor: Executor, tasks: int, options: Mapping[str, Any]
) -> Iterator[tuple[RecipeStep, Any]]:
    """Yield the datatrove executors of a recipe in order, with their steps. With Slurm each depends on the one before.

    Args:
        recipe: Steps.
        executor: Where tasks run.
        tasks: Number of shards of a step.
        options: Further arguments of datatrove's executor, such as Slurm's `partition` and `time`.

    Raises:
        ConfigError: If datatrove is missing, or refuses the options.
    """
    with needs_package(ConfigError, "--executor", "datatrove", "requirements-webtext.txt"):
        from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
    classes = {"local": LocalPipelineExecutor, "slurm": SlurmPipelineExecutor, "ray": RayPipelineExecutor}
    before = None
    for chosen in recipe:
        kinds: list[tuple[type[ShardTask] | type[StepTask], int]] = [(StepTask, 1)]
        if chosen.step.sharded:
            kinds.insert(0, (ShardTask, tasks))
        for kind, count in kinds:
            output = chosen.settings.output
            arguments = {
                "pipeline": [kind(chosen)],
                "tasks": count,
                "logging_dir": str(output.with_name(f"{output.name}.datatrove") / kind.__name__),
                # Our tasks know themselves whether their shard or output is complete, and of the same inputs.
                "skip_completed": False,
                **options,
            }
            if executor == "slurm":
                arguments.setdefault("depends", before)
            if executor == "local" and count == 1:
                arguments["workers"] = 1  # then the task runs in this process and may start others
            try:
                before = classes[executor](**arguments)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"--executor {executor}: datatrove refuses its options: {error}") from error
            yield chosen, before


def run_recipe(recipe: Sequence[RecipeStep], executor: Executor, tasks: int, options: Mapping[str, Any]) -> None:
    """Run a recipe through datatrove. With Slurm, only submit it.

    Raises:
        ConfigError: If datatrove or Ray is missing, or refuses the options.
        DataError: If a task failed on Ray.
        NeoXError: An error of a step, from a local executor.
    """
    if executor == "ray":
        with needs_package(ConfigError, "--executor ray", "ray", "requirements-ray.txt"):
            import ray  # noqa: F401
    last = None
    for chosen, last in pipelines(recipe, executor, tasks, options):
        if executor == "local":
            last.run()
        elif executor == "ray":
            _run_on_ray(chosen, last)
    if executor == "slurm" and last is not None:
        last.run()  # submits those that it depends on first


def _run_on_ray(chosen: RecipeStep, pipeline: Any) -> None:
    """Run a pipeline. datatrove only warns if a task failed on Ray; this raises DataError."""
    logs = Path(pipeline.logging_dir.path)
    shutil.rmtree(logs / "completions", ignore_errors=True)  # the marks of an earlier run
    pipeline.run()
    failed = pipeline.get_incomplete_ranks(skip_completed=True)
    if not failed:
        return
    log = logs / "logs" / f"task_{failed[0]:05}.log"
    reason = "no log was written"
    if log.exists():
        lines = log.read_text(errors="replace").split("\n")
        reason = next((line for line in reversed(lines) if line.strip()), reason)
    raise DataError(f"the step {chosen.step.name} failed on Ray: {reason.strip()}\n{log} says where")
