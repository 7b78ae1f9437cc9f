"""Tokenizer files of a Hugging Face directory: written by an export, copied by an import.

    import   tokenizer.json and its companions are copied; other vocabularies become one by transformers
                 |  `complete_tokenizer`: tokens that only the companions name, which transformers adds when it loads
                 v
             a tokenizer.json that holds every token, as our runs read it alone

    export   BERT's WordPiece              tokenizer.json and a configuration that adds [CLS] and [SEP]
             a directory of transformers   its files as they are, with the class that takes tokenizer.json unchanged
             other tokenizer.json          the file, or the tokenizer with `added_tokens`, and a new configuration
             GPT-2's vocab and merges      both files and a new configuration
             SentencePiece, tiktoken ...   nothing, with a warning

An export also gets the model's chat template, if it is not the tokenizer's own.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from neox.config import NeoXConfig
from neox.convert.hf_directory import read_json, write_json
from neox.errors import ConfigError, ConversionError, os_errors
from neox.families import Family
from neox.files import write_text
from neox.log import get_logger
from neox.tokenizer import (
    ADDED_TOKENS_DECODER,
    BERT_SPECIALS,
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    HFTokenizer,
    Tokenizer,
    build_tokenizer,
    special_token,
    tokenizer_backend,
)
from neox.tokenizer.chat import TEMPLATE_DIRECTORY, TEMPLATE_FILE, TOOL_USE, ChatTemplate, own_chat_template

_log = get_logger(__name__)

_ADDED_TOKENS = "added_tokens.json"
_FAST = "PreTrainedTokenizerFast"
_CLASSES = MappingProxyType(
    {
        "HFTokenizer": _FAST,
        "HFGPT2Tokenizer": "GPT2TokenizerFast",
        "GPT2BPETokenizer": "GPT2TokenizerFast",
    }
)
"""`tokenizer_type` -> transformers' class of its exports."""
_COMPANIONS = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, _ADDED_TOKENS, TEMPLATE_FILE)
"""Files next to a `tokenizer.json` that travel with it: special tokens and the chat template."""
TOKENIZER_FILES = (TOKENIZER_FILE, *_COMPANIONS)
"""Files of a tokenizer that an import writes."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DIFFICULT_FOR_SENTENCEPIECE = (
    "The quick brown fox jumps over the lazy dog.",
    "  two blanks  inside and around  ",
    "def mean(values):\n    return sum(values)\t# 3.14159",
    "Größe, café, 2,50 €; 数字は同じ。 ｆｕｌｌ　ｗｉｄｔｈ ﬁ ²",
    "emoji 😀 and \u200bzero width",
)
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Entries of a token of a JSON file."""
_NO_VOCABULARIES = re.compile(
    r"(generation_)?config\.json|.*\.index\.json|.*\.(safetensors|bin|pt|pth|md|py|lock)|LICENSE.*|\.git.*"
)
"""Names of files that are of no tokenizer. Which of the others is a vocabulary, transformers knows."""


@dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer and its files.

    Attributes:
        tokenizer: The tokenizer.
        type: Its `tokenizer_type`.
        vocab_file: Its vocabulary.
        merge_file: Its merges, if they have a file of their own.
    """

    tokenizer: Tokenizer
    type: str
    vocab_file: Path
    merge_file: Path | None

    @property
    def bos(self) -> int | None:
        """Id that begins a text: of the `bos_token` in the tokenizer's configuration, else the end-of-document id."""
        if not self.has_configuration or not isinstance(self.tokenizer, HFTokenizer):
            return self.tokenizer.eod
        token = special_token(self.vocab_file, "bos_token")
        if token is None:
            return None
        return self.tokenizer.backend.token_to_id(token)

    @property
    def has_added_tokens(self) -> bool:
        """Whether it has tokens that its files lack."""
        return self.tokenizer.original_hash is not None

    @property
    def has_configuration(self) -> bool:
        """Whether Hugging Face's `tokenizer_config.json` lies next to a `tokenizer.json`."""
        if self.type != "HFTokenizer" or self.vocab_file.name != TOKENIZER_FILE:
            return False
        return self.vocab_file.with_name(TOKENIZER_CONFIG).is_file()


