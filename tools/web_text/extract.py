"""Step `extract`: web pages to text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from neox.corpus import expand_inputs
from neox.corpus.left_out import LeftOut
from neox.errors import ConfigError
from neox.storage import is_remote
from tools.web_text.chunks import Chunk, Place, Reader, read_chunks
from tools.web_text.documents import ChunkWork, map_documents
from tools.web_text.filter_urls import expand_suffixes
from tools.web_text.pages import HTML_SUFFIXES, WARC_NAMES, decode_page, html_reader, page_form, warc_reader
from tools.web_text.step import DocumentFunction, Job, Outcome, Record, Settings, Step, without

_KEY = "html"
_NO_TEXT = ("script", "style", "noscript", "template")
_PAGE_KEYS = (_KEY, "charset", "too_large", "unreadable", "truncated")


class ExtractSettings(Settings):
    """Extract the text of web pages.

    The inputs are `.jsonl[.zst]` with `html` and `url`, WARC files (as of Common Crawl; WET too), or HTML
    files (`.html`, `.htm`, `.xhtml`, also `.gz`), also in the directories inside a directory.
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

    A warning counts the other files of a directory. Of an address, only WARC files and other inputs are read.
    """
    files: list[str] = []
    for given in paths:
        if is_remote(given):  # its ending tells which
            if page_form(str(given)) == "warc":
                files += expand_suffixes([given], WARC_NAMES)
            else:
                files += expand_inputs([given])
            continue
        path = Path(given)
        if path.is_dir():
            files += _pages_in(path)
        elif path.is_file() and page_form(str(path)) is not None:
            files.append(str(path))
        else:
            files += expand_inputs([path])
    return tuple(files)


def _pages_in(directory: Path) -> Sequence[str]:
    """Return the WARC files in a directory, or else the HTML files below it, or else other inputs."""
    left_out = LeftOut(str(directory))
    entries = [file for file in sorted(directory.rglob("*")) if file.is_file() and left_out.takes(str(file))]
    forms = {file: page_form(str(file)) for file in entries if file.parent == directory}
    forms |= {file: "html" if file.name.endswith(HTML_SUFFIXES) else None for file in entries if file not in forms}
    for form in ("warc", "html"):
        chosen = [file for file in entries if forms[file] == form]
        if chosen:
            for file in entries:
                if file not in chosen:
                    left_out.add("files of other formats", str(file.relative_to(directory)))
            left_out.report()
            return list(map(str, chosen))
    return expand_inputs([directory])


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
    """Return the reader of whole pages for a file; None for lines of JSON."""
    form = page_form(file)
    return None if form is None else {"warc": warc_reader, "html": html_reader}[form]


EXTRACT = Step(
    "extract",
    ExtractSettings,
    extract,
    build=build_extract,
    expand=expand_pages,
    packages=("trafilatura", "beautifulsoup4", "lxml", "webencodings", "brotli", "zstandard"),
    sharded=True,
)
