"""A rank's answer to SIGUSR1: the Python stacks that its fault handler wrote to its log, or why there are none."""

from __future__ import annotations

from pathlib import Path

from neox.launch.lifeline import process_state

_OUR_FRAMES = ('"<frozen runpy>"', "neox/launch/bootstrap.py")  # at the bottom of every stack


def answer(pid: int | None, log: Path, size: int) -> list[str]:
    """Lines that a rank added to its log since it was `size` bytes long; pid: its process, None when it has ended."""
    if pid is None:
        return ["not running"]
    state = process_state(pid)
    if state == "T":
        return ["the process is stopped (SIGSTOP, a debugger, or job control): it cannot answer"]
    with open(log, "rb") as file:
        file.seek(size)
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    lines = [line for line in lines if not any(frame in line for frame in _OUR_FRAMES)]
    return lines or [f"no answer (process state {state}: not started yet, or waiting in the kernel)"]
