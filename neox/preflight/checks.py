"""Checks by the launcher of what a run needs: packages, logins, tasks, memory and disks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from neox.config import NeoXConfig
from neox.devices import GPUS, DeviceFamily
from neox.errors import ConfigError, LaunchError, install_command
from neox.launch.hosts.machine import available_memory, device_family, smallest_memory
from neox.launch.hosts.placement import Placement, check_local_devices
from neox.launch.hosts.vendors import VENDORS, refused_backend
from neox.plan import Device, RunPlan, gpu_device, host_device, memory_problem
from neox.plan.devices.device import gib, rank_memory
from neox.preflight.command_line import INFERENCE
from neox.problems import Problem

if TYPE_CHECKING:
    from neox.tokenizer import Tokenizer

_NVME_PATHS = ("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path")
_KEYS_ABOUT_GPUS = ("gpu_memory_gib", "gpu_type", "global_num_gpus")
_WANDB_WITHOUT_LOGIN = ("offline", "disabled", "dryrun")  # values of WANDB_MODE


def missing_packages(config: NeoXConfig) -> list[Problem]:
    """Return a problem for each optional package that a key asks for and that is not installed."""
    problems = []
    for key, package, file in _wanted_packages(config):
        if not _is_installed(package):
            missing = f"`{key}` needs the package {package}, which is not installed"
            problems.append(config.problem_about(f"{missing}: {install_command(file)}, or unset {key}", key))
    return problems


def _wanted_packages(config: NeoXConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the keys that need an optional package, with the package and the file of requirements that has it."""
    if config.logging.use_wandb:
        yield "use_wandb", "wandb", "requirements-wandb.txt"
    if config.logging.use_mlflow:
        yield "use_mlflow", "mlflow", "requirements-mlflow.txt"
    if config.logging.use_comet:
        yield "use_comet", "comet_ml", "requirements-comet.txt"
    if config.logging.use_trackio:
        yield "use_trackio", "trackio", "requirements-trackio.txt"
    if config.logging.tensorboard_dir is not None:
        yield "tensorboard_dir", "tensorboard", "requirements-tensorboard.txt"
    for task in config.generation.eval_tasks or ():
        if "=" not in task:  # own tasks are KIND=PATH
            yield "eval_tasks", "lm_eval", "requirements-eval.txt"
            break
    if package := config.optimizer.optimizer.kind.package:
        yield "optimizer.type", package, f"requirements-{package}.txt"


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported; a directory of its name here (usually of logs) does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def login_problems(config: NeoXConfig, environment: Mapping[str, str]) -> list[Problem]:
    """Return the problem that Weights & Biases would refuse the run because this machine has no login.

    Args:
        config: The configuration.
        environment: Environment variables: `WANDB_API_KEY`, `WANDB_MODE`, and `NETRC` or `HOME` for the file of logins.
    """
    if not config.logging.use_wandb or not _is_installed("wandb"):
        return []
    if environment.get("WANDB_MODE") in _WANDB_WITHOUT_LOGIN or environment.get("WANDB_API_KEY"):
        return []
    host = config.logging.wandb_host
    file = Path(environment.get("NETRC") or Path(environment.get("HOME", "/"), ".netrc"))
    try:
        if netrc(file).authenticators(urlsplit(host).hostname or "") is not None:
            return []
    except (OSError, NetrcParseError):
        pass  # no login there
    advice = "set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline"
    return [config.problem_about(f"`use_wandb` needs a login to {host}: {advice}", "use_wandb")]


def task_problems(config: NeoXConfig, script: str, tokenizer: Tokenizer | None) -> list[Problem]:
    """Return the problems of prompts, or of evaluation tasks (also in training).

    Args:
        config: The configuration.
        script: Name of the script, without `.py`.
        tokenizer: Tokenizer of the run; None if it is not known.
    """
    if config.model.objective == "masked_lm" and script in INFERENCE:
        return [config.problem("objective", "neither writes nor scores text; train.py evaluates it on masked tokens")]
    if script == "generate":
        from neox.generation.request import generation_problems  # numpy, which a dry run without prompts does not need

        return generation_problems(config, tokenizer)
    if script == "evaluate" or config.generation.eval_tasks:
        from neox.evaluation.tasks import eval_problems  # numpy, which a dry run without tasks does not need

        return eval_problems(config, tokenizer)
    return []


def family_of_ranks(
    config: NeoXConfig, placement: Placement, asked: DeviceFamily | None, *, dry_run: bool
) -> DeviceFamily:
    """Return the kind of device that kernels are planned for.

    Args:
        config: The configuration.
        placement: Hosts and slots.
        asked: Kind of device of the hosts; None if they were not asked.
        dry_run: Whether nothing will be started. Then keys about GPUs, if given, mean GPUs.
    """
    if _on_cpus_here(config, placement, dry_run=dry_run):
        return "cpu"
    planned_for_gpus = _planned_for_gpus(config, placement, dry_run=dry_run)
    if _measures_gpus_here(config, placement) or (placement.is_local and not planned_for_gpus):
        return device_family()
    kind = config.runner.gpu_type
    usual: DeviceFamily = "cuda" if kind is None else GPUS[kind].family
    return usual if planned_for_gpus else asked or usual


