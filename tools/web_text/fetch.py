"""Fetching of many pages at once, politely and in bounded memory.

    URLs in order      `Fetcher._begin`         a task for each, of at most 16 times `concurrency`
        |              `_page`                  waits while pages fill the memory; retries, not before `Retry-After`
        |              `_follow`, `_request`    redirects; private addresses; robots.txt of the host (`_check_robots`)
        |              `_slot`                  few requests at once to a host, with a delay, and `concurrency` in all
        |              `_read`                  status, type, size, body without compression
        v
    results in order   `Fetcher.results`        a `Page`, or the reason why there is none

Private networks are contacted only if the user allows them, also after redirects and by DNS (`PublicResolver`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import ssl
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies

import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.resolver import ThreadedResolver
from protego import Protego

from neox.log import get_logger
from neox.storage import LONGEST_RETRY_AFTER, retry_after
from tools.web_text.charsets import byte_order_mark, decode
from tools.web_text.http_body import (
    BodyError,
    DamagedBody,
    content_type,
    decoded_body,
    is_binary,
    most_bytes,
    sniffed_type,
)
from tools.web_text.pages import PAGE_TYPES

if TYPE_CHECKING:
    from tools.web_text.download import DownloadSettings

_log = get_logger(f"neox.{__name__}")
_REDIRECTS = (301, 302, 303, 307, 308)
_RETRIED = (429, 500, 502, 503, 504)
_PIECE_BYTES = 1 << 16
_MIB = 1 << 20
_WINDOW_OF_URLS = 16  # URLs begun, for each URL that may be fetched at once
_ROBOTS_BYTES = 500 << 10  # that are read (RFC 9309, 2.5)
_LARGEST_ROBOTS = 8 << 20
_ROBOTS_KEPT = 10_000
_LONGEST_CRAWL_DELAY = 30.0
_CONTACT = re.compile(r"\+?https?://[^\s;)]+|\S+@\S+")


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Refused(Exception):
    """A page is not kept. The message is the reason that is counted."""


class Retry(Refused):
    """A page could not be fetched, perhaps only now.

    Attributes:
        wait: Seconds for which the server wants no further request (`Retry-After`).
    """

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True)
class Page:
    """Page as it was fetched.

    Attributes:
        url: URL at the end of the redirects.
        media_type: Media type, one of `PAGE_TYPES`.
        charset: Charset of the header.
        headers: Headers of the response.
        body: Content, decompressed.
    """

    url: str
    media_type: str
    charset: str | None
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass
class _HostState:
    """State of a host while requests to it wait or run."""

    slots: asyncio.Semaphore
    users: int = 0
    next_time: float = 0.0
    delay: float = 0.0


@dataclass
class _PendingUrl:
    """URL that is being fetched."""

    url: str
    number: int
    task: asyncio.Task[Page | str] = field(init=False)


class Fetcher:
    """Fetches URLs in bounded memory; results come in the order of the URLs."""

    def __init__(self, settings: DownloadSettings, urls: Iterator[str]) -> None:
        self._settings = settings
        self._networks = settings.networks()
        self._robot = _CONTACT.sub("", settings.user_agent)  # a group of robots.txt may have the name in an address
        self._urls = urls
        self._pending: deque[_PendingUrl] = deque()
        self._hosts: dict[str, _HostState] = {}
        self._robots: OrderedDict[str, asyncio.Task[Protego | str]] = OrderedDict()
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._changed = asyncio.Condition()
        self._waiting_bytes = 0  # of pages that wait for an earlier one
        self._next = 0  # number of the next URL to begin
        self._first = 0  # number of the first URL without a result
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
                self._waiting_bytes -= len(result.body) if isinstance(result, Page) else 0
                self._changed.notify_all()
            found.append((first.url, result))
        return found

    async def close(self) -> None:
        """Cancel all requests and close the connections."""
        tasks = [pending.task for pending in self._pending] + list(self._robots.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _begin(self) -> None:
        while len(self._pending) < self._settings.concurrency * _WINDOW_OF_URLS:
            url = next(self._urls, None)
            if url is None:
                return
            pending = _PendingUrl(url, self._next)
            self._next += 1
            pending.task = asyncio.create_task(self._page(pending))
            self._pending.append(pending)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            if getproxies().keys() & {"http", "https", "all"}:
                _log.warning("the proxy that is set is not used: addresses of pages are checked before a connection")
            resolver = PublicResolver(self._networks)
            connector = aiohttp.TCPConnector(limit=0, resolver=resolver, enable_cleanup_closed=False)
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": self._settings.user_agent, "Accept-Encoding": "gzip, deflate"},
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    async def _page(self, pending: _PendingUrl) -> Page | str:
        """Return the page of a URL, or the reason why there is none."""
        settings = self._settings

        def may_start() -> bool:
            is_first = pending.number == self._first  # it never waits, because its end frees memory
            return is_first or self._waiting_bytes < settings.memory_mb * _MIB

        async with self._changed:
            await self._changed.wait_for(may_start)
        try:
            page = await self._follow_patiently(pending.url, settings.max_page_mb * _MIB, robots=settings.robots)
        except Refused as error:
            return str(error)
        self._waiting_bytes += len(page.body)
        return page

    async def _follow_patiently(
        self, url: str, limit: int, *, robots: bool, types: tuple[str, ...] = PAGE_TYPES
    ) -> Page:
        """Follow redirects to a page, and try again after temporary failures. Raises Refused.

        No further attempt comes before the time that the server has asked for. If that is too long, there is none.
        """
        for attempt in range(self._settings.retries + 1):
            try:
                return await self._follow(url, limit, robots=robots, types=types)
            except Retry as error:
                if attempt == self._settings.retries:
                    raise
                if error.wait > LONGEST_RETRY_AFTER:
                    raise Refused(f"{error}, Retry-After too long") from None
                await asyncio.sleep(error.wait)
        raise AssertionError

    async def _follow(self, url: str, limit: int, *, robots: bool, types: tuple[str, ...] = PAGE_TYPES) -> Page:
        """Follow redirects to a page. Raises Refused."""
        visited = {url}
        for _ in range(self._settings.max_redirects + 1):
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
            _ = parts.port  # raises for a bad one
        except ValueError:
            raise Refused("malformed URL") from None
        host = parts.hostname
        if parts.scheme not in ("http", "https") or not host:
            raise Refused("malformed URL")
        with suppress(ValueError):  # of a name, whose addresses the resolver judges
            if not may_contact(host, self._networks):
                raise Refused("private address")
        delay = self._settings.delay
        if robots:
            delay = max(delay, await self._check_robots(f"{parts.scheme}://{parts.netloc}", url))
        with _refusals():
            async with (
                self._slot(host, delay),
                asyncio.timeout(self._settings.timeout),
                self._open().get(url, allow_redirects=False) as response,
            ):
                try:
                    return await self._read(response, limit, types)
                except Retry as error:
                    if error.wait <= LONGEST_RETRY_AFTER:  # its other pages wait, too
                        state = self._hosts[host]
                        state.next_time = max(state.next_time, asyncio.get_running_loop().time() + error.wait)
                    raise

    async def _read(self, response: aiohttp.ClientResponse, limit: int, types: tuple[str, ...]) -> Page | str:
        """Return the page of a response, or where it redirects to. Raises Refused."""
        if response.status in _REDIRECTS and "Location" in response.headers:
            return response.headers["Location"]
        if response.status in _RETRIED:
            raise Retry(f"status {response.status}", retry_after(response.headers))
        if response.status != 200:
            raise Refused(f"status {response.status}")
        media_type, charset = content_type(", ".join(response.headers.getall("Content-Type", [])))
        if types and media_type and media_type not in types:
            raise Refused("not a page")
        if (response.content_length or 0) > most_bytes(limit):
            raise Refused("too large")
        pieces: list[bytes] = []
        size = 0
        async for data in response.content.iter_chunked(_PIECE_BYTES):
            size += len(data)
            if size > most_bytes(limit):
                raise Refused("too large")
            pieces.append(data)
        encodings = ", ".join(response.headers.getall("Content-Encoding", []))
        try:
            body = decoded_body(b"".join(pieces), encodings, limit)  # never decompresses much more than the limit
        except DamagedBody as error:
            raise Retry(str(error)) from None
        except BodyError as error:
            raise Refused(str(error)) from None
        if len(body) > limit:
            raise Refused("too large")
        media_type = media_type or sniffed_type(body)
        if types and (media_type not in types or is_binary(body, media_type, charset)):
            raise Refused("not a page")
        headers = tuple((name, value) for name, value in response.headers.items())
        return Page(str(response.url), media_type, charset, headers, body)

    @asynccontextmanager
    async def _slot(self, name: str, delay: float) -> AsyncIterator[None]:
        """Wait until a request to a host may start."""
        host = self._hosts.setdefault(name, _HostState(asyncio.Semaphore(self._settings.per_host)))
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
                loop.call_later(max(delay, host.next_time - loop.time()), self._forget, name)

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
        if not rules.can_fetch(url, self._robot):
            raise Refused("robots.txt")
        return min(float(rules.crawl_delay(self._robot) or 0), _LONGEST_CRAWL_DELAY)

    async def _fetch_robots(self, origin: str) -> Protego | str:
        """Return the rules of a host, or the reason why nothing may be fetched.

        Everything is allowed if there is no file, and nothing if the server fails (RFC 9309).
        """
        try:
            page = await self._follow_patiently(f"{origin}/robots.txt", _LARGEST_ROBOTS, robots=False, types=())
        except Refused as error:
            reason = str(error)
            if reason.startswith("status 4") and not reason.startswith("status 429"):
                return Protego.parse("")
            if reason in ("private address", "host not found", "malformed URL"):
                return reason
            return f"robots.txt: {reason}"
        return Protego.parse(_robots_text(page.body))


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise Refused or Retry in place of the errors of a request."""
    try:
        yield
    except TimeoutError:
        raise Retry("timeout") from None
    except aiohttp.ClientConnectorDNSError as error:
        private = isinstance(error.os_error, PrivateAddressError)
        raise Refused("private address" if private else "host not found") from None
    except (aiohttp.ClientSSLError, ssl.SSLError):
        raise Refused("TLS") from None
    except (aiohttp.InvalidURL, UnicodeError):
        raise Refused("malformed URL") from None
    except aiohttp.ClientPayloadError:
        raise Retry("incomplete or damaged") from None
    except (aiohttp.ClientError, OSError, ValueError):
        raise Retry("connection failed") from None


