"""Command line of `deepy.py`: flags, the configuration's keys behind them, and the script that ranks run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from neox.arguments import ScriptParser, add_overrides
from neox.errors import ConfigError
from neox.launch.spec import code_root

# Scripts that only run a model, on any number of ranks.
INFERENCE = ("generate", "evaluate")
# Tools that divide their work over ranks, without a configuration.
TOOLS = ("preprocess_data", "preprocess_chat")
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
    "sample_input_file",
    "sample_output_file",
    "iteration",
    "eval_results_prefix",
    "eval_tasks",
    "wandb_group",
    "wandb_team",
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line.

    Args:
        argv: The words after the program's name; this process's when left out.
    """
    parser = ScriptParser(
        prog="deepy.py",
        description="Check a configuration, show what follows from it, and start a script on every rank.",
        epilog="Exit status: 2 where the command line or the configuration is wrong, 130 after Ctrl-C, else that of "
        "the run: 0, or that of the rank that failed first (124: it hung).",
        allow_abbrev=False,
    )
    parser.add_argument("script", help="train.py, generate.py, evaluate.py, or a path; `doctor` checks the hosts")
    parser.add_argument("conf_file", nargs="*", help="configuration files (YAML or JSON; .yml may be left out)")
    parser.add_argument("-d", "--conf_dir", help="directory of the configuration files")
    add_overrides(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the plan and start nothing")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print the plan as one JSON object")
    parser.add_argument("--verbose", action="store_true", help="with --dry-run: every stage, key, source and command")
    parser.add_argument("--plot", metavar="FILE", help="with --dry-run: PNG of learning rate and batch over the run")
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
    parser.add_argument("--sample_output_file", help="where completions are written")
    short = "generate.py: --sample_output_file; other scripts: --set"
    parser.add_argument("-o", dest="set", action="append", type=_Short, metavar="VALUE", help=short)
    parser.add_argument("--eval_tasks", nargs="+", metavar="TASK", help="evaluation tasks")
    parser.add_argument("--iteration", type=int, help="checkpoint to load; the newest where left out")
    parser.add_argument("--eval_results_prefix", help="prefix of the evaluation's result files")
    parser.add_argument("--wandb_group", help="wandb group")
    parser.add_argument("--wandb_team", help="wandb team (entity)")
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        keys = [text.lstrip("-").replace("-", "_").split("=")[0] for text in unknown if text.startswith("--")]
        hint = f"; a configuration's key is given as `--set {keys[0]}=VALUE`" if keys else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if not arguments.conf_file and arguments.script != "doctor":
        parser.error("at least one configuration file is needed")
    if problem := _settle_short(arguments):
        parser.error(problem)
    shown = (arguments.json, arguments.verbose, arguments.plot, arguments.hosts, arguments.gpus)
    if any(shown) and not arguments.dry_run:
        parser.error("--json, --verbose, --plot, --hosts and --gpus go with --dry-run")
    if arguments.plot and Path(arguments.script).stem in INFERENCE:
        parser.error(f"--plot draws a training; {arguments.script} only runs a model")
    return arguments


class _Short(str):
    """What `-o` was given."""


def _settle_short(arguments: argparse.Namespace) -> str | None:
    """Make `-o` the file of completions where text is written, else an override; return what is wrong with it."""
    given = [text for text in arguments.set if isinstance(text, _Short)]
    if Path(arguments.script).stem == "generate":
        arguments.set = [text for text in arguments.set if not isinstance(text, _Short)]
        arguments.sample_output_file = given[-1] if given else arguments.sample_output_file
    elif wrong := [text for text in given if "=" not in text]:
        return f"-o {wrong[0]}: {arguments.script} writes no text, and `-o KEY=VALUE` overrides a key"
    return None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def overrides(arguments: argparse.Namespace) -> list[str]:
    """Return overrides, as `key=value`, for flags that stand for keys; `--set` comes last, so that it wins."""
    given = ((key, getattr(arguments, key)) for key in _FLAGS_OF_KEYS)
    texts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in given if value is not None)
    return [*(f"{key}={text}" for key, text in texts), *arguments.set]


def find_script(name: str) -> Path:
    """Find a script: as given, else in the project's root, else in its tools/.

    Args:
        name: Path or name, with or without `.py`.

    Returns:
        The absolute path.

    Raises:
        ConfigError: It does not exist.
    """
    if (path := _existing_script(name)) is not None:
        return path
    if close := get_close_matches(Path(name).with_suffix(".py").name, _SCRIPTS, n=1):
        raise ConfigError(f"script {name} does not exist, here or in the project; did you mean {close[0]}?")
    raise ConfigError(f"script {name} does not exist, here or in the project; ranks run {', '.join(_SCRIPTS)}")


def _existing_script(name: str) -> Path | None:
    path = name if name.endswith(".py") else f"{name}.py"
    candidates = (Path(path), code_root() / path, code_root() / "tools" / path)
    return next((candidate.absolute() for candidate in candidates if candidate.is_file()), None)


def find_lone_tool(name: str) -> Path | None:
    """Return the project's tool of this name if it runs in one process, with flags of its own; else None."""
    path = _existing_script(name)
    root, tool = code_root(), code_root() / "tools" / Path(path or name).name
    lone = path is not None and path.parent in (root, tool.parent) and tool.is_file() and tool.name not in _SCRIPTS
    return tool if lone else None
