"""An output directory that appears only when it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neox.errors import ConversionError
from neox.files import atomic_directory


@contextmanager
def written_beside(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory beside `output`; rename it to `output` at the end, remove it on an error.

    Raises ConversionError if `output` holds something (unless `overwrite`) or cannot be written.
    """
    if output.exists() and not overwrite and (not output.is_dir() or any(output.iterdir())):
        raise ConversionError(f"{output} exists and is not empty; choose another directory, or pass --overwrite")
    try:
        with atomic_directory(output) as partial:
            yield partial
    except OSError as error:
        raise ConversionError(f"{output}: cannot be written: {error.strerror or error} ({error.filename})") from error
