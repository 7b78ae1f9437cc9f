"""Entry point of every rank: runs a script with a fault handler, and with tracebacks that begin in the script.

`python -m neox.launch.agent.bootstrap SCRIPT ARGUMENTS...`: SIGUSR1 writes the Python stacks of all threads to stderr,
even while the interpreter waits inside C code. A crash in C code writes them, too.

`--warm MODULE` instead of a script: see `neox.launch.agent.warm_ranks`.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import runpy
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from neox import end_at_interrupts, is_own_script
from neox.launch.agent.warm_start import become_rank


def _start_tracebacks_at(script: str) -> None:
    """Remove the frames of this file and of runpy from tracebacks; they say nothing about an error."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        frame = trace
        while frame is not None and frame.tb_frame.f_code.co_filename != script:
            frame = frame.tb_next
        if frame is not None:
            trace = frame
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


def _end(code: int) -> NoReturn:
    """End with an exit status, after the functions that were registered for the end.

    The interpreter would also destroy process groups. That can abort the process, which would hide the error and
    its status: if the other ranks have gone by then, or a thread of gloo still runs.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _status_of(ending: SystemExit) -> int:
    """Return the exit status that Python gives to a SystemExit, after it has printed a message in it."""
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code & 0xFF
    print(ending.code, file=sys.stderr)
    return 1


def main() -> None:
    """Run the script that the first argument names, as `__main__`."""
    with suppress(OSError):
        # When memory runs out, the kernel then kills ranks rather than the agent, which reports it.
        Path("/proc/self/oom_score_adj").write_text("500")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    if sys.argv[1] == "--warm":
        become_rank(sys.argv[2])
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    _start_tracebacks_at(script)
    if is_own_script(script):
        end_at_interrupts()
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        code = _status_of(ending)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # torch.distributed may have replaced it
        code = 1
    # As the interpreter does, wait for other threads: one may still write a checkpoint (`async_save`).
    threading._shutdown()  # type: ignore[attr-defined]
    _end(code)


if __name__ == "__main__":
    main()
