"""neox: train GPTs with DeepSpeed from NeoX-style YAML, and hand them to Hugging Face."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

__version__ = "0.1.0"

_ROOT = Path(__file__).resolve().parent.parent


def _explain_wrong_python(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an import that failed in one of the project's own scripts: nearly always another Python than `.venv`'s."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name and name.isidentifier() and name not in sys.modules and find_spec(name) is None:
        print(
            f"error: the package {name} is not installed for {sys.executable}; `make install` sets up .venv with all "
            "that is needed: run `.venv/bin/python` instead of `python`, or `source .venv/bin/activate` first",
            file=sys.stderr,
        )
    else:
        sys.__excepthook__(kind, error, trace)


_script = getattr(sys.modules["__main__"], "__file__", None)
if _script and _ROOT in Path(_script).resolve().parents and sys.excepthook is sys.__excepthook__:
    if sys.version_info < (3, 11):  # noqa: UP036 -- whoever has an older one should read it here
        sys.exit(f"error: neox needs Python 3.11 or newer, and this is {sys.version.split()[0]} ({sys.executable})")
    sys.excepthook = _explain_wrong_python
