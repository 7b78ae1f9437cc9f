"""Commands that the launcher runs on a host: answer the doctor's questions, signal an agent, store secrets.

`python -m neox.launch.hosts.remote probe REQUEST | signal RUN_ID NODE_RANK SIGNAL | secrets RUN_ID NODE_RANK`
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neox.errors import run_script
from neox.launch.agent.agent_files import agent_directory, agent_pid, secrets_file
from neox.launch.agent.preemption import ProbedNotice
from neox.launch.hosts.machine import (
    available_memory,
    count_accelerators,
    multiplies_exactly,
    native_formats,
    port_problem,
    product_seconds,
)
from neox.launch.hosts.vendors import accelerator_facts, can_build_kernels, torch_problem
from neox.launch.spec import code_root

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
PROBE_MARK = "@probe "
_CODE = ("deepy.py", "train.py", "neox/**/*.py", "tools/**/*.py")


def encode_request(
    *,
    port: int | None,
    paths: list[str],
    marker: str | None,
    preemption: ProbedNotice,
) -> str:
    """Encode a request for `probe`.

    Args:
        port: TCP port to try to listen on; None to try none.
        paths: Files and directories that the run reads or writes.
        marker: File that the launcher has written; the host sees it if the file system is shared. None without one.
        preemption: How to look for a preemption notice.
    """
    request = json.dumps({"port": port, "paths": paths, "marker": marker, "preemption": asdict(preemption)})
    return base64.urlsafe_b64encode(request.encode()).decode()


def code_hash(root: Path) -> str:
    """Hash the project's Python files, so that two hosts can be compared."""
    files: set[Path] = set()
    for pattern in _CODE:
        files.update(root.glob(pattern))
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Collect what the launcher needs to know about this host: versions, code, devices, memory, port, paths and clock.

    Args:
        request: Request that `encode_request` has encoded.
    """
    marker = request["marker"]
    port = request["port"]
    return {
        "python": sys.version.split()[0],
        "torch": _version("torch"),
        "deepspeed": _version("deepspeed"),
        "code": code_hash(code_root()),
        "accelerators": count_accelerators(),
        **accelerator_facts(),
        "torch_problem": torch_problem(os.environ),
        "builds_kernels": can_build_kernels(os.environ),
        "formats": native_formats(),
        "memory": available_memory(),
        "product": multiplies_exactly(),
        "product_seconds": product_seconds(),
        "port": None if port is None else port_problem(port) or "free",
        "paths": {path: path_state(Path(path)) for path in request["paths"]},
        "shared": None if marker is None else Path(marker).exists(),
        "preemption": ProbedNotice(**request["preemption"]).look(),
        "clock": time.time(),
    }


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # takes time, and a dry run probes no host

    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def path_state(path: Path) -> dict[str, Any]:
    """Return the state of a path as `exists`, `writable` and `free` (bytes).

    If it does not exist, the last two are those of its nearest existing parent.
    """
    nearest = path
    while not nearest.exists():
        nearest = nearest.parent
    if nearest.is_dir():
        writable = os.access(nearest, os.W_OK)
        free = shutil.disk_usage(nearest).free
    else:
        writable = False
        free = shutil.disk_usage(nearest.parent).free
    return {"exists": path.exists(), "writable": writable, "free": free}


def signal_agent(run_id: str, node_rank: int, signum: int) -> bool:
    """Signal the agent that runs a start on this host; return whether there is one."""
    pid = agent_pid(agent_directory(run_id, node_rank))
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signum)
        return True
    return False


def store_secrets(run_id: str, node_rank: int, text: str) -> None:
    """Write secrets to a file that only this user can read; the agent reads and removes it."""
    descriptor = os.open(secrets_file(run_id, node_rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)


def main() -> int:
    """Run one command."""
    command, *words = sys.argv[1:]
    if command == "probe":
        for variable in _THREADS:
            os.environ[variable] = "1"  # products of one core can be compared
        request = json.loads(base64.urlsafe_b64decode(words[0]))
        print(PROBE_MARK + json.dumps(probe(request)), flush=True)
    elif command == "signal":
        found = signal_agent(words[0], int(words[1]), int(words[2]))
        print("signalled" if found else "not running here", flush=True)
    elif command == "secrets":
        store_secrets(words[0], int(words[1]), sys.stdin.read())
    else:
        raise SystemExit(f"neox.launch.hosts.remote: unknown command {command}")
    return 0


if __name__ == "__main__":
    run_script(main)
