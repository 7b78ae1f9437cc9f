"""Start and end of a rank: environment variables, device, process groups.

Nothing else above `launch` reads the environment.
"""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from neox.engine.deepspeed_log import show_deepspeed_log
from neox.errors import LaunchError, install_command
from neox.log import get_logger
from neox.parallel import ParallelGrid
from neox.plan import RunPlan

_log = get_logger(__name__)
_OLDEST_DEEPSPEED = (0, 19, 3)
"""Older pipeline stages accumulate wrong gradients: summed (0.16.9 to 0.18.2), or with a further factor 1/steps at each
stage boundary (0.18.3 to 0.19.2)."""


def initialize_distributed(plan: RunPlan) -> tuple[ParallelGrid, torch.device]:
    """Join the other ranks; all ranks call it together.

    Reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as launchers set them; without them, this is a run
    of one rank.

    Returns:
        This rank's grid and its device.

    Raises:
        LaunchError: If the number of ranks is not the plan's, or DeepSpeed's version trains wrongly.
    """
    check_deepspeed(deepspeed.__version__)
    keys = plan.config.deepspeed
    show_deepspeed_log(bool(keys.wall_clock_breakdown or keys.dump_state or keys.flops_profiler or keys.comms_logger))
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval: every rank would start a process for each core
    given = set(os.environ)
    world = _complete_environment()
    invented = {"MASTER_ADDR", "MASTER_PORT"} - given
    if world != plan.grid.world_size:
        raise LaunchError(
            f"{world} ranks were started, the plan was made for {plan.grid.world_size} "
            f"(pp {plan.grid.pp_size} x dp {plan.grid.dp_size} x mp {plan.grid.tp_size}); start them through deepy.py"
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    device = choose_device(local_rank)
    if device.type == "cpu":
        _prepare_cpu()
    if not dist.is_initialized():
        backend = choose_backend(plan.config.runner.distributed_backend, device)
        deepspeed.init_distributed(
            dist_backend=backend, timeout=_patience(plan), auto_mpi_discovery=False, verbose=False
        )
    else:
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    for name in invented:  # a child process must not take this process's port for its own
        os.environ.pop(name, None)
    grid = ParallelGrid.build(plan.grid)
    return grid, device


def limit_collectives(plan: RunPlan) -> None:
    """Let every process group give up after the same time: torch gives those made later 10 minutes (NCCL) or 30."""
    for group in tuple(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(_patience(plan), group)


def _patience(plan: RunPlan) -> timedelta:
    """Return how long collectives wait. The launcher notices a hang first, and shows every rank's stack."""
    return timedelta(seconds=plan.config.training.hang_timeout + 60)


def check_deepspeed(version: str) -> None:
    """Raise LaunchError for versions of DeepSpeed that are known to train wrongly."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) < _OLDEST_DEEPSPEED:
        oldest = ".".join(map(str, _OLDEST_DEEPSPEED))
        raise LaunchError(
            f"deepspeed {version} is installed, whose pipeline accumulates wrong gradients; install {oldest} or newer: "
            f"{install_command('requirements.txt')}"
        )


def shutdown() -> None:
    """Leave the process group at the end of a run without errors; all ranks call it together."""
    dist.barrier()
    dist.destroy_process_group()


def _prepare_cpu() -> None:
    """Correct DeepSpeed's assumptions about CPUs."""
    # `deepspeed_shm_comm` serves inference only, and takes minutes and a C++ compiler at the first start if it is in
    # this table. DeepSpeed reads the table for nothing else, and fills it, when it is first read, by running compilers.
    deepspeed.ops.__compatible_ops__ = {}
    # DeepSpeed requires fp16 instructions; torch computes fp16 without them, slowly, which is enough to try a run.
    get_accelerator().is_fp16_supported = lambda: True


def choose_device(local_rank: int) -> torch.device:
    """Return this rank's device and make it the current one. Raises LaunchError if this host has too few GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"rank with LOCAL_RANK {local_rank} finds {torch.cuda.device_count()} GPUs on {socket.gethostname()}; "
            "start fewer ranks per host (num_gpus), or look at CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def choose_backend(asked: str, device: torch.device) -> str:
    """Return the torch.distributed backend: the one asked for, but gloo on a CPU, with a log line."""
    if device.type == "cpu" and asked == "nccl":
        _log.info("distributed_backend: nccl needs GPUs, which this machine does not have; gloo is used")
        return "gloo"
    return asked


def _complete_environment() -> int:
    """Return the number of ranks; set the variables that DeepSpeed requires in a process without a launcher."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
            os.environ.setdefault(name, value)
        if "MASTER_PORT" not in os.environ:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    missing = [n for n in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise LaunchError(f"WORLD_SIZE is {world}, but {', '.join(missing)} are not set; start ranks through deepy.py")
    return world
