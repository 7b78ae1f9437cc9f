"""Run one function on several ranks: processes with a gloo group, results in rank order, nothing left behind.

Example: `run_ranks(2, check_all_reduce, 3.0)`. The function must be importable (top level of a module), its arguments
and its result picklable. A test module's own functions will do.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


class RankError(AssertionError):
    """A rank failed: the message is the traceback of the first one that did."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Call `function(*args)` on `world_size` processes of one gloo group and return their results in rank order.

    Each process has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, one torch thread,
    and an initialised default group. timeout: seconds for all of it. Raises RankError with the first traceback, or
    with the ranks that were still running when the time was up; every process is gone on return.
    """
    # A fork server that has DeepSpeed imported starts a rank in a tenth of the time of a fresh interpreter, and, unlike
    # a plain fork, does not inherit the threads of the test process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["neox.engine"])
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        store = str(Path(directory) / "store")
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main, args=(sender, rank, world_size, port, store, function, args), daemon=False
                )
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            return _collect(pipes, time.monotonic() + timeout, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Connection], deadline: float, timeout: float) -> list[Any]:
    """Wait for one answer per rank; raise RankError at the first failure or at the deadline."""
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} of {len(pipes)} still running after {timeout} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                failure, payload = pickle.loads(pipe.recv_bytes())  # noqa: S301 (bytes of our own child)
            except EOFError:
                raise RankError(f"rank {rank} ended without an answer (killed, or os._exit)") from None
            if failure:
                raise RankError(f"rank {rank} of {len(pipes)} failed:\n{failure}")
            results[rank] = payload
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Connection,
    rank: int,
    world_size: int,
    port: int,
    store: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Body of one rank: join the group, call, answer (traceback, result)."""
    failure, result = None, None
    try:
        import torch

        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
            TORCH_EXTENSIONS_DIR=os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")),
            # DeepSpeed's builds call `ninja`, which lies beside the interpreter.
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        )
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        result = function(*args)
        # A rank that leaves early closes connections that others still read from.
        torch.distributed.barrier()
    except BaseException:
        failure, result = traceback.format_exc(), None
    # By value: torch's own pickling would hand over shared memory that dies with this process.
    pipe.send_bytes(pickle.dumps((failure, result)))
    pipe.close()
    # Not a normal exit: destructors of process groups may wait for ranks that are gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if failure else 0)


def _free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
