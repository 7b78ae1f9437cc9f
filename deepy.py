#!/usr/bin/env python3
"""YAML files -> checked configuration -> DeepSpeed's JSON -> a script on every rank.

python deepy.py train.py -d configs 20B.yml local_setup.yml
python deepy.py train.py -d configs 20B.yml --set global_num_gpus=96 --dry-run
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import neox
from neox.config import NeoXConfig, RunPlan, encode_payload, format_plan, load_config, plan_as_dict, resolve
from neox.errors import ConfigError, LaunchError, TokenizerError, run_script
from neox.launch.environment import FORWARDED, child_environment, forwarded_environment, withheld_secrets
from neox.launch.placement import (
    Placement,
    Request,
    check_local_devices,
    code_root,
    master_address,
    master_port,
    place,
)
from neox.launch.preflight import missing_data
from neox.launch.run_directory import new_run_id, run_directory, write_run_directory
from neox.launch.spec import Host, LaunchSpec
from neox.launch.start import launch, shown_commands
from neox.log import setup_logging

# A dry run without the tokenizer's files assumes these many ids.
_ASSUMED_VOCABULARY = {"GPT2BPETokenizer": 50257, "HFGPT2Tokenizer": 50257, "HFTokenizer": 50277}
_ASSUMED_OTHERWISE = 50257

_FLAGS_OF_KEYS = (
    "hostfile",
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
    parser.add_argument("-i", "--sample_input_file", help="prompts for generation, one a line")
    parser.add_argument("-o", "--sample_output_file", help="where completions are written")
    parser.add_argument("--eval_tasks", nargs="+", metavar="TASK", help="evaluation tasks")
    parser.add_argument("--iteration", type=int, help="checkpoint to load; the newest where left out")
    parser.add_argument("--eval_results_prefix", help="prefix of the evaluation's result files")
    parser.add_argument("--wandb_group", help="wandb group")
    parser.add_argument("--wandb_team", help="wandb team (entity)")
    parser.add_argument("--autotuning", choices=["tune", "run"], dest="autotuning_run", help="DeepSpeed's autotuner")
    parser.add_argument("--version", action="version", version=f"neox {neox.__version__}")
    arguments = parser.parse_intermixed_args(argv)
    if not arguments.conf_file:
        parser.error("at least one configuration file is needed")
    if (arguments.json or arguments.hosts or arguments.gpus) and not arguments.dry_run:
        parser.error("--json, --hosts and --gpus go with --dry-run")
    return arguments


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def overrides(arguments: argparse.Namespace) -> list[str]:
    """Turn flags into overrides of the keys they stand for; `--set` comes last and wins."""
    given = ((key, getattr(arguments, key)) for key in _FLAGS_OF_KEYS)
    texts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in given if value is not None)
    return [*(f"{key}={text}" for key, text in texts), *arguments.set]


def find_script(name: str) -> Path:
    """Return the script's absolute path: as given, else in the project's root, else in its tools/."""
    path = name if name.endswith(".py") else f"{name}.py"
    for candidate in (Path(path), code_root() / path, code_root() / "tools" / path):
        if candidate.is_file():
            return candidate.absolute()
    known = sorted(p.name for p in [*code_root().glob("train.py"), *code_root().glob("tools/*.py")])
    raise LaunchError(f"script {name} does not exist, here or in the project; there are {', '.join(known)}")


def vocabulary(config: NeoXConfig, dry_run: bool) -> tuple[int, list[str]]:
    """Return the tokenizer's vocabulary size, and in a dry run what had to be assumed."""
    from neox.tokenizer import build_tokenizer

    settings = config.tokenizer
    try:
        return build_tokenizer(settings.tokenizer_type, settings.vocab_file, settings.merge_file).vocab_size, []
    except TokenizerError as error:
        if not dry_run:
            raise TokenizerError(
                f"{error}\nmake one with `python tools/train_tokenizer.py`, or set vocab_file to an existing one"
            ) from None
        size = _ASSUMED_VOCABULARY.get(settings.tokenizer_type, _ASSUMED_OTHERWISE)
        return size, [f"{error}; a vocabulary of {size:,} ids is assumed"]


def request_of(config: NeoXConfig) -> Request:
    """What the configuration says about hosts."""
    runner = config.runner
    return Request(
        hostfile=runner.hostfile,
        include=runner.include,
        exclude=runner.exclude,
        num_nodes=runner.num_nodes,
        num_gpus=runner.num_gpus,
        global_num_gpus=runner.global_num_gpus,
        master_addr=runner.master_addr,
        master_port=runner.master_port,
    )


