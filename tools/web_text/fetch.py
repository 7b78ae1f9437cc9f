"""Fetching of many pages at once, politely and in bounded memory."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import zlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp
from protego import Protego

from tools.web_text.addresses import PrivateAddressError, PublicResolver, is_literal, may_contact
from tools.web_text.pages import PAGE_TYPES, content_type

_REDIRECTS = (301, 302, 303, 307, 308)
_RETRIED = (429, 500, 502, 503, 504)
_PIECE_BYTES = 1 << 16
_WINDOW_OF_URLS = 16  # URLs begun, for each of those fetched at once
_ROBOTS_BYTES = 1 << 19
_ROBOTS_KEPT = 10_000
_LONGEST_CRAWL_DELAY = 30.0
_PROBED_BYTES = 1024


class Refused(Exception):
    """Page that is not kept; the message is the reason that is counted."""


class Retry(Refused):
    """Failure that may be temporary."""


@dataclass(frozen=True)
class Page:
    """Page as it was fetched.

    Attributes:
        url: URL at the end of the redirects.
        media_type: Media type, of `PAGE_TYPES`.
        charset: Charset of the header.
        headers: Headers of the response.
        body: Content, decompressed.
    """

    url: str
    media_type: str
    charset: str | None
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True)
class Limits:
    """Limits of fetching; those of `DownloadSettings`."""

    concurrency: int
    per_host: int
    delay: float
    timeout: float
    page_bytes: int
    held_bytes: int
    max_redirects: int
    retries: int
    robots: bool
    user_agent: str
    allowed: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


@dataclass
class _Host:
    """State of a host while requests to it wait or run."""

    slots: asyncio.Semaphore
    users: int = 0
    next_time: float = 0.0
    delay: float = 0.0


@dataclass
class _Pending:
    """URL that is being fetched."""

    url: str
    number: int
    task: asyncio.Task[Page | str] = field(init=False)


class Fetcher:
    """Fetches URLs in bounded memory; results come in the order of the URLs."""

    def __init__(self, limits: Limits, urls: Iterator[str]) -> None:
        self.limits, self._urls = limits, urls
        self._pending: deque[_Pending] = deque()
        self._hosts: dict[str, _Host] = {}
        self._robots: OrderedDict[str, asyncio.Task[Protego | str]] = OrderedDict()
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._changed = asyncio.Condition()
        self._held, self._next, self._first = 0, 0, 0
        self._session: aiohttp.ClientSession | None = None

    async def results(self, count: int) -> list[tuple[str, Page | str]]:
        """Return the next results, at most `count`: URL, and page or reason."""
        found: list[tuple[str, Page | str]] = []
        while len(found) < count:
            self._begin()
            if not self._pending:
                break
            first = self._pending[0]
            result = await first.task
            self._pending.popleft()
            async with self._changed:
                self._first = first.number + 1
                self._held -= len(result.body) if isinstance(result, Page) else 0
                self._changed.notify_all()
            found.append((first.url, result))
        return found

    async def close(self) -> None:
        """Cancel what runs."""
        tasks = [pending.task for pending in self._pending] + list(self._robots.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _begin(self) -> None:
        while len(self._pending) < self.limits.concurrency * _WINDOW_OF_URLS:
            url = next(self._urls, None)
            if url is None:
                return
            pending = _Pending(url, self._next)
            self._next += 1
            pending.task = asyncio.create_task(self._page(pending))
            self._pending.append(pending)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            resolver = PublicResolver(self.limits.allowed)
            connector = aiohttp.TCPConnector(limit=0, resolver=resolver, enable_cleanup_closed=False)
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": self.limits.user_agent, "Accept-Encoding": "gzip, deflate"},
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    async def _page(self, pending: _Pending) -> Page | str:
        """Return the page of a URL, or the reason why there is none."""
        async with self._changed:  # the first URL never waits, so that memory is freed
            await self._changed.wait_for(lambda: self._held < self.limits.held_bytes or pending.number == self._first)
        for attempt in range(self.limits.retries + 1):
            try:
                page = await self._follow(pending.url, self.limits.page_bytes, robots=self.limits.robots)
                self._held += len(page.body)
                return page
            except Retry as error:
                if attempt == self.limits.retries:
                    return str(error)
            except Refused as error:
                return str(error)
        raise AssertionError

    async def _follow(self, url: str, limit: int, *, robots: bool, types: tuple[str, ...] = PAGE_TYPES) -> Page:
        """Follow redirects to a page. Raises Refused."""
        visited = {url}
        for _ in range(self.limits.max_redirects + 1):
            result = await self._request(url, limit, robots=robots, types=types)
            if isinstance(result, Page):
                return result
            url = urljoin(url, result).partition("#")[0]
            if url in visited:
                raise Refused("redirect loop")
            visited.add(url)
        raise Refused("too many redirects")

    async def _request(self, url: str, limit: int, *, robots: bool, types: tuple[str, ...]) -> Page | str:
        """Return the page of a URL, or where it redirects to. Raises Refused."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname or "", parts.port
        except ValueError:
            raise Refused("malformed URL") from None
        if parts.scheme not in ("http", "https") or not host:
            raise Refused("malformed URL")
        if is_literal(host) and not may_contact(host, self.limits.allowed):
            raise Refused("private address")
        delay = self.limits.delay
        if robots:
            delay = max(delay, await self._check_robots(f"{parts.scheme}://{parts.netloc}", url))
        try:
            async with (
                self._slot(host, delay),
                asyncio.timeout(self.limits.timeout),
                self._open().get(url, allow_redirects=False) as response,
            ):
                return await self._read(response, limit, types)
        except TimeoutError:
            raise Retry("timeout") from None
        except aiohttp.ClientConnectorDNSError as error:
            private = isinstance(error.os_error, PrivateAddressError)
            raise Refused("private address" if private else "host not found") from None
        except (aiohttp.ClientSSLError, ssl.SSLError):
            raise Refused("TLS") from None
        except (aiohttp.InvalidURL, UnicodeError):
            raise Refused("malformed URL") from None
        except (aiohttp.ClientPayloadError, zlib.error):
            raise Retry("incomplete or damaged") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise Retry("connection failed") from None

    async def _read(self, response: aiohttp.ClientResponse, limit: int, types: tuple[str, ...]) -> Page | str:
        """Return the page of a response, or where it redirects to. Raises Refused."""
        if response.status in _REDIRECTS and "Location" in response.headers:
            return response.headers["Location"]
        if response.status != 200:
            raise (Retry if response.status in _RETRIED else Refused)(f"status {response.status}")
        media_type, charset = content_type(response.headers.get("Content-Type", ""))
        if types and media_type not in types:
            raise Refused("not a page")
        if (response.content_length or 0) > limit:
            raise Refused("too large")
        body = await _body(response, limit)
        if types and b"\0" in body[:_PROBED_BYTES] and not body.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise Refused("not a page")
        headers = tuple((name, value) for name, value in response.headers.items())
        return Page(str(response.url), media_type, charset, headers, body)

    @asynccontextmanager
    async def _slot(self, name: str, delay: float) -> AsyncIterator[None]:
        """Wait until a request to a host may start."""
        host = self._hosts.setdefault(name, _Host(asyncio.Semaphore(self.limits.per_host)))
        host.users += 1
        loop = asyncio.get_running_loop()
        try:
            async with host.slots:
                start = max(loop.time(), host.next_time)
                host.next_time = start + delay
                await asyncio.sleep(start - loop.time())
                async with self._slots:
                    yield
        finally:
            host.users -= 1
            if not host.users:
                loop.call_later(delay, self._forget, name)

    def _forget(self, name: str) -> None:
        if name in self._hosts and not self._hosts[name].users:
            del self._hosts[name]

    async def _check_robots(self, origin: str, url: str) -> float:
        """Return the delay that robots.txt asks for. Raises Refused if it does not allow the URL."""
        task = self._robots.get(origin)
        if task is None:
            task = self._robots[origin] = asyncio.create_task(self._fetch_robots(origin))
            if len(self._robots) > _ROBOTS_KEPT and next(iter(self._robots.values())).done():
                self._robots.popitem(last=False)
        rules = await asyncio.shield(task)
        if isinstance(rules, str):
            raise Refused(rules)
        if not rules.can_fetch(url, self.limits.user_agent):
            raise Refused("robots.txt")
        return min(float(rules.crawl_delay(self.limits.user_agent) or 0), _LONGEST_CRAWL_DELAY)

    async def _fetch_robots(self, origin: str) -> Protego | str:
        """Return the rules of a host: all is allowed without a file, and nothing if its server fails (RFC 9309)."""
        try:
            page = await self._follow(f"{origin}/robots.txt", _ROBOTS_BYTES, robots=False, types=())
        except Refused as error:
            reason = str(error)
            if reason.startswith("status 4") and reason != "status 429":
                return Protego.parse("")
            return (
                reason if reason in ("private address", "host not found", "malformed URL") else "robots.txt: " + reason
            )
        return Protego.parse(page.body.decode("utf-8", "replace"))


async def _body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the decompressed content; no more than the limit is ever decompressed. Raises Refused."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("gzip", "x-gzip", "deflate", "identity", ""):
        raise Refused("unknown content encoding")
    decoder: Any = None
    if encoding not in ("identity", ""):
        decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)
    parts, size = list[bytes](), 0
    async for data in response.content.iter_chunked(_PIECE_BYTES):
        if decoder is not None:
            if encoding == "deflate" and not size and data[0] & 0x0F != 8:  # without zlib's header, as some servers do
                decoder = zlib.decompressobj(-zlib.MAX_WBITS)
            data = decoder.decompress(data, limit + 1 - size)
        size += len(data)
        if size > limit:
            raise Refused("too large")
        parts.append(data)
        if decoder is not None and decoder.eof:
            break
    if decoder is not None and not decoder.eof:
        raise Retry("incomplete or damaged")
    return b"".join(parts)
