"""Checks by the launcher before ranks start: tokenizer, checkpoint, packages, tasks and memory."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from neox.config import NeoXConfig
from neox.config.sections.optimizer_table import WITHOUT_SAVED_OPTIMIZER, goes_on, other_optimizer
from neox.config.yaml_file import read_file
from neox.errors import ConfigError, EvaluationError, GenerationError, TokenizerError, install_command
from neox.launch.command_line import INFERENCE
from neox.launch.machine import available_memory, smallest_memory
from neox.launch.placement import Placement
from neox.plan import (
    Device,
    RunPlan,
    architecture_settings,
    gpu_device,
    host_device,
    memory_problem,
    setting_differences,
)
from neox.plan.device import gib, rank_memory
from neox.plan.precision import newest_checkpoint
from neox.problems import Problem

if TYPE_CHECKING:
    from neox.tokenizer import Tokenizer

# The number of ids that a dry run assumes without the tokenizer's files.
_ASSUMED_VOCABULARY = {"GPT2BPETokenizer": 50257, "HFGPT2Tokenizer": 50257, "HFTokenizer": 50277}
_ASSUMED_OTHERWISE = 50257
# What `make quickstart` makes.
_QUICKSTART_TOKENIZER = ("data", "quickstart", "tokenizer.json")
# GPT-NeoX-20B's.
_TOKENIZER_20B = (
    "20B_tokenizer.json",
    "https://huggingface.co/EleutherAI/gpt-neox-20b/resolve/main/tokenizer.json",
)
_NVME_PATHS = ("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path")
_CHECKPOINT_CONFIG = "configs/config.yml"  # written by `neox.checkpoint.write_config` beside the weights


def vocabulary(config: NeoXConfig) -> tuple[int, Tokenizer | None, list[Problem]]:
    """Build the tokenizer.

    Returns:
        Its number of ids, the tokenizer, and problems; an assumed number (`padded_vocab_size` if it is given), None and
        why where it cannot be built.
    """
    settings = config.tokenizer
    try:
        from neox.tokenizer import tokenizer_of  # numpy, without which a plan can be made

        tokenizer = tokenizer_of(config)
        return tokenizer.vocab_size, tokenizer, []
    except TokenizerError as error:
        problem = str(error)
        file = Path(settings.vocab_file or "")
        if not config.given("tokenizer_type") and file.name.endswith("tokenizer.json"):
            default = settings.tokenizer_type
            problem += f" (gpt-neox's default is {default}; `tokenizer_type: HFTokenizer` reads a tokenizer.json)"
        elif file.parts[-3:] == _QUICKSTART_TOKENIZER and not file.exists():
            problem += " (`make quickstart` makes it)"
        elif file.name == _TOKENIZER_20B[0] and not file.exists():
            problem += f" (get it: `curl --create-dirs -o {quote(str(file))} {_TOKENIZER_20B[1]}`)"
        elif "train_tokenizer" not in problem:
            problem += " (`python tools/train_tokenizer.py` makes one)"
    except ModuleNotFoundError as error:  # a plan needs pydantic and PyYAML alone
        problem = f"the tokenizer cannot be read: the package {error.name} is not installed (`make install`)"
    assumed = settings.padded_vocab_size or _ASSUMED_VOCABULARY.get(settings.tokenizer_type, _ASSUMED_OTHERWISE)
    return assumed, None, [config.problem_about(problem, "vocab_file", "tokenizer_type")]


def missing_packages(config: NeoXConfig) -> list[Problem]:
    """Return a sentence for each optional package that a key asks for and that is not installed."""
    keys = config.logging
    optimizer = config.optimizer.optimizer.kind.package
    harness = [task for task in config.generation.eval_tasks or () if "=" not in task]
    wanted = (
        (bool(keys.use_wandb), "use_wandb", "wandb", "requirements-wandb.txt"),
        (keys.tensorboard_dir is not None, "tensorboard_dir", "tensorboard", "requirements-tensorboard.txt"),
        (bool(harness), "eval_tasks", "lm_eval", "requirements-eval.txt"),
        (bool(optimizer), "optimizer.type", optimizer, f"requirements-{optimizer}.txt"),
    )
    problems = []
    for asked, key, package, file in wanted:
        if asked and not _is_installed(package):
            missing = f"`{key}` needs the package {package}, which is not installed"
            problems.append(config.problem_about(f"{missing}: {install_command(file)}, or unset {key}", key))
    return problems


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported; a directory of its name here (of logs, usually) is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def login_problems(config: NeoXConfig, environment: Mapping[str, str]) -> list[Problem]:
    """Return why Weights & Biases would refuse the run for lack of a login on this machine.

    Args:
        config: The configuration.
        environment: `WANDB_API_KEY`, `WANDB_MODE`, and what names the file of logins: `NETRC`, `HOME`.
    """
    keys = config.logging
    offline = environment.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if not keys.use_wandb or offline or environment.get("WANDB_API_KEY") or not _is_installed("wandb"):
        return []
    file = Path(environment.get("NETRC") or Path(environment.get("HOME", "/"), ".netrc"))
    try:
        if netrc(file).authenticators(urlsplit(keys.wandb_host).hostname or "") is not None:
            return []
    except (OSError, NetrcParseError):
        pass  # no login there
    advice = "set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline"
    return [config.problem_about(f"`use_wandb` needs a login to {keys.wandb_host}: {advice}", "use_wandb")]


def task_problems(config: NeoXConfig, script: str, tokenizer: Tokenizer | None) -> list[Problem]:
    """Return why prompts, or evaluation tasks (in training, too), would be refused.

    Args:
        config: The configuration.
        script: Name of the script, without `.py`.
        tokenizer: The run's tokenizer; None where it is not known.
    """
    if config.model.objective == "masked_lm" and script in INFERENCE:
        return [config.problem("objective", "neither writes nor scores text; train.py evaluates it on masked tokens")]
    try:
        if script == "generate":
            from neox.generation.request import check_generation  # numpy, which a dry run without prompts does not need

            check_generation(config, tokenizer)
        elif script == "evaluate" or config.generation.eval_tasks:
            from neox.evaluation.tasks import check_file_tasks  # numpy, which a dry run without tasks does not need

            check_file_tasks(config, tokenizer)
    except (GenerationError, EvaluationError) as error:
        return [Problem((), line) for line in str(error).splitlines()]
    return []


def device_of_ranks(plan: RunPlan, placement: Placement, *, training: bool, dry_run: bool) -> Device:
    """Return what the ranks run on: CPUs or GPUs of this machine, or GPUs of `gpu_memory_gib` elsewhere.

    Args:
        plan: The plan.
        placement: Hosts and slots.
        training: Whether the model is trained, not only run.
        dry_run: Whether nothing will be started; then `gpu_memory_gib` and `global_num_gpus`, where given, mean GPUs.
    """
    asked = plan.config.given("gpu_memory_gib")
    for_gpus = placement.assumed or (dry_run and (asked or plan.config.given("global_num_gpus")))
    if placement.is_local and not placement.accelerators and not for_gpus:
        name, ranks = placement.hosts[0].name, range(placement.world_size)
        return host_device(plan, ranks, name, available_memory(), training=training)
    here = placement.is_local and placement.accelerators and not asked and not placement.assumed
    return gpu_device(plan, smallest_memory() if here else None)


def memory_problems(plan: RunPlan, device: Device, *, training: bool) -> list[Problem]:
    """Return why a run does not fit on its devices."""
    problem = memory_problem(plan, device, training=training)
    if problem is None:
        return []
    key = device.size_key
    return [Problem((key,), f"{problem} ({device.source}; with a larger {key} the run starts all the same)")]


def nvme_paths(config: NeoXConfig) -> tuple[str, ...]:
    """Return the directories where each host keeps files of offloaded states and weights."""
    zero = config.deepspeed.zero_optimization
    return tuple({str(Path(path).absolute()): 0 for path in (zero.states_directory, zero.weights_directory) if path})


def nvme_problems(
    plan: RunPlan, ranks: Sequence[int], host: str, states: Mapping[str, Mapping[str, Any]]
) -> list[Problem]:
    """Return why ranks cannot offload to files of their host.

    Args:
        plan: The plan.
        ranks: The ranks on the host.
        host: Its name.
        states: What `path_state` found there of each of `nvme_paths`.
    """
    here = {path: states[path] for path in nvme_paths(plan.config)}
    if closed := [path for path, state in here.items() if not state["writable"]]:
        problem = "is no directory that can be written; choose another"
        return [Problem(_NVME_PATHS, f"{host}: nvme_path {path} {problem}") for path in closed]
    needed = sum(rank_memory(plan, rank, on_cpu=False).files for rank in ranks)
    free = sum(state["free"] for state in here.values())
    if not here or needed <= free:
        return []
    message = (
        f"{host}: {len(ranks)} ranks offload {gib(needed)} to files, but nvme_path {' and '.join(here)} has "
        f"{gib(free)} free; choose a larger disk, or use more hosts"
    )
    return [Problem(_NVME_PATHS, message)]


def checkpoint_problems(config: NeoXConfig, *, training: bool) -> list[Problem]:
    """Return what is wrong with the checkpoint to load, as far as can be seen without reading weights.

    Training that resumes from its own `save` directory also starts there; other scripts read `save` where `load` is not
    given. The ranks check later whether the files are complete.

    Args:
        config: The configuration.
        training: Whether the model is trained, not only run.
    """
    keys = config.checkpoint
    directory, key = (keys.load, "load") if training or keys.load else (keys.save, "save")
    if directory is None:
        message = "neither `load` nor `save` is given: --set load=DIRECTORY names a checkpoint"
        return [] if training else [Problem(("load", "save"), message)]
    load = Path(directory)
    own = training and keys.save is not None and load.absolute() == Path(keys.save).absolute()  # a first start, maybe
    if not load.is_dir():
        return [] if own else [config.problem(key, "is no directory: nothing to load")]
    if not own and not any(any(load.glob(sign)) for sign in ("*global_step*", "*.pt", _CHECKPOINT_CONFIG)):
        return [config.problem(key, "holds no checkpoint: no global_stepN directory")]
    chosen = _chosen_checkpoint(load, keys.iteration)
    if keys.iteration is not None and not chosen.is_dir() and load.name != chosen.name:
        found = ", ".join(sorted(path.name for path in load.glob("global_step*"))) or "no checkpoint"
        return [config.problem("iteration", f"is not in {load}, which has {found}", key)]
    saved = _saved_config(chosen)
    if training and (problem := _optimizer_problem(chosen, saved, config)) is not None:
        return [config.problem_about(problem, key, "optimizer.type")]
    differing = _differences(saved, config, finetune=False if training and keys.finetune else None)
    if not differing:
        return []
    advice = "give the checkpoint's values, or another directory"
    message = f"{chosen} is of another model: {'; '.join(differing.values())}; {advice}"
    return [config.problem_about(message, key, *differing)]


def finetune_notes(config: NeoXConfig) -> list[str]:
    """Return in which settings of the network, of those that may differ, fine-tuning departs from its checkpoint."""
    keys = config.checkpoint
    if not keys.finetune or keys.load is None:
        return []
    chosen = _chosen_checkpoint(Path(keys.load), keys.iteration)
    differing = _differences(_saved_config(chosen), config, finetune=True)
    return [f"finetune: {difference} ({chosen})" for difference in differing.values()]


def _chosen_checkpoint(load: Path, iteration: int | None) -> Path:
    return newest_checkpoint(load) if iteration is None else load / f"global_step{iteration}"


def _differences(saved: NeoXConfig | None, config: NeoXConfig, *, finetune: bool | None) -> dict[str, str]:
    """Return the settings of the network in which a checkpoint of this program differs, with both values as text.

    Args:
        saved: The checkpoint's configuration; None of another program's, whose tensors the ranks compare.
        config: The configuration that loads it.
        finetune: True for settings that may differ in fine-tuning, False for those that may not, None for both.
    """
    if saved is None:
        return {}
    try:
        found = setting_differences(architecture_settings(saved), config, finetune=finetune)
    except (ConfigError, TypeError):
        return {}
    return {key: f"{key} is {value} there, {config.describe_setting(key)} here" for key, (value, _) in found.items()}


def _optimizer_problem(checkpoint: Path, saved: NeoXConfig | None, config: NeoXConfig) -> str | None:
    """Return why training cannot resume from the optimizer state of a checkpoint, and the ways out; None where it can.

    Names of files and words in pickles decide. Without files of its own (ZeRO) the state is in the client files, in
    torch's form: with its `param_groups`.
    """
    keys = config.checkpoint
    if keys.finetune or keys.no_load_optim or not checkpoint.is_dir():
        return None
    if not any(checkpoint.glob("layer_*.pt")):  # an unknown layout: the ranks look closer
        return None
    zero_files = sorted(checkpoint.glob("*zero_pp_rank_*_optim_states.pt"))
    if not zero_files and not any(_mentions(file, b"param_groups") for file in checkpoint.glob("mp_rank_*.pt")):
        return f"{checkpoint} holds no optimizer state to go on with; {WITHOUT_SAVED_OPTIMIZER}"
    if (
        zero_files
        and not (checkpoint / "manifest.json").is_file()
        and not _mentions(zero_files[0], b"param_slice_mappings")
    ):
        return (
            f"{checkpoint} holds an optimizer state that does not say where parameters lie, as DeepSpeed before 0.7 "
            f"wrote it (GPT-NeoX-20B's full weights are of that kind); {WITHOUT_SAVED_OPTIMIZER}"
        )
    here = config.optimizer.optimizer.name
    there = here if saved is None else saved.optimizer.optimizer.name
    return None if goes_on(there, here) else other_optimizer(checkpoint, there, here)


def _saved_config(checkpoint: Path) -> NeoXConfig | None:
    """Return the configuration that a checkpoint of this program holds; None of another program's."""
    try:
        return NeoXConfig.from_flat(read_file(checkpoint / _CHECKPOINT_CONFIG).values)
    except (ConfigError, TypeError):
        return None


def _mentions(file: Path, key: bytes) -> bool:
    """Return whether the pickle inside a file of torch contains a key; True where it cannot be read."""
    try:
        with zipfile.ZipFile(file) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return not pickles or key in archive.read(pickles[0])
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError):
        return True
