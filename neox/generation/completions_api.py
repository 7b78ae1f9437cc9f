"""OpenAI's completions protocol: what a request may say, and what the answers look like. No network here.

What we cannot do is refused by name instead of being ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from neox.errors import GenerationError
from neox.generation.decoding import Continuation, LanguageModel, room
from neox.generation.params import SamplingParams
from neox.generation.text_stream import TextCodec, is_text

# Fields of the protocol that change nothing at these values, and that we do not have at others.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (None, 0, False),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
}

_NEARLY_NONE = 1e-9  # top_p: 0 leaves only the most probable token here, where in our settings it means that all stay


class BadRequest(GenerationError):
    """A request that cannot be answered; status: the HTTP status that says why."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. seconds: of its generation; waiting: requests in line before others are refused;
    body_bytes, body_seconds: of what it sends."""

    max_tokens: int = 1024
    sequences: int = 8
    body_bytes: int = 1 << 20
    seconds: float = 120.0
    waiting: int = 8
    body_seconds: float = 30.0

    def __post_init__(self) -> None:
        if min(self.max_tokens, self.sequences) < 1 or self.waiting < 0 or not self.seconds >= 0:
            raise GenerationError("limits of a server: at least 1 token and 1 sequence, no negative seconds or waiting")


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request: prompts (ids, each as often as continuations were asked for) and how to go on.

    stream_usage: a stream ends with the counts of tokens.
    """

    prompts: tuple[tuple[int, ...], ...]
    echoes: tuple[str, ...]
    params: SamplingParams
    stream: bool
    stream_usage: bool = False
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")


def parse_request(body: Any, model: LanguageModel, codec: TextCodec, limits: Limits) -> CompletionRequest:
    """Check a decoded JSON body. Raises BadRequest that names the field."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    fields = dict(body)
    fields.pop("model", None)
    fields.pop("user", None)
    for name, neutral in _NEUTRAL.items():
        if fields.pop(name, None) not in neutral:
            raise BadRequest(f"`{name}` does not exist here; leave it out")
    n = _number(fields, "n", 1, int, 1, limits.sequences)
    if _number(fields, "best_of", n, int, 1, limits.sequences) != n:
        raise BadRequest("`best_of` other than `n` does not exist here; leave it out")
    prompts = _prompts(fields.pop("prompt", ""), codec)
    if len(prompts) * n > limits.sequences:
        raise BadRequest(
            f"{len(prompts)} prompts x n = {n} are more than {limits.sequences} sequences, this server's limit"
        )
    echo = _boolean(fields, "echo")
    stream = _boolean(fields, "stream")
    stream_usage = _stream_usage(fields, stream)
    params = _params(fields, limits)
    if fields:
        raise BadRequest(f"unknown: {', '.join(map(_shown, sorted(fields)))}")
    for prompt in prompts:
        try:
            room(model, prompt, params)
        except GenerationError as error:
            raise BadRequest(str(error)) from error
        if max(prompt) >= model.vocab_size or min(prompt) < 0:
            raise BadRequest(f"`prompt` has token ids outside 0..{model.vocab_size - 1}")
    every = [prompt for prompt in prompts for _ in range(n)]
    echoes = tuple(codec.decode(prompt) if echo else "" for prompt in every)
    return CompletionRequest(tuple(every), echoes, params, stream, stream_usage)


def _params(fields: dict[str, Any], limits: Limits) -> SamplingParams:
    """Take the sampling settings out of `fields`, with OpenAI's defaults (temperature 1, 16 tokens)."""
    stop = fields.pop("stop", None) or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop) or len(stop) > 16:
        raise BadRequest("`stop` must be a string or a list of up to 16 strings")
    seed = fields.pop("seed", None)
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
        raise BadRequest("`seed` must be an integer from 0")
    longest = _number(fields, "max_tokens", min(16, limits.max_tokens), int, 1, limits.max_tokens)
    settings = {
        "max_new_tokens": longest,
        "min_new_tokens": _number(fields, "min_tokens", 0, int, 0, longest),
        "temperature": _number(fields, "temperature", 1.0, float, 0, 100),
        "top_p": _number(fields, "top_p", 1.0, float, 0, 1) or _NEARLY_NONE,
        "top_k": _number(fields, "top_k", 0, int, 0, 2**31),
        "repetition_penalty": _number(fields, "repetition_penalty", 1.0, float, 0.01, 100),
    }
    try:
        return SamplingParams(**settings, stop=tuple(stop), seed=secrets.randbits(32) if seed is None else seed)
    except GenerationError as error:
        raise BadRequest(str(error)) from error


def _prompts(value: Any, codec: TextCodec) -> list[tuple[int, ...]]:
    """Return each prompt's ids: a text, ids, or a list of either; an empty text starts after an end-of-document."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(map(_is_id, value))):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRequest("`prompt` must be a string, a list of strings, token ids, or a list of token ids")
    prompts = []
    for prompt in value:
        if isinstance(prompt, str):
            if not is_text(prompt):
                raise BadRequest("`prompt` holds half of a UTF-16 pair (\\ud800 to \\udfff), which is no text")
            prompts.append(tuple(codec.encode(prompt) if prompt else [codec.eod]))
        elif isinstance(prompt, list) and prompt and all(map(_is_id, prompt)):
            prompts.append(tuple(prompt))
        else:
            raise BadRequest("`prompt` must hold texts or lists of token ids")
    return prompts


def _shown(name: str) -> str:
    """Return a field's name as an answer may hold it."""
    return name[:80] if is_text(name) else ascii(name[:80])


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stream_usage(fields: dict[str, Any], stream: bool) -> bool:
    """Take `stream_options`, in which clients ask for the counts of tokens."""
    options = fields.pop("stream_options", None)
    if options is None:
        return False
    if not stream or not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise BadRequest("`stream_options` goes with `stream: true` and may hold `include_usage`")
    return _boolean(dict(options), "include_usage")


def _boolean(fields: dict[str, Any], name: str) -> bool:
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"`{name}` must be true or false")
    return bool(value)


def _number(fields: dict[str, Any], name: str, default: Any, kind: type, least: float, most: float) -> Any:
    value = fields.pop(name, None)
    if value is None:
        return default
    wrong_kind = isinstance(value, bool) or not isinstance(value, (int,) if kind is int else (int, float))
    if wrong_kind or not least <= value <= most:
        raise BadRequest(f"`{name}` must be {'an integer' if kind is int else 'a number'} from {least:g} to {most:g}")
    return kind(value)


def choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    """Return one element of `choices`."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def finish_reason(result: Continuation, late: bool) -> str:
    """Return `stop`, `length`, or `timeout` where this server's time limit ended it."""
    if result.finished:
        return "stop"
    return "timeout" if late else "length"


def response(
    request: CompletionRequest, model_name: str, created: int, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a whole answer, or one chunk of a streamed one."""
    return {"id": request.id, "object": "text_completion", "created": created, "model": model_name, "choices": choices}


def usage(request: CompletionRequest, results: list[Continuation]) -> dict[str, int]:
    """Return token counts."""
    read, written = sum(map(len, request.prompts)), sum(len(result.tokens) for result in results)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def error_body(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