def find_tokenizer(config: NeoXConfig, override: Path | None = None) -> TokenizerSource | None:
    """Build the configuration's tokenizer.

    Args:
        config: Configuration with the tokenizer's keys.
        override: Vocabulary file instead of the configuration's. If the configuration gives no type, it is a
            `tokenizer.json`.

    Returns:
        The tokenizer. None, with a warning, if the vocabulary file does not exist: the export then has no tokenizer.

    Raises:
        ConfigError: If `override` does not exist.
    """
    keys = config.tokenizer
    kind = keys.tokenizer_type
    vocabulary = Path(keys.vocab_file) if keys.vocab_file else None
    merges = Path(keys.merge_file) if keys.merge_file else None
    if override is not None:
        if not override.exists():
            raise ConfigError(f"--tokenizer: {override} does not exist")
        vocabulary = override
        if not config.given("tokenizer_type"):
            kind = "HFTokenizer"
    if vocabulary is None or not vocabulary.exists():
        reason = f"vocab_file {vocabulary} does not exist" if vocabulary else "the configuration has no vocab_file"
        _log.warning(
            "%s: the export has no tokenizer and no end-of-document id; give the file with --tokenizer", reason
        )
        return None
    tokenizer = build_tokenizer(kind, vocabulary, merges, added_tokens=keys.added_tokens)
    return TokenizerSource(tokenizer, kind, vocabulary, merges)


def write_tokenizer(
    source: TokenizerSource, output: Path, family: Family, max_length: int, template: ChatTemplate | None = None
) -> None:
    """Write the tokenizer's files as `transformers.AutoTokenizer` reads them.

    A warning says if the type of tokenizer has no such form, and if `AutoTokenizer` of transformers 5 would give other
    ids.

    Args:
        source: The tokenizer.
        output: Directory of the export.
        family: Family of the export.
        max_length: Longest sequence of the model in tokens.
        template: Chat template of the model, if there is one.

    Raises:
        ConversionError: If a file cannot be read or written.
    """
    tokenizer = source.tokenizer
    if isinstance(tokenizer, HFTokenizer) and tokenizer.is_bert and not source.has_configuration:
        write_text(output / TOKENIZER_FILE, tokenizer.paired().to_str(pretty=True))
        config = {
            "tokenizer_class": _FAST,
            "clean_up_tokenization_spaces": True,
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            "model_max_length": max_length,
            **BERT_SPECIALS,
        }
        write_json(output / TOKENIZER_CONFIG, config)
    elif source.type not in _CLASSES:
        _log.warning("%s has no Hugging Face form: the export has no tokenizer files", source.type)
    elif source.has_configuration:
        _write_vocabulary(source, output, family)
        _copy_companions(source.vocab_file.parent, output)
        _name_fast_class(output)
    else:
        assert isinstance(tokenizer, HFTokenizer), source.type
        if source.type == "HFTokenizer" or source.has_added_tokens:
            _write_vocabulary(source, output, family)
        else:
            assert source.merge_file is not None, "GPT-2's tokenizer has a vocabulary and merges"
            _copy(source.vocab_file, output / "vocab.json")
            _copy(source.merge_file, output / "merges.txt")
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), tokenizer.eod_token)
        config = {
            "tokenizer_class": _FAST if source.has_added_tokens else _CLASSES[source.type],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            **special,
        }
        write_json(output / TOKENIZER_CONFIG, config)
        write_json(output / SPECIAL_TOKENS_MAP, special)

    if template is None or source.type not in _CLASSES or template == own_chat_template(source.vocab_file, tokenizer):
        return  # the tokenizer's own was copied
    shutil.rmtree(output / TEMPLATE_DIRECTORY, ignore_errors=True)
    write_text(output / TEMPLATE_FILE, template.source)
    if template.tool_use is not None:
        (output / TEMPLATE_DIRECTORY).mkdir()
        write_text(output / TEMPLATE_DIRECTORY / f"{TOOL_USE}.jinja", template.tool_use)
    config = read_json(output / TOKENIZER_CONFIG)
    config.pop("chat_template", None)
    for key, token in template.tokens.items():  # those that the template was used with
        if special_token(output / TOKENIZER_FILE, key) != token:
            config[key] = token
    write_json(output / TOKENIZER_CONFIG, config)


