"""OpenAI's completions protocol: checking requests and building answers, without a network.

Unsupported settings are refused by name instead of being ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neox.errors import GenerationError
from neox.generation.decoding import Continuation, LanguageModel
from neox.generation.request import SamplingParams, encode_prompt
from neox.generation.text_stream import TextCodec, is_text

# Unsupported fields of the protocol, and the values at which they have no effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (None, 0, False),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
}

# `top_p: 0` of the protocol keeps only the most probable token; in `SamplingParams` it would keep all.
_SMALLEST_TOP_P = 1e-9


class BadRequest(GenerationError):
    """Invalid request."""

    def __init__(self, message: str, status: int = 400) -> None:
        """Set the message and the HTTP status of the answer."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Limits of one request.

    Attributes:
        max_tokens: New tokens per sequence.
        sequences: Sequences, over all prompts and `n`.
        body_bytes: Size of the request's body.
        seconds: Time of its generation.
        waiting: Requests that may wait; further ones are refused.
        body_seconds: Time until the body has arrived.
    """

    max_tokens: int = 1024
    sequences: int = 8
    body_bytes: int = 1 << 20
    seconds: float = 120.0
    waiting: int = 8
    body_seconds: float = 30.0

    def __post_init__(self) -> None:
        if min(self.max_tokens, self.sequences) < 1 or self.waiting < 0 or not self.seconds >= 0:
            raise GenerationError(
                "server limits: max_tokens, max_sequences must be at least 1; max_seconds, max_waiting not negative"
            )


@dataclass(frozen=True)
class CompletionRequest:
    """Checked request.

    Attributes:
        prompts: Token ids, each prompt repeated once per continuation.
        echoes: Text shown before each continuation.
        params: Sampling settings.
        stream: Whether the answer is a stream of server-sent events.
        stream_usage: Whether a stream ends with token counts.
        id: Identifier of the answer.
    """

    prompts: tuple[tuple[int, ...], ...]
    echoes: tuple[str, ...]
    params: SamplingParams
    stream: bool
    stream_usage: bool = False
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")


def parse_request(body: Any, model: LanguageModel, codec: TextCodec, limits: Limits) -> CompletionRequest:
    """Check a decoded JSON body. Raises BadRequest naming the field."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    fields = dict(body)
    fields.pop("model", None)
    fields.pop("user", None)
    for name, neutral in _NEUTRAL.items():
        if fields.pop(name, None) not in neutral:
            raise BadRequest(f"`{name}` is not supported; leave it out")
    n = _number(fields, "n", 1, int, 1, limits.sequences)
    if _number(fields, "best_of", n, int, 1, limits.sequences) != n:
        raise BadRequest("`best_of` other than `n` is not supported; leave it out")
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
        raise BadRequest(f"unknown fields: {', '.join(map(_printable, sorted(fields)))}")
    for prompt in prompts:
        _check_prompt(prompt, params, model)
    every = [prompt for prompt in prompts for _ in range(n)]
    echoes = [""] * len(every)
    if echo:
        echoes = [codec.decode(prompt) for prompt in every]
    return CompletionRequest(tuple(every), tuple(echoes), params, stream, stream_usage)


def _check_prompt(prompt: Sequence[int], params: SamplingParams, model: LanguageModel) -> None:
    """Raise BadRequest if a prompt does not fit, or has ids that the model does not know."""
    try:
        params.token_limit(len(prompt), model.max_length)
    except GenerationError as error:
        raise BadRequest(str(error)) from error
    if max(prompt) >= model.vocab_size or min(prompt) < 0:
        raise BadRequest(f"`prompt` has token ids outside 0..{model.vocab_size - 1}")


