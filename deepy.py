#!/usr/bin/env python3
"""YAML files -> checked configuration -> DeepSpeed's JSON -> a script on every rank.

python deepy.py train.py -d configs 20B.yml local_setup.yml
python deepy.py train.py -d configs 20B.yml --set global_num_gpus=96 --dry-run
python deepy.py preprocess_data.py -H hostfile --input ... (the tool's own flags; its work is divided over the slots)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any

import neox
from neox.config import (
    Draft,
    NeoXConfig,
    RunPlan,
    draft_config,
    encode_payload,
    for_inference,
    format_plan,
    further_problems,
    inference_memory_problem,
    memory_problem,
    missing_for_training,
    plan_as_dict,
    resolve,
    static_problems,
)
from neox.errors import ConfigError, EvaluationError, GenerationError, LaunchError, TokenizerError, run_script
from neox.launch.accelerators import smallest_memory
from neox.launch.environment import FORWARDED, child_environment, environment_file, withheld_secrets
from neox.launch.host_groups import host_groups, ranks_of_hosts
from neox.launch.placement import (
    UNCOUNTED,
    Placement,
    Request,
    check_local_devices,
    master_port_problem,
    place,
)
from neox.launch.preflight import (
    checkpoint_problems,
    data_prefixes,
    is_of_quickstart,
    missing_data,
    missing_packages,
)
from neox.launch.run_directory import run_directory, write_run_directory
from neox.launch.run_lock import reserve
from neox.launch.shown import deepspeed_command, format_commands, host_commands
from neox.launch.spec import Host, LaunchSpec, code_root
from neox.launch.start import chosen_launcher, head_command, launch, launcher_problem, new_spec
from neox.launch.tool import TOOLS, launch_tool
from neox.log import setup_logging

if TYPE_CHECKING:
    from neox.launch.doctor import HostReport
    from neox.tokenizer import Tokenizer

# A dry run without the tokenizer's files assumes these many ids.
_ASSUMED_VOCABULARY = {"GPT2BPETokenizer": 50257, "HFGPT2Tokenizer": 50257, "HFTokenizer": 50277}
_ASSUMED_OTHERWISE = 50257
_MOST_IMAGINED = 2**20
# Scripts that only run a model: on any number of ranks, whatever was trained on.
_INFERENCE = ("generate", "evaluate")

_SCRIPTS = ("train.py", "generate.py", "evaluate.py", "preprocess_data.py")

_FLAGS_OF_KEYS = (
    "hostfile",
    "include",
    "exclude",
    "num_nodes",
    "num_gpus",
    "master_addr",
    "master_port",
    "launcher",
    "sample_input_file",
    "sample_output_file",
    "iteration",
    "eval_results_prefix",
    "eval_tasks",
    "wandb_group",
    "wandb_team",
    "autotuning_run",
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="deepy.py",
        description="Check a configuration, show what follows from it, and start a script on every rank.",
        allow_abbrev=False,
    )
    parser.add_argument("script", help="train.py, generate.py, evaluate.py, or a path; `doctor` checks the hosts")
    parser.add_argument("conf_file", nargs="*", help="configuration files (YAML or JSON; .yml may be left out)")
    parser.add_argument("-d", "--conf_dir", help="directory of the configuration files")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key (repeatable)")
    parser.add_argument("--dry-run", action="store_true", help="show the plan and start nothing")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print the plan as one JSON object")
    parser.add_argument("--hosts", type=_positive, metavar="N", help="with --dry-run: plan for so many hosts")
    parser.add_argument("--gpus", type=_positive, metavar="M", help="with --dry-run: GPUs on each of --hosts")
    parser.add_argument("-H", "--hostfile", help="file of `host slots=N` lines")
    parser.add_argument("--include", help="hosts and slots to use: worker-0:0,2@worker-1")
    parser.add_argument("--exclude", help="hosts and slots not to use")
    parser.add_argument("--num_nodes", type=_positive, help="use the first so many hosts")
    parser.add_argument("--num_gpus", type=_positive, help="ranks on each host")
    parser.add_argument("--master_addr", help="address of the first host")
    parser.add_argument("--master_port", type=_positive, help="port of the rendezvous; a free one where left out")
    parser.add_argument("--launcher", help="local, pdsh, none, slurm or openmpi")
    parser.add_argument("-i", "--sample_input_file", help="prompts for generation, one a line")
    parser.add_argument("-o", "--sample_output_file", help="where completions are written")
    parser.add_argument("--eval_tasks", nargs="+", metavar="TASK", help="evaluation tasks")
    parser.add_argument("--iteration", type=int, help="checkpoint to load; the newest where left out")
    parser.add_argument("--eval_results_prefix", help="prefix of the evaluation's result files")
    parser.add_argument("--wandb_group", help="wandb group")
    parser.add_argument("--wandb_team", help="wandb team (entity)")
    parser.add_argument("--autotuning", choices=["tune", "run"], dest="autotuning_run", help="DeepSpeed's autotuner")
    parser.add_argument("--version", action="version", version=f"neox {neox.__version__}")
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        keys = [text.lstrip("-").replace("-", "_").split("=")[0] for text in unknown if text.startswith("--")]
        hint = f"; a configuration's key is given as `--set {keys[0]}=VALUE`" if keys else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if not arguments.conf_file and arguments.script != "doctor":
        parser.error("at least one configuration file is needed")
    if (arguments.json or arguments.hosts or arguments.gpus) and not arguments.dry_run:
        parser.error("--json, --hosts and --gpus go with --dry-run")
    return arguments


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def overrides(arguments: argparse.Namespace) -> list[str]:
    """Turn flags into overrides of the keys they stand for; `--set` comes last and wins."""
    given = ((key, getattr(arguments, key)) for key in _FLAGS_OF_KEYS)
    texts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in given if value is not None)
    return [*(f"{key}={text}" for key, text in texts), *arguments.set]


def find_script(name: str) -> Path:
    """Return the script's absolute path: as given, else in the project's root, else in its tools/."""
    if (path := _existing_script(name)) is not None:
        return path
    if close := get_close_matches(Path(name).with_suffix(".py").name, _SCRIPTS, n=1):
        raise LaunchError(f"script {name} does not exist, here or in the project; did you mean {close[0]}?")
    raise LaunchError(f"script {name} does not exist, here or in the project; ranks run {', '.join(_SCRIPTS)}")


def _existing_script(name: str) -> Path | None:
    path = name if name.endswith(".py") else f"{name}.py"
    candidates = (Path(path), code_root() / path, code_root() / "tools" / path)
    return next((candidate.absolute() for candidate in candidates if candidate.is_file()), None)


def refuse_lone_tool(name: str, *rest: str) -> None:
    """Raise LaunchError for a tool of the project that runs by itself, in one process, with flags of its own."""
    path = _existing_script(name)
    root, tool = code_root(), code_root() / "tools" / Path(path or name).name
    if path is not None and path.parent in (root, tool.parent) and tool.is_file() and tool.name not in _SCRIPTS:
        command = join(["python", os.path.relpath(tool), *rest])
        raise LaunchError(
            f"{tool.name} runs by itself, without a launcher: `{command}` (ranks run {', '.join(_SCRIPTS)})"
        )


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
        from neox.data.head_check import data_problems  # numpy, which a dry run without data does not wait for

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
            from neox.evaluation.tasks import check_own_tasks  # numpy, which a dry run without tasks does not wait for

            check_own_tasks(config, tokenizer)
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


def choose_hosts(config: NeoXConfig, arguments: argparse.Namespace) -> tuple[Placement, list[str]]:
    """Return where ranks go; in a dry run what is wrong with it becomes a warning, and hosts can be imagined."""
    if arguments.hosts or arguments.gpus:
        if (arguments.hosts or 1) * (gpus := arguments.gpus or config.runner.num_gpus or 8) > _MOST_IMAGINED:
            raise LaunchError(f"--hosts and --gpus: at most {_MOST_IMAGINED:,} ranks can be planned")
        slots = tuple(range(gpus))
        hosts = tuple(Host(f"host{number}", slots) for number in range(arguments.hosts or 1))
        return Placement(hosts, "--hosts and --gpus", 0), []
    try:
        placement = place(Request.of(config.runner))
        if not arguments.dry_run:
            check_local_devices(placement)
        elif placement.why == UNCOUNTED and one_copy(config) > 1:
            return assumed_hosts(config, "hosts, num_gpus and global_num_gpus are not given, and there is no GPU here")
        return placement, []
    except LaunchError as error:
        if arguments.dry_run:
            return assumed_hosts(config, str(error))
        if problems := static_problems(config):
            raise ConfigError([*problems, str(error)]) from None
        raise


def one_copy(config: NeoXConfig) -> int:
    """Ranks that hold the model once: the fewest that can train it."""
    return max(1, config.parallelism.pipe_parallel_size) * config.parallelism.model_parallel_size


def assumed_hosts(config: NeoXConfig, why: str) -> tuple[Placement, list[str]]:
    """Return the ranks that are counted, else those of one copy of the model, and the warning that says so."""
    runner = config.runner
    count = runner.global_num_gpus or runner.num_gpus or one_copy(config)
    what = "" if runner.global_num_gpus or runner.num_gpus else ", one copy of the model"
    return place(Request(global_num_gpus=count)), [f"{why}; {count} ranks are assumed{what}"]


def read_config(arguments: argparse.Namespace, *more: str) -> NeoXConfig:
    """Load the configuration with the command line's overrides, and more; for a script that only runs a model, without
    what binds it to the ranks of training. Raises ConfigError with every problem of keys, grid and batch."""
    draft = draft_config(arguments.conf_file, conf_dir=arguments.conf_dir, overrides=[*overrides(arguments), *more])
    if Path(arguments.script).stem in _INFERENCE:
        draft = replace(draft, config=for_inference(draft.config))
    if draft.problems:
        raise ConfigError([*draft.problems, *other_problems(draft, arguments)])
    return draft.config


def other_problems(draft: Draft, arguments: argparse.Namespace) -> list[str]:
    """What else is wrong beside the keys that cannot be read, so that one run shows everything."""
    try:
        placement, _ = choose_hosts(draft.config, arguments)
    except (LaunchError, ConfigError) as error:
        return draft.certain(error.problems if isinstance(error, ConfigError) else [str(error)])
    return further_problems(draft, placement.world_size, vocabulary(draft.config)[0])


def build_plan(config: NeoXConfig, placement: Placement, script: Path, *, dry_run: bool) -> tuple[RunPlan, list[str]]:
    """Resolve, and return with the plan what is missing or does not fit: warnings of a dry run, errors of a launch."""
    size, tokenizer, problems = vocabulary(config)
    if tokenizer is None and dry_run:
        problems = [f"{problem}; a vocabulary of {size:,} ids is assumed" for problem in problems]
    asked, world = config.runner.global_num_gpus, placement.world_size
    if asked not in (None, world):
        where = config.source("global_num_gpus")
        problems.append(
            f"{where}: `global_num_gpus: {asked}`, but there are {world} ranks ({placement.why}); remove it"
        )
    if taken := master_port_problem(placement, Request.of(config.runner)):
        problems.append(taken)
    training = script.stem == "train"
    if training:
        problems += unusable_data(config, tokenizer, dry_run)
    if training or script.stem in _INFERENCE:
        problems += [*checkpoint_problems(config, training=training), *refused_work(config, script.stem, tokenizer)]
    if training or script.stem == "evaluate":
        problems += missing_packages(config)
    try:
        plan = resolve(config, world, size)
    except ConfigError as error:
        raise ConfigError([*error.problems, *([] if dry_run else problems)]) from None
    problems += too_little_memory(plan, placement, training=script.stem not in _INFERENCE, dry_run=dry_run)
    return plan, problems


def ranks_environment() -> dict[str, str]:
    """Variables for child processes, those of a `.deepspeed_env` file included."""
    return child_environment({**os.environ, **environment_file(os.environ)})


def forwarded_names(config: NeoXConfig, environment: dict[str, str]) -> tuple[str, ...]:
    """Patterns of the variables that travel: the configured ones, and all of a `.deepspeed_env` file."""
    return (*(config.runner.forward_environment or FORWARDED), *environment_file(environment))


def build_spec(
    config: NeoXConfig,
    placement: Placement,
    script: Path,
    script_arguments: tuple[str, ...],
    directory: Path,
    environment: dict[str, str],
) -> LaunchSpec:
    """Describe the launch for every host."""
    return new_spec(
        placement,
        config.runner,
        script,
        script_arguments,
        directory,
        environment,
        forwarded_names(config, environment),
        save=save_directory(config) if script.stem == "train" else None,
        hang_timeout=config.training.hang_timeout,
    )


def save_directory(config: NeoXConfig) -> Path | None:
    """Where checkpoints are written."""
    return Path(config.checkpoint.save).absolute() if config.checkpoint.save else None


def commands_of(spec: LaunchSpec, config: NeoXConfig, environment: dict[str, str]) -> dict[str, Any]:
    """The command that this process runs, every host's, and what the first one's agent starts there."""
    launcher = chosen_launcher(spec.hosts, config.runner)
    head = head_command(spec, config.runner, withheld_secrets(environment, forwarded_names(config, environment)))
    return {
        "launcher": launcher,
        "launch": None if head is None else join(head),
        "commands": [vars(line) for line in host_commands(spec, launcher)],
        "deepspeed_launcher": deepspeed_command(spec),
    }


def show_dry_run(
    plan: RunPlan,
    placement: Placement,
    spec: LaunchSpec,
    environment: dict[str, str],
    warnings: list[str],
    as_json: bool,
) -> None:
    """Print what a dry run answers: one JSON object, or text; warnings go to stderr."""
    try:
        commands = commands_of(spec, plan.config, environment)
    except LaunchError as error:  # too long, say
        commands, warnings = {}, [*warnings, str(error)]
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        hosts: list[dict[str, Any]] = [
            {"name": host.names[0], "slots": host.slots, "ranks": host.ranks, "stages": host.stages}
            for host in ranks_of_hosts(plan.grid, placement.hosts)
        ]
        print(json.dumps({**plan_as_dict(plan), "hosts": hosts, "warnings": warnings, **commands}))
        return
    print(format_plan(plan, training=Path(spec.script).stem not in _INFERENCE))
    print(f"hosts     {len(placement.hosts)} ({placement.why})")
    for group in host_groups(plan.grid, placement.hosts):
        print(f"          {group}")
    for index, line in enumerate(format_commands(spec, chosen_launcher(spec.hosts, plan.config.runner))):
        print(f"{'' if index else 'command':<10}{line}")


def examine_hosts(spec: LaunchSpec, config: NeoXConfig, environment: dict[str, str]) -> tuple[list[HostReport], str]:
    """Ask every host about itself, with the paths that this configuration uses; return the answers, and as a table."""
    from neox.launch.doctor import Checks, examine, format_reports  # a dry run does without

    checks = Checks(
        save_paths=tuple(str(path) for path in (save_directory(config),) if path is not None),
        data_paths=tuple(str(Path(prefix + ".bin").absolute()) for prefix in data_prefixes(config)),
        ssh_port=config.runner.ssh_port,
        seconds=config.runner.doctor_timeout,
        always_ssh=len(spec.hosts) > 1,
    )
    reports = examine(spec, checks, environment)
    return reports, format_reports(reports)


def doctor(arguments: argparse.Namespace) -> int:
    """`deepy.py doctor [CONF ...]`: check all hosts, print the table; 1 where something is to be fixed."""
    config = read_config(arguments)
    placement = place(Request.of(config.runner))
    environment = ranks_environment()
    spec = build_spec(config, placement, Path(), (), Path.cwd(), environment)
    reports, table = examine_hosts(spec, config, environment)
    print(table)
    return 1 if any(report.problems for report in reports) else 0


def without_gpus(placement: Placement, reports: list[HostReport]) -> bool:
    """Whether no host has an accelerator, as far as is known."""
    if reports:
        return all(report.answer.get("accelerators") == 0 for report in reports)
    return placement.is_local and placement.accelerators == 0


def prepare(
    arguments: argparse.Namespace,
    config: NeoXConfig,
    placement: Placement,
    script: Path,
    environment: dict[str, str],
    held: ExitStack,
) -> tuple[LaunchSpec, RunPlan]:
    """Check everything that can be known before ranks start, and write the run directory, this run's alone."""
    plan, problems = build_plan(config, placement, script, dry_run=False)
    unable = launcher_problem(placement.hosts, config.runner, environment.get("PATH", os.defpath))
    if problems:
        raise ConfigError([*problems, *([unable] if unable else [])])
    if unable:
        raise LaunchError(unable)
    directory = run_directory(config.logging.log_dir, arguments.conf_file[0])
    directory = reserve(directory, save_directory(config), script.name, held)
    spec = build_spec(config, placement, script, ("--payload", encode_payload(plan)), directory, environment)
    reports: list[HostReport] = []
    if chosen_launcher(spec.hosts, config.runner) == "pdsh" and not config.runner.no_ssh_check:
        reports, table = examine_hosts(spec, config, environment)
        if any(report.problems for report in reports):
            raise LaunchError(f"nothing was started:\n{table}")
    if config.runner.distributed_backend == "nccl" and without_gpus(placement, reports):
        print("note: there is no GPU: distributed_backend nccl becomes gloo", file=sys.stderr)
        config = read_config(arguments, "distributed_backend=gloo")
        plan = resolve(config, plan.grid.world, plan.vocab_size)
        spec = replace(spec, arguments=("--payload", encode_payload(plan)))
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    summary, commands = plan_as_dict(plan), commands_of(spec, config, environment)
    write_run_directory(
        directory,
        plan=summary,
        deepspeed=summary["deepspeed"],
        config=plan.config.to_flat(),
        commands=[
            join([sys.executable, *sys.argv]),
            *filter(None, [commands["launch"]]),
            *(f"# on {line['host']}\n{line['command']}" for line in commands["commands"]),
        ],
    )
    return spec, plan


