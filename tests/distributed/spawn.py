"""Run one function on several ranks: processes with a gloo group, results in rank order, nothing left behind.

Example: `run_ranks(2, check_all_reduce, 3.0)`. The function must be importable (top level of a module), its arguments
and its result picklable. A test module's own functions will do. `start_script` starts a script with arguments instead.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# What ranks import: a fork server that has it starts a rank in a tenth of the time of a fresh interpreter and, unlike a
# plain fork, does not inherit the threads of the test process.
_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(
    [
        *("neox.train", "torch._dynamo", "triton", "matplotlib.figure", "matplotlib.backends.backend_agg", "pytest"),
        # what DeepSpeed imports inside functions when it builds an engine, and torch at the first profile
        *("deepspeed.comm.mori", "deepspeed.module_inject.auto_ep_layer", "torch.profiler._cupti_monitor"),
        "deepspeed.runtime.zero.muon.muon_optimizer",
    ]
)


class RankError(AssertionError):
    """A rank failed: the message is the traceback of the first one that did."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 400) -> list[Any]:
    """Call `function(*args)` on `world_size` processes of one gloo group and return their results in rank order.

    Each process has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, one torch thread,
    and an initialised default group. timeout: seconds for all of it. Raises RankError with the first traceback, or
    with the stacks of the ranks that were still running when the time was up; every process is gone on return.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        store = str(Path(directory) / "store")
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                receiver, sender = _FORK_SERVER.Pipe(duplex=False)
                process = _FORK_SERVER.Process(
                    target=_rank_main, args=(sender, rank, world_size, port, store, function, args), daemon=False
                )
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            try:
                return _collect(pipes, time.monotonic() + timeout, timeout)
            except TimeoutError as error:
                raise RankError(f"{error}:\n{_stacks(processes, Path(directory))}") from None
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def run_and_kill(
    function: Callable[..., Any],
    *args: Any,
    begun: Callable[[], bool],
    seconds: float,
    signum: int,
    timeout: float = 400,
) -> None:
    """Call `function(*args)` on one rank, and send its process a signal some seconds after `begun()` is true.

    It may have ended by then. It is gone on return, killed if it does not answer the signal.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        receiver, sender = _FORK_SERVER.Pipe(duplex=False)
        store = str(Path(directory) / "store")
        process = _FORK_SERVER.Process(
            target=_rank_main, args=(sender, 0, 1, free_port(), store, function, args), daemon=False
        )
        process.start()
        sender.close()
        end = time.monotonic() + timeout
        while process.is_alive() and not begun():
            assert time.monotonic() < end, f"nothing has begun after {timeout} s"
            time.sleep(0.01)
        process.join(seconds)
        if process.is_alive():
            os.kill(process.pid or 0, signum)
        process.join(10)
        process.kill()
        process.join()
        receiver.close()


def start_script(
    script: Path, *arguments: str, directory: Path, output: Path, errors: Path | None = None, **variables: str
) -> BaseProcess:
    """Start a script as `python SCRIPT ...` in a directory does, but with what it imports already loaded.

    output: the file that standard output is added to, and errors where they have no file of their own. variables: of
    its environment. Its `exitcode` is -N where a signal N ended it.
    """
    streams = (output, errors or output)
    process = _FORK_SERVER.Process(target=_script_main, args=(script, arguments, directory, streams, variables))
    process.start()
    return process


def run_script(
    script: Path, *arguments: str, directory: Path, timeout: float = 400, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as `start_script` starts it, to its end."""
    with tempfile.TemporaryDirectory(prefix="script-") as said:
        output, errors = Path(said, "output"), Path(said, "errors")
        process = start_script(script, *arguments, directory=directory, output=output, errors=errors, **variables)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"{script.name} still runs after {timeout} s:\n{errors.read_text()}")
        return subprocess.CompletedProcess(arguments, process.exitcode, output.read_text(), errors.read_text())


def _script_main(
    script: Path, arguments: tuple[str, ...], directory: Path, streams: tuple[Path, Path], variables: dict[str, str]
) -> None:
    """Body of a process of `start_script`."""
    gc.freeze()
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(directory)
    os.environ.update(variables)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _collect(pipes: list[Connection], deadline: float, timeout: float) -> list[Any]:
    """Wait for one answer per rank; raise RankError at the first failure, TimeoutError at the deadline."""
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} of {len(pipes)} still running after {timeout} s")
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


def _stacks(processes: list[BaseProcess], directory: Path) -> str:
    """Ask ranks that still run where they are, and return their answers."""
    running = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in running:
        os.kill(processes[rank].pid or 0, signal.SIGUSR1)
    time.sleep(1)  # they write at once, unless the machine is busy
    return "\n".join(f"rank {rank}\n{(directory / f'stacks-{rank}').read_text()}" for rank in running)


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
    stacks = Path(store).with_name(f"stacks-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    # DeepSpeed collects garbage with every engine of ZeRO 3: none of it is in what the fork server has imported.
    gc.freeze()
    try:
        import torch

        from tests.distributed.dense_messages import refuse_strided_tensors

        refuse_strided_tensors()
        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RANKS_DIRECTORY=str(Path(store).parent),
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


def join_anew(name: str) -> None:
    """Leave all process groups, and join the same ranks in a new one; every rank of `run_ranks` calls it together.

    An engine leaves its groups behind, with threads that stay: after some dozens of engines they take the machine.

    name: another one each time.
    """
    import deepspeed
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None  # it keeps the group that is gone
    rank, world = (int(os.environ[variable]) for variable in ("RANK", "WORLD_SIZE"))
    store = Path(os.environ["RANKS_DIRECTORY"], f"store-{name}")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
