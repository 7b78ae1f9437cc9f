"""Pages of docs/ as readers follow them: their files are written, and their commands run one after another."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def type_page(name: str, directory: Path) -> str:
    """Type the blocks of a page in a directory: files of YAML and Jinja, Python, commands; return what was printed."""
    said = []
    page = (ROOT / "docs" / name).read_text()
    for language, text in re.findall(r"```(bash|python|yaml|jinja)\n(.*?)```", page, re.DOTALL):
        if language in ("yaml", "jinja"):
            (directory / text.split()[1]).write_text(text)
        elif language == "python":
            said.append(_run(directory, "-c", text))
        else:
            for line in text.splitlines():
                python, script, *arguments = shlex.split(line)
                assert python == "python"
                said.append(_run(directory, str(ROOT / script), *arguments))
    return "\n".join(said)


def _run(directory: Path, *command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout + done.stderr
