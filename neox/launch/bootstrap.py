"""Entry point of every rank: runs a script with a fault handler and with tracebacks of the script alone.

`python -m neox.launch.bootstrap SCRIPT ARGUMENTS...`: SIGUSR1 writes the Python stacks of all threads to stderr, also
while the interpreter waits inside C code; a crash in C code does too.
"""

from __future__ import annotations

import faulthandler
import runpy
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from neox import end_at_interrupts, is_own_script


def _show_from(script: str) -> None:
    """Remove this file's and runpy's frames, which say nothing about an error, from tracebacks."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        frame = trace
        while frame is not None and frame.tb_frame.f_code.co_filename != script:
            frame = frame.tb_next
        shown(kind, error.with_traceback(frame or trace), frame or trace)

    sys.excepthook = hook


def main() -> None:
    """Run the script that the first argument names as `__main__`."""
    script = sys.argv[1]
    with suppress(OSError):  # where memory runs out, the kernel kills ranks before the agent that reports it
        Path("/proc/self/oom_score_adj").write_text("500")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    _show_from(script)
    if is_own_script(script):
        end_at_interrupts()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
