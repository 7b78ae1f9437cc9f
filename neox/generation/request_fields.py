"""Fields that the requests of OpenAI's protocols share: limits, numbers, sampling settings, refusals.

Unsupported settings are refused by name instead of being ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neox.errors import GenerationError
from neox.generation.decoding import LanguageModel
from neox.generation.request import SamplingParams
from neox.generation.text_stream import is_text

# `top_p: 0` of the protocol keeps only the most probable token; in `SamplingParams` it would keep all.
_SMALLEST_TOP_P = 1e-9
_MOST_STOPS = 16
# One model is served; the others only tell OpenAI whose requests belong together.
_WITHOUT_EFFECT = ("model", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")


class BadRequest(GenerationError):
    """Invalid request.

    Attributes:
        status: HTTP status of the answer.
        field: Field of the request that is wrong; None if it is not a single one.
        code: OpenAI's name of the mistake, if it has one.
    """

    def __init__(self, message: str, status: int = 400, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code


@dataclass(frozen=True)
class RequestLimits:
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


def fields_of(body: Any, neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the fields of a decoded body, without those that have no effect here.

    Args:
        body: The decoded JSON.
        neutral: Unsupported fields, and the values at which they have no effect.

    Raises:
        BadRequest: If the body is no object, or an unsupported field has another value.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    fields = dict(body)
    for name in _WITHOUT_EFFECT:
        fields.pop(name, None)
    for name, values in neutral.items():
        if fields.pop(name, None) not in values:
            raise BadRequest(f"`{name}` is not supported; leave it out", field=name)
    return fields


def refuse_unknown(fields: Mapping[str, Any]) -> None:
    """Raise BadRequest for fields that are left."""
    if fields:
        raise BadRequest(f"unknown fields: {', '.join(map(_printable, sorted(fields)))}")


def check_prompt(prompt: Sequence[int], params: SamplingParams, model: LanguageModel, field: str) -> None:
    """Raise BadRequest if a prompt does not fit, or has ids that the model does not know."""
    try:
        params.token_limit(len(prompt), model.max_length)
    except GenerationError as error:
        raise BadRequest(str(error), field=field, code="context_length_exceeded") from error
    check_ids(prompt, model.vocab_size, field)


def check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raise BadRequest for ids that the model does not know."""
    if any(not 0 <= token < vocab_size for token in ids):
        raise BadRequest(f"`{field}` has token ids outside 0..{vocab_size - 1}", field=field)


def sampling_of(fields: dict[str, Any], limits: RequestLimits, longest: int, vocab_size: int) -> SamplingParams:
    """Remove the sampling settings from `fields`; the temperature is 1 if it is not given.

    Args:
        fields: Fields of the request.
        limits: Limits of the server.
        longest: Most new tokens.
        vocab_size: Number of ids that the model knows.
    """
    settings = {
        "max_new_tokens": longest,
        "min_new_tokens": number(fields, "min_tokens", 0, int, 0, longest),
        "temperature": number(fields, "temperature", 1.0, float, 0, 100),
        "top_p": number(fields, "top_p", 1.0, float, 0, 1) or _SMALLEST_TOP_P,
        "top_k": number(fields, "top_k", 0, int, 0, 2**31),
        "repetition_penalty": number(fields, "repetition_penalty", 1.0, float, 0.01, 100),
    }
    stop = _stop_strings(fields)
    stop_ids = _stop_ids(fields)
    check_ids(stop_ids, vocab_size, "stop_token_ids")
    seed = _seed(fields)
    try:
        return SamplingParams(**settings, stop=stop, stop_ids=stop_ids, seed=seed)
    except GenerationError as error:
        raise BadRequest(str(error)) from error


def token_limit(fields: dict[str, Any], name: str, default: int, limits: RequestLimits) -> int:
    """Remove a number of new tokens from `fields` and return it, or the default as far as the limit allows it."""
    limit: int = number(fields, name, min(default, limits.max_tokens), int, 1, limits.max_tokens)
    return limit


def _stop_strings(fields: dict[str, Any]) -> tuple[str, ...]:
    stop = fields.pop("stop", None) or []
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop) or len(stop) > _MOST_STOPS:
        raise BadRequest(f"`stop` must be a string or a list of up to {_MOST_STOPS} strings", field="stop")
    if not all(map(is_text, stop)):
        raise BadRequest("`stop` contains a lone UTF-16 surrogate (\\ud800 to \\udfff)", field="stop")
    return tuple(stop)


def _stop_ids(fields: dict[str, Any]) -> tuple[int, ...]:
    ids = fields.pop("stop_token_ids", None) or []
    if not isinstance(ids, list) or not all(map(is_id, ids)) or len(ids) > _MOST_STOPS:
        raise BadRequest(f"`stop_token_ids` must be a list of up to {_MOST_STOPS} token ids", field="stop_token_ids")
    return tuple(ids)


def _seed(fields: dict[str, Any]) -> int:
    seed = fields.pop("seed", None)
    if seed is None:
        return secrets.randbits(32)
    if not is_id(seed) or not 0 <= seed < 2**63:
        raise BadRequest("`seed` must be an integer from 0", field="seed")
    return int(seed)


def stream_usage(fields: dict[str, Any], stream: bool) -> bool:
    """Remove `stream_options` from `fields`; return whether it asks for token counts."""
    options = fields.pop("stream_options", None)
    if options is None:
        return False
    if isinstance(options, dict) and options.get("include_obfuscation") in (None, False):
        options = {name: value for name, value in options.items() if name != "include_obfuscation"}
    if not stream or not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise BadRequest(
            "`stream_options` requires `stream: true` and may contain only `include_usage`", field="stream_options"
        )
    return boolean(dict(options), "include_usage")


def boolean(fields: dict[str, Any], name: str) -> bool:
    """Remove a boolean from `fields` and return it; false if it is not given."""
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"`{name}` must be true or false", field=name)
    return bool(value)


def number(fields: dict[str, Any], name: str, default: Any, kind: type, least: float, most: float) -> Any:
    """Remove a number from `fields` and return it; the default if it is not given."""
    value = fields.pop(name, None)
    if value is None:
        return default
    if kind is int:
        described = "an integer"
        right_kind = is_id(value)
    else:
        described = "a number"
        right_kind = is_id(value) or isinstance(value, float)
    if not right_kind or not least <= value <= most:
        raise BadRequest(f"`{name}` must be {described} from {least:g} to {most:g}", field=name)
    return kind(value)


def is_id(value: Any) -> bool:
    """Return whether a value is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def _printable(name: str) -> str:
    """Return a field's name, shortened and escaped for an answer."""
    if not is_text(name):
        return ascii(name[:80])
    return name[:80]


def error_json(
    message: str, kind: str = "invalid_request_error", *, field: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def refusal_json(error: BadRequest) -> dict[str, Any]:
    """Return a refusal in OpenAI's format."""
    kind = "invalid_request_error"
    code = error.code
    if error.status == 429:
        kind = "rate_limit_error"
        code = "rate_limit_exceeded"
    return error_json(str(error), kind, field=error.field, code=code)
