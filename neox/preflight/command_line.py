"""Command line of `deepy.py`: its flags, the configuration keys that some of them set, and the ranks' script."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from neox.arguments import ScriptParser, add_overrides
from neox.errors import ConfigError
from neox.shipped_files import scripts_root

INFERENCE = ("generate", "evaluate")
"""Scripts that only run a model, on any number of ranks."""
TOOLS = ("preprocess_data", "preprocess_chat", "preprocess_preferences")
"""Tools that divide their work over ranks, without a configuration."""
_SCRIPTS = ("train.py", "generate.py", "evaluate.py", *(f"{name}.py" for name in TOOLS))

_FLAGS_OF_KEYS = (
    "hostfile",
    "include",
    "exclude",
    "num_nodes",
    "num_gpus",
    "master_addr",
    "master_port",
    "launcher",
    "launcher_args",
    "max_restarts",
    "gpu_type",
    "sample_input_file",
    "sample_output_file",
    "iteration",
    "eval_results_prefix",
    "eval_tasks",
    "wandb_group",
    "wandb_team",
)


_DEEPSPEEDS_FLAGS = {
    "no_ssh": "`--launcher none` prints the command for each host",
    "node_rank": "`--launcher none` prints the command for each host, with its number",
    "module": "ranks run a script of this project, or the path of another one",
    "no_python": "ranks run Python scripts",
    "no_local_rank": "ranks read LOCAL_RANK from their environment, and get no such flag",
    "save_pid": "runs/NAME holds the state of a run, and `tools/cluster.py kill` ends it",
    "enable_each_rank_log": "every rank's output is in RUN_DIRECTORY/ranks/HOST/rank_NNNN.log",
    "autotuning": "`--suggest` searches the fastest layouts, and `--measure N` runs them",
    "bind_cores_to_rank": "bind the agents by the scheduler (srun --cpu-bind); cores are divided by OMP_NUM_THREADS",
    "bind_core_list": "bind the agents by the scheduler (srun --cpu-bind); cores are divided by OMP_NUM_THREADS",
    "venv_script": "ranks run with the interpreter of this command, whose directory is the first on PATH",
    "log_level": "plans and steps are always printed; the ranks' own logs are in the run's directory",
    "quiet": "plans and steps are always printed; the ranks' own logs are in the run's directory",
}
"""Flags of DeepSpeed's launcher that are no keys here, and what does the same."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line of `deepy.py`; print a usage error and exit if it is wrong.

    Args:
        argv: Words after the program's name; those of this process if left out.
    """
    parser = _build_parser()
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        parser.error(_unknown_flags(unknown))
    if not arguments.conf_file and arguments.script != "doctor":
        parser.error("at least one configuration file is needed")
    _settle_short_flag(parser, arguments)
    _check_dry_run_flags(parser, arguments)
    return arguments


def _build_parser() -> ScriptParser:
    parser = ScriptParser(
        prog="deepy.py",
        description="Check a configuration, show what follows from it, and start a script on every rank.",
        epilog="Exit status: 2 if the command line or the configuration is wrong, 130 after Ctrl-C, else that of "
        "the run: 0, or that of the rank that failed first (124: it hung). A dry run ends with 2 "
        "if it does not fit in a memory that was given or measured.",
        allow_abbrev=False,
    )
    parser.add_argument("script", help="train.py, generate.py, evaluate.py, or a path; `doctor` checks the hosts")
    parser.add_argument("conf_file", nargs="*", help="configuration files (YAML or JSON; .yml may be left out)")
    parser.add_argument("-d", "--conf_dir", help="directory that is searched first for configuration files")
    add_overrides(parser)
    _add_dry_run_flags(parser)
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="start anew; checkpoints in `save` move to superseded/",
    )
    add_host_flags(parser)
    parser.add_argument(
        "--max-restarts",
        type=_count,
        metavar="N",
        help="restart a failed training up to N times from its newest checkpoint",
    )
    _add_inference_flags(parser)
    parser.add_argument("--wandb_group", help="wandb group")
    parser.add_argument("--wandb_team", help="wandb team (entity)")
    return parser


def _add_dry_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="show the plan and start nothing")
    parser.add_argument("--dryrun", "--dry_run", dest="dry_run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="with --dry-run: print the plan as one JSON object")
    parser.add_argument("--verbose", action="store_true", help="with --dry-run: every stage, key, source and command")
    parser.add_argument(
        "--suggest",
        nargs="?",
        const="",
        metavar="GPU",
        help="print the fastest layouts that fit; start nothing",
    )
    parser.add_argument(
        "--measure",
        type=_positive,
        metavar="N",
        help="with --suggest: train the best N layouts for a few steps on these hosts, and rank them by measured time",
    )
    parser.add_argument("--suggest-output", metavar="FILE", help="with --suggest: YAML file for the best layout's keys")
    parser.add_argument(
        "--plot", metavar="FILE", help="with --dry-run: PNG of learning rate, batch, and a step of stages"
    )
    parser.add_argument("--hosts", type=_positive, metavar="N", help="with --dry-run: plan for this many hosts")
    parser.add_argument("--gpus", type=_positive, metavar="M", help="with --dry-run: GPUs on each of --hosts")
    parser.add_argument("--gpu-type", help="kind of GPU that is planned for, such as a100-40: its memory and peak")


def add_host_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags that choose hosts, slots, launcher and rendezvous.

    Args:
        parser: A parser, or a group of one.
    """
    parser.add_argument("-H", "--hostfile", help="file of `host slots=N` lines")
    parser.add_argument("--include", help="hosts and slots to use: worker-0:0,2@worker-1")
    parser.add_argument("--exclude", help="hosts and slots not to use")
    parser.add_argument("--num_nodes", type=_positive, help="use only this many hosts, the first ones")
    parser.add_argument("--num_gpus", "--num_accelerators", type=_positive, help="ranks on each host")
    parser.add_argument("--master_addr", help="address of the first host")
    parser.add_argument("--master_port", type=_positive, help="port of the rendezvous; a free one if left out")
    parser.add_argument("--launcher", help="local, pdsh, none, slurm or openmpi")
    parser.add_argument("--launcher_args", metavar="WORDS", help="more arguments of srun or mpirun, as one argument")