def device_of_ranks(plan: RunPlan, placement: Placement, *, training: bool, dry_run: bool) -> Device:
    """Return the device of each rank: CPUs or GPUs of this machine, or GPUs as the configuration describes them.

    Args:
        plan: The plan.
        placement: Hosts and slots.
        training: Whether the model is trained, not only run.
        dry_run: Whether nothing will be started. Then keys about GPUs, if given, mean GPUs.
    """
    config = plan.config
    if _on_cpus_here(config, placement, dry_run=dry_run):
        ranks = range(placement.world_size)
        return host_device(plan, ranks, placement.hosts[0].name, available_memory(), training=training)
    size = None
    available = None
    if _measures_gpus_here(config, placement):
        size = smallest_memory()
        available = available_memory()
    ranks_of_host = max(len(host.slots) for host in placement.hosts)
    device = gpu_device(plan, size, plan.device_family, ranks_of_host=ranks_of_host, available=available)
    if not dry_run and device.main_memory is not None and device.main_memory.assumed:
        return replace(device, main_memory=None)  # hosts say what they have when they are asked
    return device


def _planned_for_gpus(config: NeoXConfig, placement: Placement, *, dry_run: bool) -> bool:
    """Return whether a plan is for GPUs, whatever this machine has."""
    return placement.assumed or (dry_run and bool(_given_about_gpus(config)))


def _on_cpus_here(config: NeoXConfig, placement: Placement, *, dry_run: bool) -> bool:
    """Return whether ranks run on the CPUs of this machine."""
    has_none = placement.is_local and not placement.accelerators
    return has_none and not _planned_for_gpus(config, placement, dry_run=dry_run)


def _measures_gpus_here(config: NeoXConfig, placement: Placement) -> bool:
    """Return whether ranks run on GPUs of this machine whose memory is measured."""
    memory_given = config.given("gpu_memory_gib") or config.source("gpu_type").is_command_line
    return placement.is_local and placement.accelerators > 0 and not memory_given and not placement.assumed


def _given_about_gpus(config: NeoXConfig) -> list[str]:
    return [key for key in _KEYS_ABOUT_GPUS if config.given(key) and config.value(key) is not None]


def missing_device(plan: RunPlan, device: Device, placement: Placement, *, training: bool) -> str | None:
    """Return that a dry run is for a GPU that this machine lacks, and what a start here would do; None otherwise.

    Args:
        plan: The plan.
        device: What the plan is for.
        placement: Hosts and slots. Hosts elsewhere, or imagined ones, are not asked.
        training: Whether the model is trained, not only run.
    """
    if device.shared or placement.assumed or not placement.is_local or placement.accelerators:
        return None
    keys = _given_about_gpus(plan.config)
    named = ", ".join(map(plan.config.describe_setting, keys))
    planned = f"planned for {device.name}, because of {named}; this machine has no GPU"
    try:
        check_local_devices(placement)
    except (ConfigError, LaunchError):
        return f"{planned}, and does not start {placement.world_size} ranks"
    does = "train" if training else "run"
    ranks = range(placement.world_size)
    here = host_device(plan, ranks, placement.hosts[0].name, available_memory(), training=training)
    if memory_problem(plan, here, training=training) is not None:
        return f"{planned}, and its {gib(here.size)} of main memory are too little to {does} on the CPU"
    way = " (--set gpu_type=null plans that)" if keys == ["gpu_type"] else ""
    return f"{planned}: here it would {does} on the CPU{way}"


def backend_refusal(backend: str, family: DeviceFamily) -> str | None:
    """Return why devices that a run is planned for cannot communicate over a backend; None if they can.

    Args:
        backend: Value of `distributed_backend`.
        family: Kind of device. CPU ranks take gloo, whatever is asked for.
    """
    refusals = [refused_backend(backend, vendor) for vendor in VENDORS if vendor.family == family]
    return refusals[0] if refusals else None


def memory_problems(plan: RunPlan, device: Device, *, training: bool) -> list[Problem]:
    """Return the problem that a run does not fit on its devices."""
    problem = memory_problem(plan, device, training=training)
    if problem is None:
        return []
    correction = f"if there is more memory, set {problem.key}"
    if problem.key == "gpu_memory_gib":
        correction += " or --gpu-type"
    return [Problem((problem.key,), f"{problem.text} (compared with {problem.source}; {correction})")]


def nvme_paths(config: NeoXConfig) -> tuple[str, ...]:
    """Return the directories in which each host keeps files of offloaded states and weights."""
    zero = config.deepspeed.zero_optimization
    paths: list[str] = []
    for directory in (zero.states_directory, zero.weights_directory):
        if directory:
            path = str(Path(directory).absolute())
            if path not in paths:
                paths.append(path)
    return tuple(paths)


def nvme_problems(
    plan: RunPlan, ranks: Sequence[int], host: str, states: Mapping[str, Mapping[str, Any]]
) -> list[Problem]:
    """Return the problems of ranks that offload to files of their host.

    Args:
        plan: The plan.
        ranks: The ranks on the host.
        host: Name of the host.
        states: Answer of `path_state` on the host for each of `nvme_paths`.
    """
    paths = nvme_paths(plan.config)
    problems = []
    for path in paths:
        if not states[path]["writable"]:
            message = f"{host}: nvme_path {path} is no directory that can be written; choose another"
            problems.append(Problem(_NVME_PATHS, message))
    if problems or not paths:
        return problems
    needed = sum(rank_memory(plan, rank, on_cpu=False).files for rank in ranks)
    free = sum(states[path]["free"] for path in paths)
    if needed <= free:
        return []
    message = (
        f"{host}: {len(ranks)} ranks offload {gib(needed)} to files, but nvme_path {' and '.join(paths)} has "
        f"{gib(free)} free; choose a larger disk, or use more hosts"
    )
    return [Problem(_NVME_PATHS, message)]
