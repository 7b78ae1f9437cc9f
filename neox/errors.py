"""The errors a user can meet: each says what, where, why, and what to do."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

# What the file system of a user's path may answer; a traceback would say no more.
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR)


class NeoXError(Exception):
    """Base of every error meant for a user; scripts print it as one message, without a traceback.

    exit_code: the process's exit status when this error ends it.
    """

    exit_code = 1


class ConfigError(NeoXError, ValueError):
    """One or more things wrong with a configuration.

    problems: one complete sentence each, with file and line where known; all of them are shown, not the first alone.
    """

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(NeoXError, ValueError):
    """A corpus, a token file or an index that is missing, broken or does not fit the run."""


class TokenizerError(NeoXError, ValueError):
    """A tokenizer that cannot be built, or does not fit the model or the data."""


class CheckpointError(NeoXError, ValueError):
    """A checkpoint that is missing, broken, or of another model."""


class ConversionError(NeoXError, ValueError):
    """A model that the target format cannot express; lists every reason."""


class LaunchError(NeoXError, RuntimeError):
    """Processes that could not be started, or that ended badly."""


class TrainingError(NeoXError, RuntimeError):
    """Training that must stop: losses or norms that are not finite, too many skipped steps."""


class GenerationError(NeoXError, ValueError):
    """Prompts that cannot be continued, sampling settings that make no sense, or logits that are not numbers."""


class EvaluationError(NeoXError, ValueError):
    """A task that does not exist, or a text or token file that cannot be scored."""


@contextmanager
def os_errors(kind: type[NeoXError], what: str) -> Iterator[None]:
    """Raise an error of `kind`, `WHAT: REASON`, in place of an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


def install_command(file: str) -> str:
    """What installs `requirements/FILE` for the interpreter that misses it (`pip` alone may be another one's)."""
    return f"{sys.executable} -m pip install -r requirements/{file}"


@contextmanager
def needs_package(kind: type[NeoXError], what: str, package: str, file: str) -> Iterator[None]:
    """Raise an error of `kind` in place of an ImportError of the block, with the command that installs the package."""
    try:
        yield
    except ImportError as error:
        raise kind(f"{what} needs the package {package}: {install_command(file)}") from error


def run_script(main: Callable[[], int | None], *, unload: bool = True) -> NoReturn:
    """Run a script's `main` and exit.

    User errors, and files that the system refuses to open or to fill, become one message and their exit code; Ctrl-C
    becomes 130, also where an extension answers it with an exception of its own.

    Args:
        main: Returns the exit status, or None for 0.
        unload: Whether the interpreter unloads its modules after `main` has returned, which takes 0.1 s, and a second
            with torch and DeepSpeed. Without it nothing registered with `atexit` runs.
    """
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGINT, interrupt)
    try:
        code = main() or 0
        if not unload:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    except NeoXError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:  # `tool | head`
        sys.stderr.close()
        code = 141
    except OSError as error:
        if error.errno not in _REFUSALS or error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        code = 1
    except SystemExit:
        raise
    except BaseException:
        if not interrupted:
            raise
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
