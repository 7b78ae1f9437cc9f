"""What a person sees while a run goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from neox.log import Progress, get_logger, progress

_log = get_logger(__name__)


class Display:
    """Progress by bytes of the inputs, or by documents where their number is known."""

    def __init__(self, bar: Progress, *, by_documents: bool, log_interval: int | None) -> None:
        self._bar, self._by_documents, self._interval = bar, by_documents, log_interval
        self._documents: int | None = None
        self._logged = 0
        self._started = time.monotonic()

    def read(self, size: int) -> None:
        """So many bytes were read from an input."""
        if not self._by_documents:
            self._bar.update(size)

    def written(self, documents: int) -> None:
        """So many documents are written by now."""
        before = self._documents or 0
        self._documents = documents
        if self._by_documents:
            self._bar.update(documents - before)
        if self._interval and documents - self._logged >= self._interval:
            self._logged = documents
            _log.info("%d documents, %.1f documents/s", documents, documents / (time.monotonic() - self._started))


@contextmanager
def show_progress(files: Sequence[str], num_documents: int | None, log_interval: int | None) -> Iterator[Display]:
    """Show the progress of a run over `files`."""
    total = num_documents or sum(os.path.getsize(file) for file in files)
    with progress("tokenizing", total, "documents" if num_documents else "B") as bar:
        yield Display(bar, by_documents=bool(num_documents), log_interval=log_interval)