def _params(fields: dict[str, Any], limits: Limits) -> SamplingParams:
    """Remove the sampling settings from `fields`; defaults are OpenAI's (temperature 1, 16 tokens)."""
    stop = fields.pop("stop", None) or []
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop) or len(stop) > 16:
        raise BadRequest("`stop` must be a string or a list of up to 16 strings")
    seed = fields.pop("seed", None)
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
        raise BadRequest("`seed` must be an integer from 0")
    if seed is None:
        seed = secrets.randbits(32)
    longest = _number(fields, "max_tokens", min(16, limits.max_tokens), int, 1, limits.max_tokens)
    settings = {
        "max_new_tokens": longest,
        "min_new_tokens": _number(fields, "min_tokens", 0, int, 0, longest),
        "temperature": _number(fields, "temperature", 1.0, float, 0, 100),
        "top_p": _number(fields, "top_p", 1.0, float, 0, 1) or _SMALLEST_TOP_P,
        "top_k": _number(fields, "top_k", 0, int, 0, 2**31),
        "repetition_penalty": _number(fields, "repetition_penalty", 1.0, float, 0.01, 100),
    }
    try:
        return SamplingParams(**settings, stop=tuple(stop), seed=seed)
    except GenerationError as error:
        raise BadRequest(str(error)) from error


def _prompts(value: Any, codec: TextCodec) -> list[tuple[int, ...]]:
    """Return the ids of each prompt: `value` is a text, ids, or a list of either; an empty text means no context."""
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRequest("`prompt` must be a string, a list of strings, token ids, or a list of token ids")
    prompts = []
    for prompt in value:
        if isinstance(prompt, str):
            if not is_text(prompt):
                raise BadRequest(
                    "`prompt` contains a lone UTF-16 surrogate (\\ud800 to \\udfff), which is not valid text"
                )
            prompts.append(tuple(encode_prompt(prompt, codec)))
        elif _is_ids(prompt):
            prompts.append(tuple(prompt))
        else:
            raise BadRequest("`prompt` must contain strings or lists of token ids")
    return prompts


def _printable(name: str) -> str:
    """Return a field's name, shortened and escaped for an answer."""
    if not is_text(name):
        return ascii(name[:80])
    return name[:80]


def _is_ids(value: Any) -> bool:
    """Return whether a value is a list of token ids that is not empty."""
    return isinstance(value, list) and bool(value) and all(map(_is_id, value))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stream_usage(fields: dict[str, Any], stream: bool) -> bool:
    """Remove `stream_options` from `fields`; return whether it asks for token counts."""
    options = fields.pop("stream_options", None)
    if options is None:
        return False
    if not stream or not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise BadRequest("`stream_options` requires `stream: true` and may contain only `include_usage`")
    return _boolean(dict(options), "include_usage")


def _boolean(fields: dict[str, Any], name: str) -> bool:
    """Remove a boolean from `fields` and return it; false if it is not given."""
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"`{name}` must be true or false")
    return bool(value)


def _number(fields: dict[str, Any], name: str, default: Any, kind: type, least: float, most: float) -> Any:
    """Remove a number from `fields` and return it; the default if it is not given."""
    value = fields.pop(name, None)
    if value is None:
        return default
    if kind is int:
        described = "an integer"
        right_kind = _is_id(value)
    else:
        described = "a number"
        right_kind = _is_id(value) or isinstance(value, float)
    if not right_kind or not least <= value <= most:
        raise BadRequest(f"`{name}` must be {described} from {least:g} to {most:g}")
    return kind(value)


def choice_json(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    """Return one element of an answer's `choices`."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def finish_reason(result: Continuation, late: bool) -> str:
    """Return `stop`, `length`, or `timeout` if the server's time limit ended the generation."""
    if result.finished:
        return "stop"
    if late:
        return "timeout"
    return "length"


def response_json(
    request: CompletionRequest, model_name: str, created: int, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a whole answer, or one chunk of a streamed one."""
    return {"id": request.id, "object": "text_completion", "created": created, "model": model_name, "choices": choices}


def usage_json(request: CompletionRequest, results: list[Continuation]) -> dict[str, int]:
    """Return the token counts of an answer."""
    read = sum(len(prompt) for prompt in request.prompts)
    written = sum(len(result.tokens) for result in results)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def error_json(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
