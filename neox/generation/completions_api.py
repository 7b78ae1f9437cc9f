"""OpenAI's completions protocol: checking requests and building answers, without a network."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from neox.generation.answers import GenerationRequest, envelope
from neox.generation.decoding import Continuation, LanguageModel, TokenScores
from neox.generation.request_fields import (
    BadRequest,
    RequestLimits,
    boolean,
    check_ids,
    check_prompt,
    fields_of,
    is_id,
    number,
    refuse_unknown,
    sampling_of,
    stream_usage,
    token_limit,
)
from neox.generation.text_stream import TextStream, is_text
from neox.tokenizer import Tokenizer, positions
from neox.tokenizer.positions import is_complete

# Unsupported fields of the protocol, and the values at which they have no effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
}
_KIND = "text_completion"
_DEFAULT_TOKENS = 16
_MOST_LOGPROBS = 20


def parse_request(body: Any, model: LanguageModel, codec: Tokenizer, limits: RequestLimits) -> GenerationRequest:
    """Check a decoded JSON body. Raises BadRequest naming the field."""
    fields = fields_of(body, _NEUTRAL)
    n = number(fields, "n", 1, int, 1, limits.sequences)
    if number(fields, "best_of", n, int, 1, limits.sequences) != n:
        raise BadRequest("`best_of` other than `n` is not supported; leave it out", field="best_of")
    prompts, texts = _prompts(fields.pop("prompt", ""), model, codec)
    if len(prompts) * n > limits.sequences:
        raise BadRequest(
            f"{len(prompts)} prompts x n = {n} are more than {limits.sequences} sequences, this server's limit"
        )
    echo = boolean(fields, "echo")
    stream = boolean(fields, "stream")
    with_usage = stream_usage(fields, stream)
    if fields.get("logprobs") is False:
        del fields["logprobs"]
    top_logprobs = number(fields, "logprobs", None, int, 0, min(_MOST_LOGPROBS, model.vocab_size))
    if top_logprobs is not None and stream:
        raise BadRequest("`logprobs` of a stream are not supported; leave out `stream`", field="logprobs")
    generates = not (echo and fields.get("max_tokens") == 0 and fields["max_tokens"] is not False)  # else only scored
    if not generates:
        fields["max_tokens"] = 1
    params = sampling_of(fields, limits, token_limit(fields, "max_tokens", _DEFAULT_TOKENS, limits), model.vocab_size)
    refuse_unknown(fields)
    for prompt in prompts:
        check_prompt(prompt if generates else prompt[1:] or prompt, params, model, "prompt")
    every = [prompt for prompt in prompts for _ in range(n)]
    echoes = [""] * len(every)
    if echo:
        echoes = [text for text in texts for _ in range(n)]
    answers = CompletionAnswers(echoes, codec, every)
    return GenerationRequest(tuple(every), n, params, stream, with_usage, answers, generates, top_logprobs)


def _prompts(value: Any, model: LanguageModel, codec: Tokenizer) -> tuple[list[tuple[int, ...]], list[str]]:
    """Return ids and text of each prompt: `value` is a text, ids, or a list of either; an empty text is no context."""
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRequest(
            "`prompt` must be a string, a list of strings, token ids, or a list of token ids", field="prompt"
        )
    prompts = []
    texts = []
    for prompt in value:
        if isinstance(prompt, str):
            if not is_text(prompt):
                raise BadRequest(
                    "`prompt` contains a lone UTF-16 surrogate (\\ud800 to \\udfff), which is not valid text",
                    field="prompt",
                )
            prompts.append(tuple(positions.prompt(codec, prompt)))
            texts.append(prompt)
        elif _is_ids(prompt):
            check_ids(prompt, model.vocab_size, "prompt")  # before they are decoded
            prompts.append(tuple(prompt))
            texts.append(codec.decode_shown(prompt))
        else:
            raise BadRequest("`prompt` must contain strings or lists of token ids", field="prompt")
    return prompts, texts


def _is_ids(value: Any) -> bool:
    """Return whether a value is a list of token ids that is not empty."""
    return isinstance(value, list) and bool(value) and all(map(is_id, value))


def finish_reason(result: Continuation, late: bool) -> str:
    """Return `stop`, `length`, or `timeout` if the server's time limit ended the generation."""
    if result.finished:
        return "stop"
    if late:
        return "timeout"
    return "length"


class CompletionAnswers:
    """Writer of the answer to a request for completions.

    Attributes:
        id: Identifier of the answer.
        echoes: Text shown before each continuation.
    """

    def __init__(self, echoes: Sequence[str], codec: Tokenizer, prompts: Sequence[tuple[int, ...]]) -> None:
        self.id = f"cmpl-{secrets.token_hex(12)}"
        self.echoes = tuple(echoes)
        self._codec = codec
        self._prompts = prompts

    def whole(self, model: str, results: Sequence[Continuation], late: bool) -> dict[str, Any]:
        """Return the whole answer."""
        choices = []
        for index, result in enumerate(results):
            choice = _choice(index, self.echoes[index] + result.text, finish_reason(result, late))
            if result.scores is not None:
                choice["logprobs"] = self._logprobs(index, result, result.scores)
            choices.append(choice)
        return envelope(self.id, _KIND, model, choices)

    def _logprobs(self, index: int, result: Continuation, scores: TokenScores) -> dict[str, Any]:
        """Return the log-probabilities of new tokens, and of the prompt's if it is shown, which has none for its first.

        The end token that has ended a continuation is the last one.
        """
        prompt = self._prompts[index]
        ids = [*prompt, *result.all_tokens]
        first = 0 if self.echoes[index] else len(prompt)
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        stream = TextStream(self._codec, before=ids[:first])
        offset = 0
        for place in range(first, len(ids)):
            name = _token_name(self._codec, ids[place])
            found["tokens"].append(name)
            found["text_offset"].append(offset)
            offset += len(stream.push(ids[place]))
            if place == 0:
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                continue
            score = scores.labels[0, place - 1].item()
            top = {name: score}
            for token, value in zip(
                scores.top_ids[0, place - 1].tolist(), scores.top[0, place - 1].tolist(), strict=True
            ):
                top.setdefault(_token_name(self._codec, token), value)
            found["token_logprobs"].append(score)
            found["top_logprobs"].append(top)
        return found

    def first(self, model: str) -> Iterator[dict[str, Any]]:
        """Yield the parts with the prompts, if they are shown."""
        for index, text in enumerate(self.echoes):
            if text:
                yield envelope(self.id, _KIND, model, [_choice(index, text, None)])

    def piece(self, model: str, index: int, text: str) -> Iterator[dict[str, Any]]:
        """Yield the part with new text of a continuation."""
        yield envelope(self.id, _KIND, model, [_choice(index, text, None)])

    def last(self, model: str, results: Sequence[Continuation], late: bool) -> Iterator[dict[str, Any]]:
        """Yield one part that says why each continuation ended."""
        choices = [_choice(index, "", finish_reason(result, late)) for index, result in enumerate(results)]
        yield envelope(self.id, _KIND, model, choices)

    def counts(self, model: str) -> dict[str, Any]:
        """Return the part for token counts."""
        return envelope(self.id, _KIND, model, [])


def _token_name(codec: Tokenizer, token: int) -> str:
    """Return a token as the protocol shows it: its text, or its id if it is a part of a character or has no text."""
    name = codec.special_name(token)
    if name is None and token < codec.vocab_size:
        name = codec.decode([token])
    if not name or not is_complete(name):
        name = f"token_id:{token}"
    return name


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    """Return one element of an answer's `choices`."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
