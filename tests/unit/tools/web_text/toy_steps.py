"""Steps for the tests of the frame; worker processes import this file."""

from __future__ import annotations

import os
from pathlib import Path

from tools.web_text.documents import document_step
from tools.web_text.step import DocumentFunction, Outcome, Record, Settings


class UpperSettings(Settings):
    """Write texts in capitals; drop those with a word."""

    word: str = "drop"
    """Word of documents to drop."""

    kill_at: str = ""
    """File with a letter for each time that a document with "kill" kills this process."""


def build_upper(settings: UpperSettings) -> DocumentFunction:
    """Return the function of a document."""

    def upper(record: Record) -> list[Outcome]:
        text = record["text"]
        if "kill" in text and settings.kill_at:
            left = Path(settings.kill_at).read_text()
            Path(settings.kill_at).write_text(left[1:])
            if left:
                os.kill(os.getpid(), 9)
        if settings.word in text:
            return [Outcome(record, dropped="word")]
        return [Outcome({**record, "text": text.upper()}, changed=("upper",) if text != text.upper() else ())]

    return upper


UPPER = document_step("upper", UpperSettings, build_upper)
