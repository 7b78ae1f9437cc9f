"""neox: train GPTs with DeepSpeed from NeoX-style YAML, and hand them to Hugging Face."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

# The one place of the number. Between releases it is the next one's with `.dev0`, which PEP 440 sorts before it.
__version__ = "0.3.0.dev0"

_ROOT = Path(__file__).resolve().parent.parent


def _explain_wrong_python(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report a package that is not installed; any other exception is shown as usual.

    One of the project's own scripts was nearly always started with another Python than the one in `.venv`.
    """
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name and name.isidentifier() and name not in sys.modules and find_spec(name) is None:
        print(
            f"error: the package {name} is not installed for {sys.executable}; `make install` sets up .venv with all "
            "that is needed: run `.venv/bin/python` instead of `python`, or `source .venv/bin/activate` first",
            file=sys.stderr,
        )
    else:
        sys.__excepthook__(kind, error, trace)


def end_at_interrupts() -> None:
    """Make Ctrl-C end this process at once and silently, with status 130, until `neox.errors.run_script` runs.

    While packages are imported, a KeyboardInterrupt would end in a traceback, or in a panic inside an extension.
    """
    # Under nohup the signal is ignored, and a caller may have a handler of its own. Neither is replaced.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def is_own_script(path: str) -> bool:
    """Return whether a file is one of this project's scripts."""
    shipped = _ROOT / "neox" / "shipped"
    folder = Path(path).resolve().parent
    return any(folder in (root, root / "tools", root / "tools" / "datasets") for root in (_ROOT, shipped))


def _prepare_own_script() -> None:
    """Prepare a process that runs one of this project's scripts; it does so while the script imports this package."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    is_worker_process = "__mp_main__" in sys.modules
    if not script or not is_own_script(script) or is_worker_process or sys.excepthook is not sys.__excepthook__:
        return
    if sys.version_info < (3, 11):  # noqa: UP036 -- whoever has an older one should read it here
        sys.exit(f"error: neox needs Python 3.11 or newer, and this is {sys.version.split()[0]} ({sys.executable})")
    sys.excepthook = _explain_wrong_python
    end_at_interrupts()


_prepare_own_script()
