"""Step `download`: pages of a list of URLs."""

from __future__ import annotations

import asyncio
import io
import ipaddress
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from neox.corpus import Position
from neox.files import write_text
from tools.web_text.chunks import Chunk, Place
from tools.web_text.documents import ChunkOutput, Results, write_results
from tools.web_text.filter_urls import expand_suffixes, read_lines
from tools.web_text.lines import encode_line
from tools.web_text.pages import WARC_SUFFIXES, decode_page
from tools.web_text.step import Job, Settings, Step

if TYPE_CHECKING:
    from tools.web_text.fetch import Fetcher, Network, Page

_URLS_OF_CHUNK = 64
_LONGEST_URL = 8192
_MIB = 1 << 20


class DownloadSettings(Settings):
    """Download the pages of lists of URLs.

    Every host is asked for its robots.txt. It gets few requests at once, with a delay between them. The output is
    `.jsonl[.zst]` with `url` and `html`, or `.warc.gz`, in the order of the URLs.
    """

    concurrency: int = Field(64, ge=1, le=10_000)
    """Number of pages that are fetched at once."""

    per_host: int = Field(1, ge=1)
    """Number of requests to one host at once."""

    delay: float = Field(1.0, ge=0)
    """Seconds between the starts of two requests to one host; robots.txt may ask for more, up to 30."""

    timeout: float = Field(30.0, gt=0)
    """Seconds for one request, from the start of the connection to the end of the page."""

    max_page_mb: int = Field(8, ge=1)
    """Largest page, after decompression; a larger one is dropped."""

    max_redirects: int = Field(5, ge=0)
    """Number of redirects that are followed."""

    retries: int = Field(1, ge=0)
    """Number of further attempts after a timeout, a failed connection, or a status that may be temporary."""

    robots: bool = True
    """Whether robots.txt is respected."""

    user_agent: str = Field("neox-web-text", min_length=1)
    """Name for servers and robots.txt. Add an address at which you can be reached."""

    allow_addresses: tuple[str, ...] = ()
    """Private networks that may be contacted, such as 10.0.0.0/8. Others are refused, also after redirects and DNS."""

    memory_mb: int = Field(512, ge=1)
    """Memory for pages that wait for an earlier one. Pages that are being fetched come in addition."""

    RUNTIME: ClassVar[frozenset[str]] = Settings.RUNTIME | {"concurrency", "per_host", "delay", "memory_mb"}

    @field_validator("allow_addresses")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ipaddress.ip_network(network)
        return value

    def networks(self) -> tuple[Network, ...]:
        """Return the private networks that may be contacted."""
        return tuple(map(ipaddress.ip_network, self.allow_addresses))


def download(job: Job[DownloadSettings]) -> None:
    """Write the pages of a job's URLs. URLs without a page are written, too, with their reasons."""
    started = job.work / "started"  # the date of all records, so that an interrupted run makes the same bytes
    if not started.exists():
        write_text(started, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    date = started.read_text()
    write_results(job, partial(_fetched, job, date), "URLs")


def _fetched(job: Job[DownloadSettings], date: str, start: Place, consumed: Callable[[int], Any]) -> Results:
    """Fetch the URLs after the first `start[1].offset` ones, and yield them in chunks."""
    from tools.web_text.fetch import Fetcher

    done = start[1].offset
    encode = _warc_record if job.settings.output.name.endswith(WARC_SUFFIXES) else _json_line
    with asyncio.Runner() as runner:
        fetcher = runner.run(_new(Fetcher, job, done))
        try:
            while results := runner.run(fetcher.results(_URLS_OF_CHUNK - done % _URLS_OF_CHUNK)):
                done += len(results)
                output = ChunkOutput(job.settings.output)
                output.counts.documents_in = len(results)
                for url, result in results:
                    if isinstance(result, str):
                        output.drop({"url": url}, result, 0)
                    else:
                        output.keep(encode(url, result, date), len(result.body))
                consumed(len(results))
                yield Chunk(None, (), (0, Position(1, done))), output.result()
        finally:
            runner.run(fetcher.close())


async def _new(kind: type[Fetcher], job: Job[DownloadSettings], skip: int) -> Fetcher:
    """Make a fetcher inside the event loop."""
    return kind(job.settings, islice(_urls(job.files), skip, None))


def _urls(files: tuple[str, ...]) -> Iterator[str]:
    for line in read_lines(files, _LONGEST_URL, lambda size: None):
        yield line[:_LONGEST_URL].decode("utf-8", "replace")


def _json_line(url: str, page: Page, date: str) -> bytes:
    """Return a page as a JSON line, with `final_url` after redirects."""
    record: dict[str, Any] = {"url": url, "html": decode_page(page.body, page.charset), "content_type": page.media_type}
    if page.url != url:
        record["final_url"] = page.url
    return encode_line(record)


def _warc_record(url: str, page: Page, date: str) -> bytes:
    """Return a page as a compressed record of a WARC file; its content is not compressed in itself."""
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    left_out = {"content-encoding", "transfer-encoding", "content-length"}
    headers = [(name, value) for name, value in page.headers if name.lower() not in left_out]
    headers.append(("Content-Length", str(len(page.body))))
    identity = uuid.uuid5(uuid.NAMESPACE_URL, f"{url} {date}")
    buffer = io.BytesIO()
    writer = WARCWriter(buffer, gzip=True)
    writer.write_record(
        writer.create_warc_record(
            url,
            "response",
            io.BytesIO(page.body),
            http_headers=StatusAndHeaders("200 OK", headers, protocol="HTTP/1.1"),
            warc_headers_dict={"WARC-Record-ID": f"<urn:uuid:{identity}>", "WARC-Date": date},
        )
    )
    return buffer.getvalue()


DOWNLOAD = Step(
    "download",
    DownloadSettings,
    download,
    suffixes=(".jsonl.zst", ".jsonl", ".warc.gz"),
    expand=partial(expand_suffixes, suffixes=(".txt",)),
    packages=("aiohttp", "protego", "webencodings", "brotli", "zstandard"),
)
