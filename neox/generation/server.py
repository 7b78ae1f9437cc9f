"""A small HTTP server to look at a checkpoint: `/v1/completions`, `/v1/models`, `/health`, and a page to try prompts.

One generation runs at a time, in a thread of its own; a few requests wait in line, more are refused. starlette is an
optional dependency, imported when an application is made.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neox.errors import GenerationError
from neox.generation.completions_api import (
    BadRequest,
    CompletionRequest,
    Limits,
    choice,
    error_body,
    finish_reason,
    parse_request,
    response,
    usage,
)
from neox.generation.decoding import Continuation, LanguageModel, decode
from neox.generation.text_stream import TextCodec
from neox.log import get_logger

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

_log = get_logger(__name__)
_LOOK_SECONDS = 0.5  # between looks whether the client is still there
_PAGE = Path(__file__).with_name("page.html")
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


@dataclass(frozen=True)
class Job:
    """One request on its way. stop: set when the client is gone; closing: when the server is about to; deadline: by
    time.monotonic()."""

    request: CompletionRequest
    deadline: float
    stop: threading.Event
    closing: threading.Event

    def over(self) -> bool:
        return self.stop.is_set() or self.closing.is_set() or time.monotonic() > self.deadline


class Desk:
    """Takes requests in line and lets one generate at a time."""

    def __init__(
        self, model: LanguageModel, codec: TextCodec, limits: Limits, closing: threading.Event | None = None
    ) -> None:
        self.model, self.codec, self.limits = model, codec, limits
        self.closing = closing or threading.Event()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generation")
        self.turn = asyncio.Lock()
        self.inside = 0

    def check_line(self) -> None:
        """Raise BadRequest (429) when the line is full."""
        if self.inside > self.limits.waiting:
            raise BadRequest(f"{self.inside} requests are waiting already; try again in a moment", status=429)

    @contextmanager
    def place(self) -> Iterator[threading.Event]:
        """Hold a place in the line; the event it gives ends the request's work, and is set on leaving."""
        stop = threading.Event()
        self.inside += 1
        try:
            yield stop
        finally:
            stop.set()
            self.inside -= 1

    async def work(
        self, request: CompletionRequest, stop: threading.Event, told: Callable[[int, str], None] | None
    ) -> Any:
        """Generate when it is this request's turn; return (results, whether the time limit ended it)."""
        async with self.turn:
            job = Job(request, time.monotonic() + self.limits.seconds, stop, self.closing)
            return await asyncio.get_running_loop().run_in_executor(self.thread, self._generate, job, told)

    def _generate(self, job: Job, told: Callable[[int, str], None] | None) -> tuple[list[Continuation], bool]:
        results = decode(
            self.model, job.request.prompts, job.request.params, self.codec, on_text=told, stopped=job.over
        )
        return results, time.monotonic() > job.deadline