def _robots_text(data: bytes) -> str:
    """Return the text of a robots.txt: its first 500 KiB, in UTF-8 or as its byte order mark says."""
    data = data[:_ROBOTS_BYTES]
    if found := byte_order_mark(data):
        mark, codec = found
        data = data[len(mark) :]
    else:
        codec = "utf-8"
        if data[:1] == b"\0":  # UTF-16 without its mark
            codec = "utf-16-be"
        elif data[1:2] == b"\0":
            codec = "utf-16-le"
    return "\n".join(decode(data, codec).splitlines())


class PrivateAddressError(OSError):
    """A host has only private addresses."""


def may_contact(text: str, allowed: Sequence[Network]) -> bool:
    """Return whether an address is public or in an allowed network.

    An IPv6 address that stands for an IPv4 address is judged by that address.
    """
    address: Address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        elif address.teredo is not None:
            _, address = address.teredo
        else:
            address = address.ipv4_mapped or address.sixtofour or address
    if any(address in network for network in allowed):
        return True
    return address.is_global and not address.is_multicast


class PublicResolver(AbstractResolver):
    """Resolver that returns only addresses that may be contacted; a connection uses what it returns."""

    def __init__(self, allowed: Sequence[Network]) -> None:
        self._allowed = allowed
        self._inner = ThreadedResolver()

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[Any]:
        """Return addresses of a host. Raises PrivateAddressError if none may be contacted."""
        found = await self._inner.resolve(host, port, family)
        public = [entry for entry in found if may_contact(entry["host"], self._allowed)]
        if not public:
            raise PrivateAddressError(f"{host} has private addresses only")
        return public

    async def close(self) -> None:
        """Release nothing."""
        await self._inner.close()