def write_grown_tokenizer(tokenizer: HFTokenizer, vocab_file: Path, output: Path) -> None:
    """Write a tokenizer with added tokens, and what stands next to its `tokenizer.json`, into another directory.

    These files name its end of a document, its other special tokens, the ids that end a generation, and the template.

    Args:
        tokenizer: The tokenizer.
        vocab_file: File that it was built from.
        output: The directory.

    Raises:
        ConversionError: If a file cannot be read or written.
    """
    target = output / TOKENIZER_FILE
    same = vocab_file.parent.resolve() == output.resolve()
    if vocab_file.name == TOKENIZER_FILE and not same:  # those of another name are read alone
        _copy_companions(vocab_file.parent, output)
        if (vocab_file.parent / GENERATION_CONFIG).is_file():
            _copy(vocab_file.parent / GENERATION_CONFIG, output / GENERATION_CONFIG)
        if (output / TOKENIZER_CONFIG).is_file():
            _name_fast_class(output)
    with os_errors(ConversionError, f"{target}: cannot be written"):
        write_text(target, tokenizer.to_json())


def _name_fast_class(output: Path) -> None:
    """Name the class that takes a `tokenizer.json` as it is.

    transformers 5 builds the tokenizer of a class of its own anew, which may give other ids than the file.
    """
    config = read_json(output / TOKENIZER_CONFIG) | {"tokenizer_class": _FAST}
    write_json(output / TOKENIZER_CONFIG, config)


def _write_vocabulary(source: TokenizerSource, output: Path, family: Family) -> None:
    """Write the `tokenizer.json`: a copy of the file, or the tokenizer with the tokens that were added to it.

    A warning says if transformers 5 builds the family's own tokenizer instead, and that splits texts in another way.
    """
    assert isinstance(source.tokenizer, HFTokenizer), source.type
    target = output / TOKENIZER_FILE
    if source.has_added_tokens:
        with os_errors(ConversionError, f"{target}: cannot be written"):
            write_text(target, source.tokenizer.to_json())
    else:
        _copy(source.vocab_file, target)
    if family.tokenizer_pattern is None:
        return
    pre_tokenizer = json.loads(source.tokenizer.to_json()).get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if {"Regex": family.tokenizer_pattern} not in [step.get("pattern") for step in steps]:
        _log.warning(
            "%s splits texts in another way than %s: AutoTokenizer of transformers 5 builds %s's tokenizer for "
            "model_type %s and gives other ids; load the export's with PreTrainedTokenizerFast.from_pretrained",
            source.vocab_file,
            family.title,
            family.title,
            family.model_type,
        )


def _copy_companions(source: Path, output: Path) -> None:
    """Copy the files that belong to a `tokenizer.json`. Raises ConversionError if one cannot be copied."""
    for name in _COMPANIONS:
        if (source / name).is_file():
            _copy(source / name, output / name)
    for file in sorted((source / TEMPLATE_DIRECTORY).glob("*.jinja")):
        (output / TEMPLATE_DIRECTORY).mkdir(exist_ok=True)
        _copy(file, output / TEMPLATE_DIRECTORY / file.name)


def import_tokenizer(source: Path, output: Path) -> Path | None:
    """Copy the tokenizer of a Hugging Face directory. If it has no `tokenizer.json`, `transformers` writes one.

    Args:
        source: Directory of the model.
        output: Directory to copy to.

    Returns:
        The `tokenizer.json`; None, with a warning, if there is no tokenizer.

    Raises:
        ConversionError: If a file cannot be copied, or the files contradict each other.
    """
    copied = output / TOKENIZER_FILE
    if (source / TOKENIZER_FILE).is_file():
        _copy(source / TOKENIZER_FILE, copied)
        _copy_companions(source, output)
        backend = tokenizer_backend(copied)
        before = backend.to_str()
        complete = complete_tokenizer(source, backend)
        if complete.backend.to_str() != before:
            write_text(copied, complete.backend.to_str(pretty=True))
            _log.info(
                "%s: as in transformers, tokens of the files next to it are added to it: %s",
                source / TOKENIZER_FILE,
                ", ".join(complete.added),
            )
        if complete.named:
            write_json(output / TOKENIZER_CONFIG, _read_if_there(output / TOKENIZER_CONFIG) | dict(complete.named))
        return copied
    if any(path.is_file() and not _NO_VOCABULARIES.fullmatch(path.name) for path in source.iterdir()):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True, trust_remote_code=False)
            if len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) > 0:  # else no vocabulary was found
                tokenizer.save_pretrained(str(output))
        except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            _log.warning("%s: transformers cannot read the tokenizer: %s", source, error)
        else:
            if copied.is_file():
                _compare_with_sentencepiece(source, copied)
                return copied
            if (output / TOKENIZER_CONFIG).is_file():
                _log.warning("%s: transformers' %s has no tokenizer.json", source, type(tokenizer).__name__)
    _log.warning("%s has no tokenizer: set tokenizer_type and vocab_file in the configuration", source)
    return None