def make_app(
    model: LanguageModel,
    codec: TextCodec,
    *,
    name: str,
    limits: Limits | None = None,
    hosts: tuple[str, ...] = (),
    closing: threading.Event | None = None,
) -> Starlette:
    """Return the ASGI application. name: the model's, in answers. hosts: further names this server is called by; a
    browser that was led here under another name (DNS rebinding) is turned away. closing: once set, answers on their
    way end with what there is.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    limits = limits or Limits()
    desk = Desk(model, codec, limits, closing)
    started = int(time.time())

    async def completions(http: Request) -> Response:
        try:
            body = await _read_json(http, limits)
            request = parse_request(body, model, codec, limits)
            desk.check_line()
        except BadRequest as error:
            return JSONResponse(error_body(str(error)), error.status)
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        if request.stream:
            events = _stream(desk, request, name)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await _whole(http, desk, request, name)

    async def models(_: Request) -> Response:
        entry = {"id": name, "object": "model", "created": started, "owned_by": "neox", "context": model.max_length}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "waiting": max(0, desk.inside - 1)})

    async def page(_: Request) -> Response:
        return HTMLResponse(_PAGE.read_text(), headers={"Content-Security-Policy": _PAGE_POLICY})

    async def refuse(http: Request, error: Exception) -> Response:
        """Say in OpenAI's form what is no completion's business: unknown paths, other methods, our own mistakes."""
        if not isinstance(error, HTTPException):
            return JSONResponse(error_body(f"{type(error).__name__}: see the server's log", "server_error"), 500)
        message = f"{http.method} {http.url.path}: {error.detail}; there are POST /v1/completions and GET /v1/models"
        return JSONResponse(error_body(message), error.status_code, error.headers)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/", page),
        ],
        middleware=[Middleware(KnownHosts, names=["localhost", "127.0.0.1", "[::1]", *hosts])],
        exception_handlers={HTTPException: refuse, Exception: refuse},
    )


class KnownHosts:
    """Lets requests through that call this server by one of `names`."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self.app, self.names = app, {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import JSONResponse

        if scope["type"] == "http":
            name = re.sub(r":\d*$", "", Headers(scope=scope).get("host", "")).lower()
            if name not in self.names:
                message = f"this server is not called {name[:80]!r}; --allow_host adds a name"
                await JSONResponse(error_body(message), 400)(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def _read_json(http: Request, limits: Limits) -> Any:
    """Return the body. Raises BadRequest for one that is too large, too slow or not JSON.

    The content type is insisted on: browsers do not send it to other sites without asking them first.
    """
    if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise BadRequest("the content type must be application/json", status=415)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in http.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise BadRequest(f"the body is larger than {limits.body_bytes:,} bytes", status=413)
    except TimeoutError as error:
        raise BadRequest(f"the body did not arrive in {limits.body_seconds:g} s", status=408) from error
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON ({error})") from error


async def _whole(http: Request, desk: Desk, request: CompletionRequest, name: str) -> Response:
    """Answer in one piece; a client that goes away ends the work."""
    from starlette.responses import JSONResponse

    try:
        with desk.place() as stop:
            task = asyncio.ensure_future(desk.work(request, stop, None))
            while not (await asyncio.wait([task], timeout=_LOOK_SECONDS))[0]:
                if await http.is_disconnected():
                    stop.set()
            results, late = task.result()
    except GenerationError as error:
        _log.error("%s", error)
        return JSONResponse(error_body(str(error), "server_error"), 500)
    choices = [
        choice(n, request.echoes[n] + result.text, finish_reason(result, late)) for n, result in enumerate(results)
    ]
    answer = response(request, name, int(time.time()), choices)
    return JSONResponse({**answer, "usage": usage(request, results)})


async def _stream(desk: Desk, request: CompletionRequest, name: str) -> AsyncIterator[str]:
    """Yield server-sent events: text as it comes, then why each sequence ended, then `[DONE]`."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()

    def told(index: int, text: str) -> None:
        loop.call_soon_threadsafe(pieces.put_nowait, (index, text))

    def event(*choices: dict[str, Any], **more: Any) -> str:
        return f"data: {json.dumps({**response(request, name, int(time.time()), list(choices)), **more})}\n\n"

    with desk.place() as stop:
        task = asyncio.ensure_future(desk.work(request, stop, told))
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        for index, text in enumerate(request.echoes):
            if text:
                yield event(choice(index, text, None))
        while (piece := await pieces.get()) is not None:
            yield event(choice(*piece, None))
        try:
            results, late = task.result()
        except GenerationError as error:
            _log.error("%s", error)
            yield f"data: {json.dumps(error_body(str(error), 'server_error'))}\n\n"
            return
    yield event(*(choice(n, "", finish_reason(result, late)) for n, result in enumerate(results)))
    if request.stream_usage:
        yield event(usage=usage(request, results))
    yield "data: [DONE]\n\n"