def choose_hosts(request: Request, arguments: argparse.Namespace) -> tuple[Placement, list[str]]:
    """Return where ranks go; in a dry run what is wrong with it becomes a warning, and hosts can be imagined."""
    if arguments.hosts or arguments.gpus:
        slots = tuple(range(arguments.gpus or 8))
        hosts = tuple(Host(f"host{number}", slots) for number in range(arguments.hosts or 1))
        return Placement(hosts, "--hosts and --gpus", 0), []
    try:
        placement = place(request)
    except LaunchError as error:
        if not arguments.dry_run:
            raise
        assumed = place(Request(num_gpus=request.num_gpus, global_num_gpus=request.global_num_gpus))
        return assumed, [f"{error}; {assumed.world_size} ranks are assumed"]
    if not arguments.dry_run and not (request.global_num_gpus and placement.is_local):
        check_local_devices(placement)
    return placement, []


def build_plan(arguments: argparse.Namespace) -> tuple[RunPlan, Placement, list[str]]:
    """Load, place, ask the tokenizer, resolve. Returns the plan, where it runs, and a dry run's warnings."""
    changes = overrides(arguments)
    config = load_config(arguments.conf_file, conf_dir=arguments.conf_dir, overrides=changes)
    placement, warnings = choose_hosts(request_of(config), arguments)
    if placement.is_local and not placement.accelerators and config.runner.distributed_backend == "nccl":
        warnings_for = "this machine has no GPU: distributed_backend nccl becomes gloo"
        if not arguments.dry_run:
            changes.append("distributed_backend=gloo")
            config = load_config(arguments.conf_file, conf_dir=arguments.conf_dir, overrides=changes)
            print(f"note: {warnings_for}", file=sys.stderr)
    size, assumed = vocabulary(config, arguments.dry_run)
    return resolve(config, placement.world_size, size), placement, warnings + assumed


def build_spec(
    plan: RunPlan, placement: Placement, script: Path, directory: Path, environment: dict[str, str]
) -> LaunchSpec:
    """Describe the launch for every host."""
    request = request_of(plan.config)
    return LaunchSpec(
        run_id=new_run_id(),
        hosts=placement.hosts,
        master_addr=master_address(placement, request),
        master_port=master_port(placement, request),
        script=str(script),
        arguments=("--payload", encode_payload(plan)),
        directory=str(Path.cwd()),
        code_root=str(code_root()),
        run_directory=str(directory),
        python=sys.executable,
        environment=forwarded_environment(environment, plan.config.runner.forward_environment or FORWARDED),
        hang_timeout=plan.config.training.hang_timeout,
        stop_timeout=plan.config.runner.stop_timeout,
    )


def show_plan(plan: RunPlan, placement: Placement, spec: LaunchSpec, warnings: list[str], as_json: bool) -> None:
    """Print what a dry run answers: one JSON object, or text; warnings go to stderr."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    commands = shown_commands(spec)
    if as_json:
        hosts: list[dict[str, Any]] = [{"name": host.name, "slots": len(host.slots)} for host in placement.hosts]
        print(json.dumps({**plan_as_dict(plan), "hosts": hosts, "warnings": warnings, "commands": commands}))
        return
    print(format_plan(plan))
    print(f"hosts     {len(placement.hosts)} ({placement.why})")
    print(f"command   on {commands[0]['host']}: {commands[0]['command']}")
    if len(commands) > 1:
        print(f"          on {len(commands) - 1} more hosts the same with --node_rank 1 to {len(commands) - 1}")


def main() -> int:
    """Check, then show or start."""
    setup_logging()
    arguments = parse_arguments()
    plan, placement, warnings = build_plan(arguments)
    script = find_script(arguments.script)
    directory = run_directory(plan.config.logging.log_dir, arguments.conf_file[0])
    environment = child_environment()
    spec = build_spec(plan, placement, script, directory, environment)
    problems = missing_data(plan.config) if script.stem == "train" else []
    if arguments.dry_run:
        show_plan(plan, placement, spec, warnings + problems, arguments.json)
        return 0
    if problems:
        raise ConfigError(problems)
    for name in withheld_secrets(environment) if not placement.is_local else ():
        print(f"note: {name} is a secret and stays on this machine; set it on the hosts that need it", file=sys.stderr)
    write_run_directory(
        directory,
        plan=plan_as_dict(plan),
        deepspeed=plan_as_dict(plan)["deepspeed"],
        config=plan.config.to_flat(),
        commands=[[sys.executable, *sys.argv]],
    )
    return launch(spec, plan.config.runner, environment)


if __name__ == "__main__":
    run_script(main)