def main() -> int:
    """Check, then show or start."""
    setup_logging()
    if len(sys.argv) > 1 and Path(sys.argv[1]).stem in TOOLS:
        return launch_tool(find_script(sys.argv[1]), sys.argv[2:], child_environment())
    if len(sys.argv) > 1:
        refuse_lone_tool(*sys.argv[1:])
    arguments = parse_arguments()
    if arguments.script == "doctor":
        return doctor(arguments)
    config = read_config(arguments)
    placement, warnings = choose_hosts(config, arguments)
    script = find_script(arguments.script)
    environment = ranks_environment()
    if arguments.dry_run:
        plan, missing = build_plan(config, placement, script, dry_run=True)
        path = None if arguments.hosts or arguments.gpus else environment.get("PATH", os.defpath)
        unable = launcher_problem(placement.hosts, config.runner, path)
        directory = run_directory(config.logging.log_dir, arguments.conf_file[0])
        spec = build_spec(config, placement, script, ("--payload", encode_payload(plan)), directory, environment)
        warnings += [*missing, *([unable] if unable else [])]
        show_dry_run(plan, placement, spec, environment, warnings, arguments.json)
        return 0
    with ExitStack() as held:
        spec, plan = prepare(arguments, config, placement, script, environment, held)
        return launch(spec, plan.config.runner, environment, forwarded_names(config, environment))


if __name__ == "__main__":
    run_script(main)
