"""HTTP server for a checkpoint: OpenAI's `/v1/chat/completions`, `/v1/completions` and `/v1/models`, and pages.

One generation runs at a time, in a separate thread. A few requests wait; further ones are refused.

    event loop                                                                thread "generation"
    Service.completions, .chat_completions    one for each path
      _read_json                              limits of size and time
      parse_request, parse_chat_request       everything is checked here: 400, or a GenerationRequest
      GenerationQueue.check_capacity          429 if too many wait
      _answer: the whole text, or _stream     server-sent events
        GenerationQueue.generate              waits for earlier requests   -> decode (`generation.decoding`)
          stop, closing, deadline             asked after each token       <- should_stop
          _parts.put                          each piece of text           <- on_text
      request.answers                         the protocol's JSON (`generation.answers`)

A client that disconnects sets `stop`. starlette is an optional dependency, which is imported in the functions that need
it.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from neox.errors import GenerationError
from neox.generation.answers import GenerationRequest, usage_json
from neox.generation.chat_api import parse_chat_request
from neox.generation.chat_format import ChatFormat
from neox.generation.completions_api import parse_request
from neox.generation.decoding import Continuation, LanguageModel, OnText, TokenScores, decode
from neox.generation.request_fields import BadRequest, RequestLimits, error_json, refusal_json
from neox.log import get_logger
from neox.tokenizer import Tokenizer

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

_log = get_logger(__name__)
_DISCONNECT_POLL_SECONDS = 0.5
_PAGES = Path(__file__).with_name("pages")
_PAGE_POLICY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'"
# Path -> file of the pages to try the model.
_PAGE_FILES = MappingProxyType(
    {
        "/": "prompt.html",
        "/chat": "chat.html",
        "/pages/style.css": "style.css",
        "/pages/stream.js": "stream.js",
        "/pages/prompt.js": "prompt.js",
        "/pages/chat.js": "chat.js",
    }
)


class GenerationQueue:
    """Queue of requests, which generate one at a time.

    Attributes:
        size: Number of requests that wait or generate.
    """

    def __init__(
        self, model: LanguageModel, codec: Tokenizer, limits: RequestLimits, closing: threading.Event | None = None
    ) -> None:
        """Make an empty queue. Once `closing` is set, all generations end with what there is."""
        self.model = model
        self.codec = codec
        self.limits = limits
        self.closing = closing or threading.Event()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generation")
        self.lock = asyncio.Lock()
        self.size = 0

    def check_capacity(self) -> None:
        """Raise BadRequest (429) if the queue is full."""
        if self.size > self.limits.waiting:
            raise BadRequest(f"{self.size} requests are waiting already; try again in a moment", status=429)

    @contextmanager
    def entry(self) -> Iterator[threading.Event]:
        """Count a request as waiting, and yield the event that ends its generation, which is set at the end."""
        stop = threading.Event()
        self.size += 1
        try:
            yield stop
        finally:
            stop.set()
            self.size -= 1

    async def generate(
        self, request: GenerationRequest, stop: threading.Event, on_text: OnText | None
    ) -> tuple[list[Continuation], bool]:
        """Wait for earlier requests and generate.

        Args:
            request: A checked request.
            stop: Event that ends the generation, because its client has disconnected.
            on_text: Function that is called with (sequence, new text) in the generation's thread.

        Returns:
            The continuations, and whether the time limit ended them.
        """
        async with self.lock:
            deadline = time.monotonic() + self.limits.seconds

            def should_stop() -> bool:
                return stop.is_set() or self.closing.is_set() or time.monotonic() > deadline

            def run() -> tuple[list[Continuation], bool]:
                results = [Continuation() for _ in request.prompts]
                if request.generates:
                    results = decode(
                        self.model,
                        request.prompts,
                        request.params,
                        self.codec,
                        on_text=on_text,
                        should_stop=should_stop,
                    )
                if request.top_logprobs is not None:
                    for prompt, result in zip(request.prompts, results, strict=True):
                        ids = torch.tensor([[*prompt, *result.all_tokens]])
                        result.scores = TokenScores(torch.empty(1, 0), torch.empty(1, 0, 0), torch.empty(1, 0, 0))
                        if ids.size(1) > 1:
                            labels = ids[:, 1:]
                            result.scores = self.model.token_scores(ids[:, :-1], labels, request.top_logprobs)
                return results, time.monotonic() > deadline

            return await asyncio.get_running_loop().run_in_executor(self.thread, run)


class Service:
    """Answers of the server to the requests of each path."""

    def __init__(self, queue: GenerationQueue, name: str, chat: ChatFormat | None) -> None:
        """Answer with the model of a queue. Arguments as for `make_app`."""
        self.queue = queue
        self.name = name
        self.chat = chat
        self.started = int(time.time())

    async def completions(self, http: Request) -> Response:
        """Continue texts."""
        queue = self.queue
        return await self._generate(http, lambda body: parse_request(body, queue.model, queue.codec, queue.limits))

    async def chat_completions(self, http: Request) -> Response:
        """Answer conversations."""
        queue = self.queue
        return await self._generate(http, lambda body: parse_chat_request(body, queue.model, self.chat, queue.limits))

    async def _generate(self, http: Request, parse: Callable[[Any], GenerationRequest]) -> Response:
        """Answer a request that `parse` checks."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response, StreamingResponse

        try:
            request = parse(await _read_json(http, self.queue.limits))
            self.queue.check_capacity()
        except BadRequest as error:
            return JSONResponse(refusal_json(error), error.status)
        except ClientDisconnect:
            return Response(status_code=400)  # the client has disconnected
        if request.stream:
            events = _stream(self.queue, request, self.name)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await _answer(http, self.queue, request, self.name)

    async def models(self, _: Request) -> Response:
        """Name the model, with the length of its context and whether it answers conversations."""
        from starlette.responses import JSONResponse

        entry = {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "neox",
            "context": self.queue.model.max_length,
            "chat": self.chat is not None,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(self, _: Request) -> Response:
        """Say that the server answers, and how many requests wait."""
        from starlette.responses import JSONResponse

        return JSONResponse({"status": "ok", "waiting": max(0, self.queue.size - 1)})

    async def page(self, http: Request) -> Response:
        """Send a file of the pages to try the model."""
        from starlette.responses import FileResponse

        return FileResponse(_PAGES / _PAGE_FILES[http.url.path], headers={"Content-Security-Policy": _PAGE_POLICY})


async def _refuse(http: Request, error: Exception) -> Response:
    """Answer unknown paths, other methods and internal errors in OpenAI's format."""
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    if not isinstance(error, HTTPException):
        return JSONResponse(error_json(f"{type(error).__name__}: see the server's log", "server_error"), 500)
    message = (
        f"{http.method} {http.url.path}: {error.detail}; available are POST /v1/chat/completions, POST /v1/completions "
        "and GET /v1/models"
    )
    return JSONResponse(error_json(message), error.status_code, error.headers)


def make_app(
    model: LanguageModel,
    codec: Tokenizer,
    *,
    name: str,
    chat: ChatFormat | None = None,
    limits: RequestLimits | None = None,
    hosts: tuple[str, ...] = (),
    closing: threading.Event | None = None,
) -> Starlette:
    """Return the ASGI application.

    Args:
        model: Model to generate with.
        codec: Tokenizer.
        name: Name of the model in answers.
        chat: Form of conversations with the model; None if it has no chat template.
        limits: Limits of requests.
        hosts: Accepted values of the Host header, in addition to this machine's local names. Other requests are
            refused; a browser sends them after DNS rebinding.
        closing: Event that ends running generations with what there is.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.routing import Route

    service = Service(GenerationQueue(model, codec, limits or RequestLimits(), closing), name, chat)
    return Starlette(
        routes=[
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/chat/completions", service.chat_completions, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/health", service.health),
            *[Route(path, service.page) for path in _PAGE_FILES],
        ],
        middleware=[Middleware(_HostFilter, names=["localhost", "127.0.0.1", "[::1]", *hosts])],
        exception_handlers={HTTPException: _refuse, Exception: _refuse},
    )


class _HostFilter:
    """ASGI middleware that refuses requests whose Host header is not one of `names`."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self.app = app
        self.names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import JSONResponse

        if scope["type"] == "http":
            name = re.sub(r":\d*$", "", Headers(scope=scope).get("host", "")).lower()
            if name not in self.names:
                message = f"the host name {name[:80]!r} is not accepted; --allow_host adds it"
                await JSONResponse(error_json(message), 400)(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def _read_json(http: Request, limits: RequestLimits) -> Any:
    """Return the decoded body. Raises BadRequest if it is too large, too slow or not JSON.

    The content type is required: browsers send it to other sites only after a preflight request.
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


async def _answer(http: Request, queue: GenerationQueue, request: GenerationRequest, name: str) -> Response:
    """Return the whole answer. A client that disconnects ends its generation."""
    from starlette.responses import JSONResponse

    try:
        with queue.entry() as stop:
            task = asyncio.ensure_future(queue.generate(request, stop, None))
            while not (await asyncio.wait([task], timeout=_DISCONNECT_POLL_SECONDS))[0]:
                if await http.is_disconnected():
                    stop.set()
            results, late = task.result()
    except GenerationError as error:
        _log.error("%s", error)
        return JSONResponse(error_json(str(error), "server_error"), 500)
    answer = request.answers.whole(name, results, late)
    return JSONResponse({**answer, "usage": usage_json(request, results)})


async def _stream(queue: GenerationQueue, request: GenerationRequest, name: str) -> AsyncIterator[str]:
    """Yield server-sent events: the parts of an answer, and `[DONE]` if the model has not failed."""
    async with aclosing(_parts(queue, request, name)) as parts:
        async for part in parts:
            yield f"data: {json.dumps(part)}\n\n"
            if "error" in part:
                return
    yield "data: [DONE]\n\n"


async def _parts(queue: GenerationQueue, request: GenerationRequest, name: str) -> AsyncGenerator[dict[str, Any]]:
    """Yield the parts of an answer: text as it is generated, why each sequence ended, token counts."""
    loop = asyncio.get_running_loop()
    answers = request.answers
    pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()

    def put(index: int, text: str) -> None:
        loop.call_soon_threadsafe(pieces.put_nowait, (index, text))

    with queue.entry() as stop:
        task = asyncio.ensure_future(queue.generate(request, stop, put))
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        for part in answers.first(name):
            yield part
        while (piece := await pieces.get()) is not None:
            for part in answers.piece(name, *piece):
                yield part
        try:
            results, late = task.result()
        except GenerationError as error:
            _log.error("%s", error)
            yield error_json(str(error), "server_error")
            return
    for part in answers.last(name, results, late):
        yield part
    if request.stream_usage:
        yield {**answers.counts(name), "usage": usage_json(request, results)}
