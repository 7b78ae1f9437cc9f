"""The end of a rank's process: its exit status is the script's, whatever C code does at the end of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

START = """
import atexit, ctypes, sys, threading, time
library = ctypes.CDLL(None)
library.__cxa_atexit(library.abort, None, None)  # as threads of gloo do when the interpreter destroys their group
atexit.register(print, "registered")
"""
THREAD = "threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()\n"
POOL = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor()  # its threads wait for work until the interpreter tells them that it ends
pool.submit(int)
"""


@pytest.mark.parametrize(
    ("end", "status", "out", "err"),
    [
        ("", 0, "registered\n", ""),
        (THREAD, 0, "thread\nregistered\n", ""),
        (POOL, 0, "registered\n", ""),
        (THREAD + "sys.exit()", 0, "thread\nregistered\n", ""),
        ("sys.exit(3)", 3, "registered\n", ""),
        ("sys.exit('the reason')", 1, "registered\n", "the reason\n"),
        ("raise ValueError('the reason')", 1, "registered\n", "ValueError: the reason\n"),
        (THREAD + "raise ValueError('the reason')", 1, "thread\nregistered\n", "ValueError: the reason\n"),
    ],
)
def test_the_status_is_the_scripts(end: str, status: int, out: str, err: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(START + end)
    command = [sys.executable, "-m", "neox.launch.agent.bootstrap", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, out)
    assert done.stderr.endswith(err)
    assert bool(done.stderr) == bool(err)
