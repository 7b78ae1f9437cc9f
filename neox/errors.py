"""The errors a user can meet: each says what, where, why, and what to do."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from neox.problems import Problem

# Refusals of the file system that concern a path of the user; a traceback would add nothing to them.
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR)


class NeoXError(Exception):
    """Base of every error meant for a user; scripts print it as one message, without a traceback.

    Attributes:
        exit_code: Exit status of a process that this error ends.
    """

    exit_code = 1


class ConfigError(NeoXError, ValueError):
    """One or more things wrong with a configuration or a command line; all of them are shown.

    Args:
        problems: A problem, or its message if no key and no place are known; or several of them.

    Attributes:
        problems: The problems.
    """

    exit_code = 2

    def __init__(self, problems: str | Problem | Iterable[str | Problem]) -> None:
        if isinstance(problems, str | Problem):
            problems = [problems]
        self.problems = tuple(each if isinstance(each, Problem) else Problem((), each) for each in problems)
        super().__init__("\n".join(map(str, self.problems)))


class DataError(NeoXError, ValueError):
    """A corpus, a token file or an index that is missing, broken or does not fit the run."""


class TokenizerError(NeoXError, ValueError):
    """A tokenizer that cannot be built, or does not fit the model or the data."""


class CheckpointError(NeoXError, ValueError):
    """A checkpoint that is missing, broken, or of another model."""


class NoCheckpointError(CheckpointError):
    """A directory of checkpoints of which none is complete."""


class StaleStartError(CheckpointError):
    """A start that the launcher has decided, and that the disk does not allow: nothing has been changed yet.

    Args:
        message: The message.
        damaged: Path of the checkpoint that is damaged; None if another one counts by now.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed

    def __init__(self, message: str, damaged: str | None = None) -> None:
        super().__init__(message)
        self.damaged = damaged

    def __reduce__(self) -> tuple[type[StaleStartError], tuple[str, str | None]]:
        return StaleStartError, (str(self), self.damaged)


class ConversionError(NeoXError, ValueError):
    """A model that the target format cannot express; lists every reason."""


class LaunchError(NeoXError, RuntimeError):
    """Processes that could not be started, or that ended badly."""


class UnreachableHostError(LaunchError):
    """Hosts that do not answer, or are not ready yet, without which a run cannot start.

    Args:
        message: The message.
        hosts: Names of the hosts.
        cause: What is wrong with them, in a few words; empty if they do not answer.
    """

    def __init__(self, message: str, hosts: tuple[str, ...], cause: str = "") -> None:
        super().__init__(message)
        self.hosts = hosts
        self.cause = cause or f"no answer from {', '.join(hosts)}"


class TrainingError(NeoXError, RuntimeError):
    """Training that must stop: losses or norms that are not finite, too many skipped steps."""


class NotFiniteError(TrainingError):
    """A loss or a gradient norm that is not finite.

    Args:
        message: The message.
        step: The step, counted from 1.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class ReplicaError(TrainingError):
    """Weights that differ between data ranks.

    Args:
        message: The message.
        step: The step, counted from 1.
        ranks: Ranks whose weights differ from those of the majority; empty if there is no majority.
    """

    def __init__(self, message: str, step: int, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.step = step
        self.ranks = ranks


class GenerationError(NeoXError, ValueError):
    """Prompts that cannot be continued, sampling settings that make no sense, or logits that are not numbers."""


class EvaluationError(NeoXError, ValueError):
    """A task that does not exist, or a text or token file that cannot be scored."""


@contextmanager
def refusals() -> Iterator[None]:
    """Give errors of the block the exit status of a configuration error, because nothing has started yet."""
    try:
        yield
    except NeoXError as error:
        error.exit_code = ConfigError.exit_code
        raise


@contextmanager
def os_errors(kind: type[NeoXError], what: str) -> Iterator[None]:
    """Turn an OSError of the block into an error of `kind` that reads `WHAT: REASON`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


def install_command(file: str) -> str:
    """Return the command that installs `requirements/FILE` for this interpreter (`pip` may belong to another one)."""
    return f"{sys.executable} -m pip install -r requirements/{file}"


@contextmanager
def needs_package(kind: type[NeoXError], what: str, package: str, file: str) -> Iterator[None]:
    """Turn an ImportError of the block into an error of `kind` that gives the command to install the package."""
    try:
        yield
    except ImportError as error:
        raise kind(f"{what} needs the package {package}: {install_command(file)}") from error


def run_script(main: Callable[[], int | None], *, unload: bool = True) -> NoReturn:
    """Run a script's `main` and exit.

    A NeoXError is printed as one message, and its exit code ends the process. So is a file that the system refuses to
    open or to fill, with status 1. Ctrl-C ends the process with status 130, even if an extension answers it with an
    exception of its own.

    Args:
        main: The script's main function, which returns the exit status, or None for 0.
        unload: Whether the interpreter unloads its modules at the end. That takes 0.1 s, and a second with torch and
            DeepSpeed. Without it, functions registered with `atexit` do not run.
    """
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # under nohup it is ignored
        signal.signal(signal.SIGINT, interrupt)
    try:
        code = main() or 0
        if not unload:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    except (NeoXError, OSError) as error:
        code = _report(error)
    except SystemExit:
        raise
    except BaseException:
        if not interrupted:
            raise
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _report(error: NeoXError | OSError) -> int:
    """Print an error that ends a script, and return the exit status; raise the error if it deserves a traceback."""
    if isinstance(error, NeoXError):
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, BrokenPipeError):  # the reader has ended, as in `tool | head`
        sys.stderr.close()
        return 128 + signal.SIGPIPE
    if error.errno not in _REFUSALS or error.filename is None:
        raise error
    print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    return 1
