"""Pages of docs/ as readers follow them: their files are written, and their commands run one after another."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.end_to_end.browser import free_port

ROOT = Path(__file__).resolve().parents[2]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
PORT = "8000"
"""Port of servers in pages; another one is taken in its place."""


def type_page(name: str, directory: Path, typed: str = "") -> str:
    """Type the blocks of a page in a directory: files of YAML and Jinja, Python, commands; return what was printed.

    A server runs until the end of the page. typed: the input of every command.
    """
    said = []
    page = (ROOT / "docs" / name).read_text()
    port = str(free_port())
    with ExitStack() as servers:
        for language, text in re.findall(r"```(bash|python|yaml|jinja)\n(.*?)```", page, re.DOTALL):
            if language in ("yaml", "jinja"):
                (directory / text.split()[1]).write_text(text)
            elif language == "python":
                said.append(_run(directory, typed, "-c", text.replace(f"localhost:{PORT}", f"localhost:{port}")))
            else:
                for line in text.splitlines():
                    python, script, *arguments = shlex.split(line)
                    assert python == "python"
                    if script == "tools/serve.py":
                        arguments[arguments.index(PORT)] = port
                        servers.enter_context(_served(directory, str(ROOT / script), *arguments))
                    else:
                        said.append(_run(directory, typed, str(ROOT / script), *arguments))
    return "\n".join(said)


def _run(directory: Path, typed: str, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=ENVIRONMENT,
        input=typed,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout + done.stderr


@contextmanager
def _served(directory: Path, *command: str) -> Iterator[None]:
    """Run a server from when it listens."""
    log = directory / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen([sys.executable, *command], cwd=directory, env=ENVIRONMENT, stderr=file)
    try:
        end = time.monotonic() + 120
        while " serves " not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait(60)
