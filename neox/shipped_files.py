"""Location of the project's scripts and configurations: in the checkout, or in an installed wheel (`neox/shipped`)."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_SHIPPED = _PACKAGE / "shipped"


def scripts_root() -> Path:
    """Return the directory that holds `train.py`, `tools/` and `configs/`."""
    if _SHIPPED.is_dir():
        return _SHIPPED
    return _PACKAGE.parent


def shipped_config(path: Path) -> Path | None:
    """Return the configuration of an installed wheel at a relative path, with or without the prefix `configs/`.

    Args:
        path: Path that does not exist.

    Returns:
        The file; None if there is none, or if this is a checkout.
    """
    if path.is_absolute() or not _SHIPPED.is_dir():
        return None
    for candidate in (_SHIPPED / path, _SHIPPED / "configs" / path):
        if candidate.is_file():
            return candidate
    return None


def tool_names() -> list[str]:
    """Return the names of the tools, sorted."""
    tools = scripts_root() / "tools"
    return sorted(file.stem for file in tools.glob("*.py") if not file.name.startswith("_"))