def _compare_with_sentencepiece(source: Path, copied: Path) -> None:
    """Warn if the tokenizer that transformers made of a SentencePiece model cuts texts in another way than the model.

    transformers' classes decide about blanks and normalization of their own; the ids of training were perhaps those
    of sentencepiece. Pieces are compared, because classes may count ids in another way.
    """
    models = sorted(source.glob("*.model"))
    if not models or importlib.util.find_spec("sentencepiece") is None:
        return
    import sentencepiece

    for path in models:
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except (RuntimeError, OSError):  # a vocabulary of another kind
            continue
        backend = tokenizer_backend(copied)
        for text in _DIFFICULT_FOR_SENTENCEPIECE:
            theirs = processor.encode(text, out_type=str)
            ours = backend.encode(text, add_special_tokens=False).tokens
            if list(map(processor.piece_to_id, theirs)) != list(map(processor.piece_to_id, ours)):
                _log.warning(
                    "%s: transformers' tokenizer, which is taken, cuts %r into %s, and sentencepiece into %s: check "
                    "which of them the model was trained with",
                    path,
                    text,
                    ours,
                    theirs,
                )
                return


@dataclass(frozen=True)
class CompleteTokenizer:
    """A tokenizer with all tokens that its directory names.

    Attributes:
        backend: The tokenizer.
        added: Tokens that `tokenizer.json` lacks, or describes in another way.
        named: Name, such as `pad_token` -> token, of those that `tokenizer_config.json` does not name.
    """

    backend: Backend
    added: tuple[str, ...]
    named: Mapping[str, str]


@dataclass(frozen=True)
class _CompanionTokens:
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


def complete_tokenizer(directory: Path, backend: Backend) -> CompleteTokenizer:
    """Add the tokens of the files next to a `tokenizer.json`, as transformers does when it loads it.

    Order and precedence are those of transformers 5 (`tokenization_utils_base.py`, `tokenization_utils_tokenizers.py`):
    `added_tokens_decoder` of `tokenizer_config.json`, or else `special_tokens_map.json` and `added_tokens.json`; then
    the special tokens that are named and not yet added, which get the next ids.

    Args:
        directory: Directory of the files.
        backend: The tokenizer, which is changed.

    Raises:
        ConversionError: If a file cannot be read, or gives a token another id than it gets.
    """
    config = _read_if_there(directory / TOKENIZER_CONFIG)
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


def _read_tokens(directory: Path, config: Mapping[str, Any], backend: Backend) -> _CompanionTokens:
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
        return _CompanionTokens(by_id, directory / TOKENIZER_CONFIG, named, unnamed)
    special_map = _read_if_there(directory / SPECIAL_TOKENS_MAP)
    named |= _named_tokens(special_map)
    unnamed += _unnamed_tokens(special_map)
    special = set(map(_text, (*named.values(), *unnamed)))
    origin = directory / _ADDED_TOKENS
    for text, number in _read_if_there(origin).items():  # it gives no flags
        by_id[number] = AddedToken(text, special=text in special, normalized=text not in special)
    by_id |= backend.get_added_tokens_decoder()  # tokenizer.json goes before
    return _CompanionTokens(by_id, origin, named, unnamed)


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens with one of the usual names, as JSON values."""
    found: dict[str, Any] = {}
    for key in _SPECIAL_NAMES:
        if settings.get(key):
            found[key] = settings[key]
    return found


def _read_if_there(path: Path) -> dict[str, Any]:
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
        for key in _TOKEN_FLAGS:
            if key in value:
                flags[key] = value[key]
    return AddedToken(_text(value), **flags)


def _copy(source: Path, target: Path) -> None:
    """Copy one file. Raises ConversionError."""
    with os_errors(ConversionError, f"{source}: cannot be copied to {target}"):
        shutil.copyfile(source, target)