def _add_inference_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--sample_input_file", help="prompts for generation, one a line")
    parser.add_argument("--sample_output_file", help="file for the completions")
    short = "generate.py: --sample_output_file; other scripts: --set"
    parser.add_argument("-o", dest="set", action="append", type=_ShortFlagValue, metavar="VALUE", help=short)
    parser.add_argument("--eval_tasks", nargs="+", metavar="TASK", help="evaluation tasks")
    parser.add_argument("--iteration", type=int, help="step of the checkpoint to load; the newest if left out")
    parser.add_argument("--eval_results_prefix", help="prefix of the evaluation's result files")


def _positive(text: str) -> int:
    """Return the positive whole number that a text holds."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _count(text: str) -> int:
    """Parse a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _unknown_flags(unknown: Sequence[str]) -> str:
    """Return the message about words that are no flags, with the way to set a key of the configuration."""
    message = f"unrecognized arguments: {' '.join(unknown)}"
    for word in unknown:
        if word.startswith("--"):
            key = word.removeprefix("--").partition("=")[0].replace("-", "_")
            if key in _DEEPSPEEDS_FLAGS:
                return f"{message}; {_DEEPSPEEDS_FLAGS[key]}"
            return f"{message}; a configuration's key is given as `--set {key}=VALUE`"
    return message


class _ShortFlagValue(str):
    """A value given with `-o`, until it is known what the flag means for the script."""


def _settle_short_flag(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Make `-o` the file for completions if the script generates text, else an override of a key."""
    given = [text for text in arguments.set if isinstance(text, _ShortFlagValue)]
    if Path(arguments.script).stem == "generate":
        arguments.set = [text for text in arguments.set if not isinstance(text, _ShortFlagValue)]
        if given:
            arguments.sample_output_file = given[-1]
        return
    for text in given:
        if "=" not in text:
            parser.error(f"-o {text}: {arguments.script} writes no text, and `-o KEY=VALUE` overrides a key")


def _check_dry_run_flags(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    shown = (arguments.json, arguments.verbose, arguments.plot)
    if any(shown) and not arguments.dry_run:
        parser.error("--json, --verbose and --plot go with --dry-run")
    if (arguments.hosts or arguments.gpus) and not arguments.dry_run and arguments.suggest is None:
        parser.error("--hosts and --gpus go with --dry-run or --suggest")
    if arguments.suggest is not None and Path(arguments.script).stem in INFERENCE:
        parser.error(f"--suggest searches layouts of a training; {arguments.script} only runs a model")
    if (arguments.suggest_output or arguments.measure) and arguments.suggest is None:
        parser.error("--suggest-output and --measure need --suggest")
    if arguments.measure and (arguments.hosts or arguments.gpus):
        parser.error("--measure runs on the available hosts; remove --hosts and --gpus")
    if arguments.plot and Path(arguments.script).stem in INFERENCE:
        parser.error(f"--plot draws a training; {arguments.script} only runs a model")


def overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the overrides of a command line as `key=value`: flags that stand for keys, then `--set`, which wins."""
    texts = []
    for key in _FLAGS_OF_KEYS:
        value = getattr(arguments, key)
        if isinstance(value, str):
            texts.append(f"{key}={value}")
        elif value is not None:
            texts.append(f"{key}={json.dumps(value)}")
    if arguments.overwrite:
        texts.append("overwrite=true")
    return texts + list(arguments.set)


def plain_command(arguments: argparse.Namespace) -> list[str]:
    """Return the command line of the run itself, without flags for output, suggestions, restarts or overwriting."""
    words = [sys.executable, sys.argv[0], arguments.script, *arguments.conf_file]
    if arguments.conf_dir:
        words += ["--conf_dir", arguments.conf_dir]
    for text in overrides(arguments):
        if text != "overwrite=true":
            words += ["--set", text]
    return words


def find_script(name: str) -> Path:
    """Return the absolute path of a script: as given, else in the project's root, else in its tools/.

    Args:
        name: Path or name, with or without `.py`.

    Raises:
        ConfigError: It does not exist.
    """
    path = _existing_script(name)
    if path is not None:
        return path
    close = get_close_matches(Path(name).with_suffix(".py").name, _SCRIPTS, n=1)
    if close:
        raise ConfigError(f"script {name} does not exist, here or in the project; did you mean {close[0]}?")
    raise ConfigError(f"script {name} does not exist, here or in the project; ranks run {', '.join(_SCRIPTS)}")


def _existing_script(name: str) -> Path | None:
    path = name if name.endswith(".py") else f"{name}.py"
    root = scripts_root()
    for candidate in (Path(path), root / path, root / "tools" / path):
        if candidate.is_file():
            return candidate.absolute()
    return None


def find_lone_tool(name: str) -> Path | None:
    """Return the path of a tool of the project that runs in one process, with flags of its own; None for others.

    Args:
        name: Path or name, with or without `.py`.
    """
    path = _existing_script(name)
    if path is None:
        return None
    tool = scripts_root() / "tools" / path.name
    belongs_to_project = path.parent in (scripts_root(), tool.parent)
    if belongs_to_project and tool.is_file() and tool.name not in _SCRIPTS:
        return tool
    return None
