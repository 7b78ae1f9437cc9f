"""Command line of `tools/web_text.py`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from neox.arguments import ScriptParser
from neox.config.yaml_file import parse_text
from neox.corpus import write_documents
from neox.errors import ConfigError
from neox.log import setup_logging
from tools.web_text import STEPS, RecipeStep, Step, describe_report, read_recipe, run_step
from tools.web_text.executor import Executor, run_recipe

_DESCRIPTION = """Prepare web text, one step at a time, or all steps of a recipe.

    python tools/web_text.py clean --input pages.jsonl.zst --output clean.jsonl.zst --workers 4
    python tools/web_text.py run recipe.yml

The same command resumes an interrupted step. docs/web-text.md describes the steps.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser, with a sub-command for each step."""
    p = ScriptParser(description=_DESCRIPTION)
    commands = p.add_subparsers(dest="command", required=True, metavar="STEP")
    for step in STEPS.values():
        about = step.settings.__doc__ or ""
        command = commands.add_parser(step.name, help=about.split("\n")[0], description=about)
        for name, info in step.settings.model_fields.items():
            add_option(command, name, info)
    texts = commands.add_parser(
        "evaluation", help="write the texts of lm-evaluation-harness's tasks, for `decontaminate`"
    )
    texts.add_argument("--tasks", nargs="+", required=True, help="names of tasks or groups, or their YAML files")
    texts.add_argument("--output", type=Path, required=True, help="`.jsonl.zst` file to write")
    run = commands.add_parser("run", help="run all steps of a recipe", description="Run all steps of a recipe.")
    run.add_argument("recipe", type=Path, help="YAML file with `directory` and `steps`")
    run.add_argument("--executor", choices=get_args(Executor), help="run it as a datatrove pipeline")
    run.add_argument("--tasks", type=int, help="shards of a step, with --executor (default: 1)")
    about = "argument of datatrove's executor, such as partition=cpu or time=10:00:00"
    run.add_argument("--executor-option", action="append", default=[], metavar="NAME=VALUE", help=about)
    return p


def add_option(command: argparse.ArgumentParser, name: str, info: FieldInfo) -> None:
    """Add the option of a setting; its value is checked with the other settings."""
    kind = info.annotation
    about = (info.description or "").replace("\n", " ").replace("%", "%%")
    if not info.is_required() and info.default not in (None, ()):
        about += f" (default: {info.default})"
    options: dict[str, Any] = {"help": about, "required": info.is_required(), "default": argparse.SUPPRESS}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(kind) is tuple:
        options |= {"nargs": "+", "metavar": "VALUE"}
    elif get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
    else:
        options["metavar"] = "VALUE"
    command.add_argument(f"--{name.replace('_', '-')}", dest=name, **options)


def chosen_steps(args: argparse.Namespace) -> list[RecipeStep]:
    """Return the steps of a command, their settings checked."""
    if args.command == "run":
        return read_recipe(args.recipe, STEPS)
    step: Step[Any] = STEPS[args.command]
    values = dict(vars(args))
    del values["command"]
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(filter(None, ",".join(value).split(",")))
    return [RecipeStep(step, step.make_settings(values, lambda name: f"--{name.replace('_', '-')}"))]


def executor_options(given: list[str]) -> dict[str, Any]:
    """Return the options of an executor. Raises ConfigError for one that is no NAME=VALUE."""
    options: dict[str, Any] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"--executor-option {option}: give NAME=VALUE")
        options |= parse_text(f"{name}: {value}", f"--executor-option {name}").values
    return options


def write_task_texts(tasks: list[str], output: Path) -> int:
    """Write the texts of evaluation tasks."""
    from neox.evaluation.task_texts import task_documents  # torch, which no step needs

    count = write_documents(output, task_documents(tasks))
    print(f"evaluation: {count:,} texts -> {output}")
    return 0


def main() -> int:
    """Run the tool."""
    args = parser().parse_args()
    setup_logging()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if args.command == "evaluation":
        return write_task_texts(args.tasks, args.output)
    steps = chosen_steps(args)
    if args.command == "run" and args.executor is not None:
        tasks = 1 if args.tasks is None else args.tasks
        if tasks < 1:
            raise ConfigError(f"--tasks {tasks}: give at least 1")
        run_recipe(steps, args.executor, tasks, executor_options(args.executor_option))
    elif args.command == "run" and (args.tasks is not None or args.executor_option):
        raise ConfigError("--tasks and --executor-option need --executor")
    for chosen in () if args.command == "run" and args.executor == "slurm" else steps:  # complete ones are reported
        report = run_step(chosen.step, chosen.settings)
        print(describe_report(chosen.settings, report), flush=True)
    return 0
