"""Text as ids, and ids as text, in each position of a text.

| position | ids |
|---|---|
| document | what the tokenizer writes before a text, and the text: `document` |
| prompt | the same; an empty prompt is what stands before the first token of a text: `prompt` |
| after other text | the text alone, without a blank that belongs to the start of a text: `continuation` |
| scored after a context | the ids of both together, if they begin with those of the context: `scored` |
| scored from its first token on | what stands before the first token of a text, and the text: `scored_documents` |

What a tokenizer writes after each text (such as `</s>`) belongs to whole documents of the data only, because a prompt
or a context is continued. The data themselves are encoded by `Tokenizer.encode_batch`, as in gpt-neox.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from neox.tokenizer.base import Tokenizer

_INCOMPLETE = "\ufffd"  # result of decoding an incomplete UTF-8 character
_LONGEST_CHARACTER = 4  # bytes of a character in UTF-8, each of which may be a token
_TAIL = 8  # tokens of a prompt, or more, that are decoded again with those that follow


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
    """Return ids with a beginning in front. Ids that begin with it already, because the text does, stay as they are."""
    if tuple(ids[: len(beginning)]) == beginning:
        return list(ids)
    return [*beginning, *ids]


def document(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that begins a document, without its end."""
    return with_beginning(tokenizer.before_text, tokenizer.encode_bare(text))


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

    Blanks at the end of the context move to the text, as in lm-evaluation-harness. Both are encoded together. If a
    token then holds characters of both, the text is encoded by itself and follows the ids of the context, because its
    first characters would not be scored otherwise.

    Args:
        tokenizer: Tokenizer of both.
        context: Text before it; an empty one, or one of blanks only, stands for the start of a text.
        text: Text whose log-probability is wanted.
    """
    trimmed = context.rstrip()
    blanks = context[len(trimmed) :]
    text = blanks + text
    if not trimmed:
        beginning = before_first(tokenizer)
        return Scored(tuple(with_beginning(beginning, tokenizer.encode_bare(text))), len(beginning))
    before = document(tokenizer, trimmed) or list(before_first(tokenizer))
    both = document(tokenizer, trimmed + text)
    has_own_ids = len(both) > len(before) or not text
    if both[: len(before)] != before or not has_own_ids:
        both = [*before, *continuation(tokenizer, text)]
    return Scored(tuple(both), len(before))


def scored_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[Scored]:
    """Yield the ids of many texts, each as `scored` returns them without a context."""
    before = len(tokenizer.before_text)
    beginning = before_first(tokenizer)
    for ids in tokenizer.encode_batch(texts):
        alone = ids[before : len(ids) - len(tokenizer.after_text)]
        yield Scored(tuple(with_beginning(beginning, alone)), len(beginning))


def tail(tokenizer: Tokenizer, before: Sequence[int]) -> list[int]:
    """Return as many of the last ids as are needed to decode others that follow them.

    Their text is not empty and does not begin inside a character, because tokenizers with a token for each byte decode
    all bytes in a row as replacement characters if one of them does not fit.
    """
    size = _TAIL
    while size < len(before):
        text = tokenizer.decode_shown(before[-size:])
        if text and not text.startswith(_INCOMPLETE):
            break
        size *= 2
    return list(before[-size:])


def text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ids that follow others, without special tokens.

    `before` and `ids` are decoded together, and the text of `before` is taken off. Decoded by themselves, the ids of
    many tokenizers lose the blank in front of their first word.
    """
    context = tail(tokenizer, before)
    known = tokenizer.decode_shown(context)
    together = tokenizer.decode_shown([*context, *ids])
    if is_complete(together):
        return added_text(known, together)
    # The ids end inside a character, which may have broken the whole characters of bytes in front of it. So the ids of
    # this character, at most three, are decoded by themselves:
    #
    #     context | a  b  [c1 c2 c3] | [d1 d2
    #               decoded after    | decoded
    #               the context      | alone
    for unfinished in range(1, min(_LONGEST_CHARACTER, len(ids))):
        cut = len(ids) - unfinished
        whole = tokenizer.decode_shown([*context, *ids[:cut]])
        if is_complete(whole):
            return added_text(known, whole) + tokenizer.decode_shown(ids[cut:])
    return added_text(known, together)


def added_text(before: str, now: str) -> str:
    """Return what more ids added to a decoded text. A character that was incomplete before is new as a whole."""
    if not now.startswith(before):
        before = before.rstrip(_INCOMPLETE)
    return now[len(before) :]


def is_complete(text: str) -> bool:
    """Return whether a decoded text ends with a whole character."""
    return not text.endswith(_INCOMPLETE)
