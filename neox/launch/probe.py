"""What one host says about itself: `python -m neox.launch.probe REQUEST` prints one JSON object. No torch here."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from neox.errors import run_script
from neox.launch.accelerators import count_accelerators
from neox.launch.spec import code_root

_CODE = ("deepy.py", "train.py", "neox/**/*.py", "tools/*.py")


def encode_request(*, port: int | None, paths: list[str], marker: str | None) -> str:
    """What to look at: a port to try (on the first host), paths that runs use, a file that the head process wrote."""
    return base64.urlsafe_b64encode(json.dumps({"port": port, "paths": paths, "marker": marker}).encode()).decode()


def code_hash(root: Path) -> str:
    """Hash of the project's Python files: equal on two hosts when they would run the same code."""
    digest = hashlib.sha256()
    files = sorted({path for pattern in _CODE for path in root.glob(pattern)})
    for path in files:
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Look at this host."""
    marker = request["marker"]
    return {
        "python": sys.version.split()[0],
        "torch": _version("torch"),
        "deepspeed": _version("deepspeed"),
        "code": code_hash(code_root()),
        "accelerators": count_accelerators(),
        "port": None if request["port"] is None else _port_problem(request["port"]),
        "paths": {path: _path_state(Path(path)) for path in request["paths"]},
        "shared": None if marker is None else Path(marker).exists(),
        "clock": time.time(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _port_problem(port: int) -> str:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return error.strerror or str(error)
    return "free"


def _path_state(path: Path) -> dict[str, Any]:
    """Whether a path is there, whether it (or what would hold it) is a directory to write in, and free bytes."""
    exists = path.exists()
    holder = path
    while not holder.exists():
        holder = holder.parent
    directory = holder if holder.is_dir() else holder.parent
    writable = holder == directory and os.access(holder, os.W_OK)
    return {"exists": exists, "writable": writable, "free": shutil.disk_usage(directory).free}


def main() -> int:
    """Answer one request."""
    request = json.loads(base64.urlsafe_b64decode(sys.argv[1]))
    print("@probe " + json.dumps(probe(request)), flush=True)
    return 0


if __name__ == "__main__":
    run_script(main)
