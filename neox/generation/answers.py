"""Requests to generate and their answers, as the server sees them in every protocol."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from neox.generation.decoding import Continuation
from neox.generation.request import SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """Checked request.

    Attributes:
        prompts: Token ids, each prompt repeated once per continuation.
        n: Number of continuations of each prompt.
        params: Sampling settings.
        stream: Whether the answer is a stream of server-sent events.
        stream_usage: Whether a stream ends with token counts.
        answers: Writer of the answer.
        generates: Whether tokens are generated; otherwise the prompts are scored only.
        top_logprobs: Number of most probable tokens that the answer names at each position; None without scores.
    """

    prompts: tuple[tuple[int, ...], ...]
    n: int
    params: SamplingParams
    stream: bool
    stream_usage: bool
    answers: Answers
    generates: bool = True
    top_logprobs: int | None = None


class Answers(Protocol):
    """Writer of the answer to one request, in the form of its protocol. Parts of a stream are JSON objects."""

    def whole(self, model: str, results: Sequence[Continuation], late: bool) -> dict[str, Any]:
        """Return the whole answer without token counts.

        Args:
            model: Name of the model.
            results: Continuations.
            late: Whether the time limit ended them.
        """
        ...

    def first(self, model: str) -> Iterable[dict[str, Any]]:
        """Return the parts of a stream before any text."""
        ...

    def piece(self, model: str, index: int, text: str) -> Iterable[dict[str, Any]]:
        """Return the parts of a stream for new text of the continuation number `index`."""
        ...

    def last(self, model: str, results: Sequence[Continuation], late: bool) -> Iterable[dict[str, Any]]:
        """Return the parts of a stream that say why each continuation ended."""
        ...

    def counts(self, model: str) -> dict[str, Any]:
        """Return the part of a stream to which token counts are added."""
        ...


def usage_json(request: GenerationRequest, results: Sequence[Continuation]) -> dict[str, int]:
    """Return the token counts of an answer. Each prompt counts once, whatever its number of continuations."""
    read = sum(len(prompt) for prompt in request.prompts[:: request.n])
    written = sum(len(result.tokens) for result in results)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def envelope(identifier: str, kind: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a whole answer, or one part of a streamed one.

    Args:
        identifier: Identifier of the answer.
        kind: OpenAI's name of the kind of object.
        model: Name of the model.
        choices: Its continuations.
    """
    return {"id": identifier, "object": kind, "created": int(time.time()), "model": model, "choices": choices}
