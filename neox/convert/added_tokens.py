"""Tokens that stand in the files next to a `tokenizer.json`, and not in it: transformers adds them when it loads.

Order and precedence are those of transformers 5 (`tokenization_utils_base.py`, `tokenization_utils_tokenizers.py`):
`added_tokens_decoder` of `tokenizer_config.json`, or else `special_tokens_map.json` and `added_tokens.json`; then the
special tokens that are named and not yet added, which get the next ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from neox.convert.hf_directory import read_json
from neox.errors import ConversionError
from neox.tokenizer import ADDED_TOKENS_DECODER, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG

ADDED_TOKENS = "added_tokens.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class CompleteTokenizer:
    """A tokenizer with all tokens that its directory names.

    Attributes:
        backend: The tokenizer.
        added: Tokens that `tokenizer.json` lacks, or describes in another way.
        named: Name, such as `pad_token` -> token, of those that `tokenizer_config.json` does not name.
    """

    backend: Tokenizer
    added: tuple[str, ...]
    named: Mapping[str, str]


@dataclass(frozen=True)
class _TokensOfFiles:
    """Tokens that the files next to a `tokenizer.json` name. Special tokens are JSON values: texts or objects.

    Attributes:
        by_id: Id -> token.
        origin: File that gives the ids.
        named: Name, such as `pad_token` -> special token.
        unnamed: Special tokens without one of the usual names.
    """

    by_id: Mapping[int, AddedToken]
    origin: Path
    named: Mapping[str, Any]
    unnamed: Sequence[Any]


def complete_tokenizer(directory: Path, backend: Tokenizer) -> CompleteTokenizer:
    """Add the tokens of the files next to a `tokenizer.json`, as transformers does.

    Args:
        directory: Directory of the files.
        backend: The tokenizer, which is changed.

    Raises:
        ConversionError: If a file cannot be read, or gives a token another id than it gets.
    """
    config = _read(directory / TOKENIZER_CONFIG)
    files = _read_tokens(directory, config, backend)

    # Tokens with an id come first, in the order of ids: those that the tokenizer lacks, or describes in another way.
    known: set[str] = set()
    texts: set[str] = set()
    for token in backend.get_added_tokens_decoder().values():
        known.add(repr(token))  # the text and all flags
        texts.add(token.content)
    to_add: list[AddedToken] = []
    for _, token in sorted(files.by_id.items()):
        if repr(token) not in known:
            texts.add(token.content)
            to_add.append(token)

    # Special tokens without an id follow, and get the next ones.
    for value in (*files.named.values(), *files.unnamed):
        token = _token(value, special=True)
        if token.content not in texts:
            texts.add(token.content)
            to_add.append(token)

    # The tokenizer counts ids itself, so files of another tokenizer show by ids that differ.
    backend.add_tokens(to_add)
    for number, token in files.by_id.items():
        found = backend.token_to_id(token.content)
        if found != number:
            raise ConversionError(
                f"{files.origin}: gives {token.content!r} id {number}, but tokenizer.json and the files next to it "
                f"give it {found}: they belong to different tokenizers, or ids have gaps; save the tokenizer again "
                "with the program that trained the model"
            )

    in_config = _named_tokens(config)
    missing_names: dict[str, str] = {}
    for key, value in files.named.items():
        if key not in in_config or _text(in_config[key]) != _text(value):
            missing_names[key] = _text(value)
    return CompleteTokenizer(backend, tuple(token.content for token in to_add), missing_names)


def _read_tokens(directory: Path, config: Mapping[str, Any], backend: Tokenizer) -> _TokensOfFiles:
    """Read the files next to a `tokenizer.json`.

    Args:
        directory: Directory of the files.
        config: Content of `tokenizer_config.json`.
        backend: The tokenizer of `tokenizer.json`.
    """
    named = _named_tokens(config)
    unnamed = _unnamed_tokens(config)
    by_id: dict[int, AddedToken] = {}
    if config.get(ADDED_TOKENS_DECODER) is not None:  # then transformers reads no other file
        for number, value in config[ADDED_TOKENS_DECODER].items():
            by_id[int(number)] = _token(value)
        return _TokensOfFiles(by_id, directory / TOKENIZER_CONFIG, named, unnamed)
    special_map = _read(directory / SPECIAL_TOKENS_MAP)
    named |= _named_tokens(special_map)
    unnamed += _unnamed_tokens(special_map)
    special = set(map(_text, (*named.values(), *unnamed)))
    origin = directory / ADDED_TOKENS
    for text, number in _read(origin).items():  # it gives no flags
        by_id[number] = AddedToken(text, special=text in special, normalized=text not in special)
    by_id |= backend.get_added_tokens_decoder()  # tokenizer.json goes before
    return _TokensOfFiles(by_id, origin, named, unnamed)


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens with one of the usual names, as JSON values."""
    found: dict[str, Any] = {}
    for key in _NAMES:
        if settings.get(key):
            found[key] = settings[key]
    return found


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; nothing if there is none. Raises ConversionError."""
    return read_json(path) if path.is_file() else {}


def _unnamed_tokens(settings: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens without one of the usual names."""
    found: list[Any] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        given = settings.get(key) or []
        found += given.values() if isinstance(given, Mapping) else given
    return found


def _text(token: Any) -> str:
    """Return the text of a token of a JSON file, which is a string or an object."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _token(value: Any, *, special: bool = False) -> AddedToken:
    """Return a token of a JSON file; `special` is what it is if the file does not say it."""
    flags: dict[str, bool] = {"special": special}
    if isinstance(value, Mapping):
        for key in _FLAGS:
            if key in value:
                flags[key] = value[key]
    return AddedToken(_text(value), **flags)
