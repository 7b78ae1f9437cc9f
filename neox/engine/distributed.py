"""Start and end of a rank (environment variables, device, process groups), and actions on which all ranks agree.

Nothing else above `launch` reads the environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist

from neox.engine.compile_cache import keep_compiled_layers
from neox.engine.deepspeed_patches.log import show_deepspeed_log
from neox.engine.deepspeed_patches.startup import accept_architectures, check_deepspeed, prepare_cpu
from neox.engine.determinism import use_deterministic_algorithms
from neox.engine.device import choose_backend, choose_device
from neox.errors import CheckpointError, LaunchError, NeoXError
from neox.log import get_logger
from neox.parallel import ParallelGrid
from neox.plan import RunPlan

_log = get_logger(__name__)
T = TypeVar("T")


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
    use_deterministic_algorithms(plan, os.environ)
    keep_compiled_layers(plan, os.environ)
    accept_architectures(os.environ)
    world = _complete_environment()
    invented = {"MASTER_ADDR", "MASTER_PORT"} - given
    if world != plan.grid.world_size:
        raise LaunchError(
            f"{world} ranks were started, the plan was made for {plan.grid.world_size} "
            f"(pp {plan.grid.pp_size} x dp {plan.grid.dp_size} x mp {plan.grid.tp_size}); start them through deepy.py"
        )
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    if device.type == "cpu":
        prepare_cpu()
    if not dist.is_initialized():
        asked = plan.config.runner.distributed_backend
        backend = choose_backend(asked, device)
        if backend != asked != "auto":
            _log.info("distributed_backend: %s needs accelerators, and these are CPU ranks; %s is used", asked, backend)
        # DeepSpeed would bind the device to the group. NCCL then runs all messages of a group on one stream, in the
        # order in which a rank asks for them, and a stage that expects its next message before it sends waits for ever.
        # Without a bound device each pair of ranks has a communicator of its own.
        dist.init_process_group(backend, timeout=_patience(plan))
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    for name in invented:  # a child process must not take this process's port for its own
        os.environ.pop(name, None)
    grid = ParallelGrid.build(plan.grid)
    return grid, device


def limit_collectives(plan: RunPlan) -> None:
    """Let every process group give up after the same time: torch gives those made later 10 minutes (NCCL) or 30.

    Of other libraries than NCCL and gloo torch cannot set the time.
    """
    for group in tuple(dist.distributed_c10d._world.pg_map):
        if dist.get_backend(group) not in ("nccl", "gloo"):
            continue
        dist.distributed_c10d._set_pg_timeout(_patience(plan), group)


def _patience(plan: RunPlan) -> timedelta:
    """Return how long collectives wait. The launcher notices a hang first, and shows every rank's stack."""
    return timedelta(seconds=plan.config.training.hang_timeout + 60)


def shutdown() -> None:
    """Leave the process group at the end of a run without errors; all ranks call it together."""
    dist.barrier()
    dist.destroy_process_group()


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


def all_succeeded(action: Callable[[], T], what: str, group: dist.ProcessGroup | None = None) -> T:
    """Run an action on every rank and return its result on this one; fail on every rank if it failed on any.

    Args:
        action: Function that leaves no collective operations unfinished when it fails.
        what: Description of the action for the message ("saving iteration 10").
        group: Process group of all ranks for a background save; None: the default group.

    Raises:
        CheckpointError: If any rank failed, with the message of the first one. The cause is this rank's own error.
    """
    result: T | None = None
    own: Exception | None = None
    problem: str | None = None
    try:
        result = action()
    except (NeoXError, OSError, RuntimeError) as error:
        own = error
        problem = str(error) or type(error).__name__
    answers: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, problem, group=group)
    failed = [(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
    if failed:
        rank, answer = failed[0]
        others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise CheckpointError(f"{what} failed on rank {rank}{others}: {answer}") from own
    return result  # type: ignore[return-value]


def from_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run an action only on rank 0 and return its result on every rank.

    Args:
        action: Function whose result, or NeoXError, can be pickled.
        group: Process group of all ranks for a background save; None: the default group.

    Raises:
        NeoXError: On every rank, if the action raised it on rank 0.
    """
    answer: list[tuple[T | None, NeoXError | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            answer[0] = (action(), None)
        except NeoXError as error:
            answer[0] = (None, error)
    dist.broadcast_object_list(answer, src=0, group=group)
    result, failure = answer[0]
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def grid_mpu(grid: ParallelGrid) -> SimpleNamespace:
    """Return a grid without pipeline stages in the form of the "model parallel unit" that DeepSpeed expects.

    A pipeline has DeepSpeed's own, of the same rank order.
    """
    assert grid.pp_size == 1, grid
    tensor = (grid.tp_rank, grid.tp_size, grid.tp_group)
    pipe = (0, 1, grid.pp_group)
    data = (grid.dp_rank, grid.dp_size, grid.dp_group)
    axes = {
        "model_parallel": tensor,
        "tensor_model_parallel": tensor,
        "slice_parallel": tensor,
        "pipeline_model_parallel": pipe,
        "pipe_parallel": pipe,
        "data_parallel": data,
    }
    mpu = {"get_global_rank": partial(_constant, grid.rank)}
    for axis, (rank, world_size, group) in axes.items():
        mpu[f"get_{axis}_rank"] = partial(_constant, rank)
        mpu[f"get_{axis}_world_size"] = partial(_constant, world_size)
        mpu[f"get_{axis}_group"] = partial(_constant, group)
    return SimpleNamespace(**mpu)


def _constant(value: Any) -> Any:
    return value
