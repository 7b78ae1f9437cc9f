"""Text as ids, and ids as text, in each position of a text.

| position | ids |
|---|---|
| document | what the tokenizer writes before a text, and the text: `document` |
| prompt | the same; an empty prompt is what stands before the first token of a text: `prompt` |
| after other text | the text alone, without a blank that belongs to the start of a text: `continuation` |
| scored after a context | the ids of both together, if they begin with those of the context: `scored` |

What a tokenizer writes after each text (such as `</s>`) belongs to whole documents of the data only: a prompt or a
context goes on. The data themselves are encoded by `Tokenizer.encode_batch`, as in gpt-neox.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from neox.tokenizer.base import Tokenizer

_INCOMPLETE = "\ufffd"  # result of decoding an incomplete UTF-8 character
_LONGEST_CHARACTER = 4  # bytes of a character in UTF-8, each of which may be a token
_TAIL = 8  # tokens of a prompt that are decoded again with those that follow


class Scored(NamedTuple):
    """A text whose log-probability is wanted, after its context.

    Attributes:
        ids: Ids of both.
        first: Index of the first id of the text, at least 1.
    """

    ids: tuple[int, ...]
    first: int


def before_first(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids on which the first token of a text depends.

    They are what the tokenizer writes before a text. If that is nothing, then the token that its configuration names as
    the beginning of texts, otherwise the end of the document before.
    """
    if tokenizer.before_text:
        return tokenizer.before_text
    if tokenizer.bos is not None:
        return (tokenizer.bos,)
    return (tokenizer.eod,)


def with_beginning(beginning: tuple[int, ...], ids: Sequence[int]) -> list[int]:
    """Return ids after a beginning. Ids that have it already, written in the text, do not get it twice."""
    if tuple(ids[: len(beginning)]) == beginning:
        return list(ids)
    return [*beginning, *ids]


def document(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that begins a document, without its end."""
    return with_beginning(tokenizer.before_text, tokenizer.encode_bare(text))


def documents(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """Yield the ids of many texts, each as `document` returns them."""
    before = len(tokenizer.before_text)
    for ids in tokenizer.encode_batch(texts):
        alone = ids[before : len(ids) - len(tokenizer.after_text)]
        yield with_beginning(tokenizer.before_text, alone)


def prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that generation continues. An empty one stands for the start of a text."""
    if not text:
        return list(before_first(tokenizer))
    return document(tokenizer, text)


def continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that follows other ids."""
    return tokenizer.encode_inside(text)


def scored(tokenizer: Tokenizer, context: str, text: str) -> Scored:
    """Return the ids of a text after its context.

    Blanks at the end of the context count to the text, as in lm-evaluation-harness. Both are encoded together. If a
    token holds characters of both, the text would lose them: then it is encoded by itself, after the context's ids.

    Args:
        tokenizer: Tokenizer.
        context: Text before it; an empty one stands for the start of a text.
        text: The text.
    """
    trimmed = context.rstrip()
    text = context[len(trimmed) :] + text
    if not trimmed:
        beginning = before_first(tokenizer)
        return Scored(tuple(with_beginning(beginning, tokenizer.encode_bare(text))), len(beginning))
    before = document(tokenizer, trimmed) or list(before_first(tokenizer))
    both = document(tokenizer, trimmed + text)
    if both[: len(before)] != before or (text and len(both) == len(before)):
        both = [*before, *continuation(tokenizer, text)]
    return Scored(tuple(both), len(before))


def tail(tokenizer: Tokenizer, before: Sequence[int]) -> list[int]:
    """Return the last of some ids: enough to decode those that follow as after all of them.

    They have a text, and do not begin inside a character: one broken character breaks all that are written in bytes.
    """
    size = _TAIL
    while size < len(before) and tokenizer.decode_shown(before[-size:])[:1] in ("", _INCOMPLETE):
        size *= 2
    return list(before[-size:])


def text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ids that follow others, without special tokens.

    It is what `before` and `ids` together have more than `before`. Decoded by themselves, the ids of many tokenizers
    lose the blank in front of their first word.
    """
    context = tail(tokenizer, before)
    known = tokenizer.decode_shown(context)
    now = tokenizer.decode_shown([*context, *ids])
    for cut in range(len(ids) - 1, max(0, len(ids) - _LONGEST_CHARACTER), -1):
        if is_complete(now):
            break
        whole = tokenizer.decode_shown([*context, *ids[:cut]])
        if is_complete(whole):  # the rest of a character is broken by itself, and not the characters before it
            return added_text(known, whole) + tokenizer.decode_shown(ids[cut:])
    return added_text(known, now)


def added_text(before: str, now: str) -> str:
    """Return what a decoded text has more than before; a character that was incomplete before is new as a whole."""
    if not now.startswith(before):
        before = before.rstrip(_INCOMPLETE)
    return now[len(before) :]


def is_complete(text: str) -> bool:
    """Return whether a decoded text ends with a whole character."""
    return not text.endswith(_INCOMPLETE)
