"""A web server on this machine with pages and faults."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote


def html(path: str) -> bytes:
    return f"<html><body><p>This is the page {path}.</p></body></html>".encode()


def head(status: str = "200 OK", *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "Connection: close", "", ""]).encode()


HTML = "Content-Type: text/html; charset=utf-8"


class Server:
    """Pages by path; `requests` counts them."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.times: dict[str, list[float]] = {}
        self.port = 0
        self.bomb = gzip.compress(bytes(32 << 20), 1)
        self.active = self.most_active = 0
        self.robots = b"User-agent: *\nDisallow: /secret\n"

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{path}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()[1:]
            self.requests[path] += 1
            await self.answer(path, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.active -= 1
            writer.close()

    async def answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        name, _, number = path.partition("/")
        if name == "slow":
            writer.write(head("200 OK", HTML, "Content-Length: 100000"))
            for _ in range(1000):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.05)
        elif name == "endless":
            writer.write(head("200 OK", HTML))
            while True:
                writer.write(b"<p>more</p>" * 5000)
                await writer.drain()
        else:
            writer.write(self.response(path, name, number))

    def response(self, path: str, name: str, number: str) -> bytes:
        """The whole response to a path: its first part says what is wrong with it."""
        page = html(path)
        if name == "robots.txt":
            return head("200 OK", "Content-Type: text/plain") + self.robots
        if name == "chain":
            return redirect("301 Moved", f"/chain/{int(number) - 1}" if int(number) else "/page/end")
        if name == "to":  # to another host
            return redirect("307 Temporary", f"http://{unquote(number)}")
        if name == "bomb":
            return head("200 OK", HTML, "Content-Encoding: gzip") + self.bomb
        if name == "limit":  # to one request in a second, after the first one
            self.times.setdefault(path, []).append(time.monotonic())
            if len(self.times[path]) == 1:
                return head("429 Too Many", HTML, f"Retry-After: {number}")
        if name == "busy":  # for the first time
            return head("503 Busy" if self.requests[path] == 1 else "200 OK", HTML) + page
        return fixed_responses(page).get(name, head("200 OK", HTML) + page)


def redirect(status: str, target: str) -> bytes:
    return head(status, f"Location: {target}", "Content-Length: 0")


def fixed_responses(page: bytes) -> dict[str, bytes]:
    """Responses that depend on nothing but the page."""
    raw = zlib.compressobj(wbits=-15)
    latin = "<p>naïve</p>".encode("latin-1")
    return {
        "declared": head("200 OK", HTML, "Content-Length: 99999999"),
        "cut": head("200 OK", HTML, "Content-Length: 100000") + page,
        "garbage": b"\x00\x01 this is not HTTP\r\n\r\n",
        "loop": redirect("302 Found", "/loop2"),
        "loop2": redirect("302 Found", "/loop"),
        "image": head("200 OK", "Content-Type: image/png") + b"\x89PNG",
        "binary": head("200 OK", HTML) + b"\x00\x01\x02" * 500,
        "gzip": head("200 OK", HTML, "Content-Encoding: gzip") + gzip.compress(page),
        "deflate": head("200 OK", HTML, "Content-Encoding: deflate") + raw.compress(page) + raw.flush(),
        "badgzip": head("200 OK", HTML, "Content-Encoding: gzip") + gzip.compress(page)[:-12],
        "brotli": head("200 OK", HTML, "Content-Encoding: br") + page,
        "missing": head("404 Not Found", HTML) + page,
        "latin": head("200 OK", "Content-Type: text/html; charset=iso-8859-1") + latin,
    }


@contextmanager
def running_server() -> Iterator[Server]:
    """Run a server in a thread, on all addresses of the loopback network."""
    server, loop, started = Server(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        listening = await asyncio.start_server(server.handle, "0.0.0.0", 0)
        server.port = listening.sockets[0].getsockname()[1]
        started.set()
        async with listening:
            await listening.serve_forever()

    task = loop.create_task(serve())
    loop.set_exception_handler(lambda *_: None)

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        finally:
            for other in asyncio.all_tasks(loop):
                other.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(20)
