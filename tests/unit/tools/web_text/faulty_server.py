"""A web server on this machine with pages and faults."""

from __future__ import annotations

import asyncio
import gzip
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote


def html(path: str) -> bytes:
    return f"<html><body><p>This is the page {path}.</p></body></html>".encode()


def head(status: str = "200 OK", *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "Connection: close", "", ""]).encode()


class Server:
    """Pages by path; `requests` counts them."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
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
        page, kind = html(path), "Content-Type: text/html; charset=utf-8"
        name, _, number = path.partition("/")
        if name == "robots.txt":
            writer.write(head("200 OK", "Content-Type: text/plain") + self.robots)
        elif name == "slow":
            writer.write(head("200 OK", kind, "Content-Length: 100000"))
            for _ in range(1000):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.05)
        elif name == "endless":
            writer.write(head("200 OK", kind))
            while True:
                writer.write(b"<p>more</p>" * 5000)
                await writer.drain()
        elif name == "declared":
            writer.write(head("200 OK", kind, "Content-Length: 99999999"))
        elif name == "cut":
            writer.write(head("200 OK", kind, "Content-Length: 100000") + page)
        elif name == "garbage":
            writer.write(b"\x00\x01 this is not HTTP\r\n\r\n")
        elif name == "loop":
            writer.write(head("302 Found", "Location: /loop2", "Content-Length: 0"))
        elif name == "loop2":
            writer.write(head("302 Found", "Location: /loop", "Content-Length: 0"))
        elif name == "chain":
            target = f"/chain/{int(number) - 1}" if int(number) else "/page/end"
            writer.write(head("301 Moved", f"Location: {target}", "Content-Length: 0"))
        elif name == "to":  # to another host
            writer.write(head("307 Temporary", f"Location: http://{unquote(number)}", "Content-Length: 0"))
        elif name == "image":
            writer.write(head("200 OK", "Content-Type: image/png") + b"\x89PNG")
        elif name == "binary":
            writer.write(head("200 OK", kind) + b"\x00\x01\x02" * 500)
        elif name == "gzip":
            writer.write(head("200 OK", kind, "Content-Encoding: gzip") + gzip.compress(page))
        elif name == "deflate":
            raw = zlib.compressobj(wbits=-15)
            writer.write(head("200 OK", kind, "Content-Encoding: deflate") + raw.compress(page) + raw.flush())
        elif name == "bomb":
            writer.write(head("200 OK", kind, "Content-Encoding: gzip") + self.bomb)
        elif name == "badgzip":
            writer.write(head("200 OK", kind, "Content-Encoding: gzip") + gzip.compress(page)[:-12])
        elif name == "brotli":
            writer.write(head("200 OK", kind, "Content-Encoding: br") + page)
        elif name == "busy":  # for the first time
            status = "503 Busy" if self.requests[path] == 1 else "200 OK"
            writer.write(head(status, kind) + page)
        elif name == "missing":
            writer.write(head("404 Not Found", kind) + page)
        elif name == "latin":
            writer.write(
                head("200 OK", "Content-Type: text/html; charset=iso-8859-1") + "<p>naïve</p>".encode("latin-1")
            )
        else:
            writer.write(head("200 OK", kind) + page)


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
