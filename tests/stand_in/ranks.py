"""Ranks on the stand-in accelerator: fresh processes in which DeepSpeed finds `torch_npu`, as on a machine with NPUs.

`run_on_npus(2, function, *args)` calls an importable function on each rank and returns the results in rank order.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def variables_of_rank(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the environment of a rank that sees one NPU of its own."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "npu",
        "ASCEND_RT_VISIBLE_DEVICES": str(rank),
        "ASCEND_HOME_PATH": "/nonexistent",  # DeepSpeed asks for it, as CANN's set_env.sh sets it
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests/stand_in"))),
    }


def run_on_npus(world: int, function: Callable[..., Any], *args: Any, timeout: float = 400) -> list[Any]:
    """Call `function(*args)` on `world` ranks and return their results; AssertionError with the output of a failure."""
    from tests.distributed.spawn import free_port

    port = free_port()
    with tempfile.TemporaryDirectory(prefix="npu-ranks-") as directory:
        call = Path(directory, "call")
        call.write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        processes = []
        for rank in range(world):
            command = [sys.executable, __file__, directory, str(rank)]
            variables = variables_of_rank(rank, world, port)
            with Path(directory, f"output{rank}").open("w") as output:
                processes.append(subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT))
        try:
            for process in processes:
                process.wait(timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, process in enumerate(processes):
            assert process.returncode == 0, f"rank {rank}:\n{Path(directory, f'output{rank}').read_text()[-6000:]}"
        return [pickle.loads(Path(directory, f"result{rank}").read_bytes()) for rank in range(world)]  # noqa: S301


def main() -> None:
    """Body of one rank."""
    import torch

    torch.set_num_threads(1)
    directory, rank = Path(sys.argv[1]), sys.argv[2]
    module, name, args = pickle.loads((directory / "call").read_bytes())  # noqa: S301 (bytes of our parent)
    result = getattr(import_module(module), name)(*args)
    (directory / f"result{rank}").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # as in tests.distributed.spawn: destructors of process groups may wait for ranks that are gone


if __name__ == "__main__":
    main()
