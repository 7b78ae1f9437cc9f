"""Step `extract`: web pages to text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from neox.corpus import expand_inputs
from neox.errors import ConfigError
from neox.storage import is_remote, name_of
from tools.web_text.chunks import Chunk, Place, Reader, read_chunks
from tools.web_text.documents import ChunkWork, map_documents
from tools.web_text.filter_urls import expand_suffixes
from tools.web_text.pages import HTML_SUFFIXES, WARC_SUFFIXES, decode_page, html_reader, warc_reader
from tools.web_text.step import DocumentFunction, Job, Outcome, Record, Settings, Step, without

_KEY = "html"
_NO_TEXT = ("script", "style", "noscript", "template")
_PAGE_KEYS = (_KEY, "charset", "too_large", "unreadable", "truncated")


class ExtractSettings(Settings):
    """Extract the text of web pages.

    The inputs are `.jsonl[.zst]` with `html` and `url`, WARC files (`.warc[.gz]`, as of Common Crawl; WET too), or HTML
    files (`.html`, `.htm`, `.xhtml`), also in the directories inside a directory.
    """

    method: Literal["trafilatura", "bs4", "raw"] = "trafilatura"
    """`trafilatura` finds the main text; `bs4` joins all paragraphs; `raw` is the page as it is."""

    favor: Literal["balance", "precision", "recall"] = "balance"
    """What trafilatura prefers if it is not sure."""

    tables: bool = True
    """Whether trafilatura keeps the text of tables."""

    max_page_mb: int = Field(8, ge=1, le=1024)
    """Largest page; a larger one is dropped."""

    ONLY_WITH: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "favor": ("method", "trafilatura"),
        "tables": ("method", "trafilatura"),
    }


def build_extract(settings: ExtractSettings) -> DocumentFunction:
    """Return the function that extracts the text of a page."""
    method: Callable[[str, str | None], str | None] = _whole
    if settings.method == "trafilatura":
        method = _trafilatura(settings)
    elif settings.method == "bs4":
        method = _paragraphs

    def extract(record: Record) -> list[Outcome]:
        html = record[_KEY]
        kept = without(record, *_PAGE_KEYS)
        if record.get("too_large") or len(html) > settings.max_page_mb << 20:
            return [Outcome(kept, "page too large")]
        if "unreadable" in record:
            return [Outcome(kept, record["unreadable"])]
        if isinstance(html, bytes):
            html = decode_page(html, record.get("charset"))
        text: str | None = html
        if record.get("content_type") != "text/plain":
            try:
                text = method(html, record.get("url"))
            except (ValueError, TypeError, AttributeError, RecursionError, AssertionError) as error:  # odd pages
                return [Outcome(kept, f"extractor failed: {type(error).__name__}")]
        text = (text or "").replace("\0", "").strip()
        dropped = None if text else "no text"
        changed: tuple[str, ...] = ()
        if record.get("truncated") and text:
            changed = ("truncated by its crawler",)
        return [Outcome({"text": text, **kept}, dropped, changed)]

    return extract


def _trafilatura(settings: ExtractSettings) -> Callable[[str, str | None], str | None]:
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # pages that fail are counted

    def extract(html: str, url: str | None) -> str | None:
        return trafilatura.extract(
            html,
            url=url,
            include_comments=False,
            include_tables=settings.tables,
            favor_precision=settings.favor == "precision",
            favor_recall=settings.favor == "recall",
        )

    return extract


def _whole(html: str, url: str | None) -> str:
    return html


def _paragraphs(html: str, url: str | None) -> str:
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(html, "lxml")
    for element in soup(_NO_TEXT):
        element.decompose()
    texts = [" ".join(element.get_text(" ").split()) for element in soup("p")]
    return "\n".join(filter(None, texts))


def expand_pages(paths: Sequence[Path | str]) -> tuple[str, ...]:
    """Replace directories by the WARC files in them or, if there are none, by HTML files or by other inputs.

    Of an address, only WARC files and other inputs are read.
    """
    files: list[str] = []
    for given in paths:
        if is_remote(given):  # its ending tells which
            if name_of(given).endswith(WARC_SUFFIXES):
                files += expand_suffixes([given], WARC_SUFFIXES)
            else:
                files += expand_inputs([given])
            continue
        path = Path(given)
        warc = path.is_dir() and any(file.name.endswith(WARC_SUFFIXES) for file in path.iterdir())
        if warc or path.name.endswith(WARC_SUFFIXES):
            files += expand_suffixes([path], WARC_SUFFIXES)
        elif path.is_dir() and (pages := [file for file in sorted(path.rglob("*")) if _is_page_file(file)]):
            files += map(str, pages)
        elif path.name.endswith(HTML_SUFFIXES):
            files += expand_suffixes([path], HTML_SUFFIXES)
        else:
            files += expand_inputs([path])
    return tuple(files)


def _is_page_file(file: Path) -> bool:
    return file.name.endswith(HTML_SUFFIXES) and file.is_file()


def extract(job: Job[ExtractSettings]) -> None:
    """Write the texts of the pages of a job. Raises ConfigError if inputs of several kinds are mixed."""
    readers = {_reader_of(file) for file in job.files}
    if len(readers) > 1:
        raise ConfigError("extract: give WARC files, HTML files or .jsonl files, not several kinds at once")
    (reader,) = readers
    if reader is not None and "max_line_mb" in job.settings.model_fields_set:
        raise ConfigError("extract: --max-line-mb is for .jsonl files; --max-page-mb limits the pages of other files")
    limit = job.settings.max_page_mb << 20

    def read_pages(files: tuple[str, ...], start: Place, _: int, consumed: Callable[[int], Any]) -> Iterator[Chunk]:
        assert reader is not None
        return reader(files, start, limit, consumed)

    work = ChunkWork(build_extract, job.settings, key=_KEY, keep_text=False)
    if reader is None:
        map_documents(job, work, read_chunks)
    else:
        map_documents(job, work, read_pages)


def _reader_of(file: str) -> Reader | None:
    """Return the reader of whole pages for a file by its name; None for lines of JSON."""
    if name_of(file).endswith(WARC_SUFFIXES):
        return warc_reader
    if file.endswith(HTML_SUFFIXES):
        return html_reader
    return None


EXTRACT = Step(
    "extract",
    ExtractSettings,
    extract,
    build=build_extract,
    expand=expand_pages,
    packages=("trafilatura", "beautifulsoup4", "lxml", "webencodings", "brotli", "zstandard"),
    sharded=True,
)
