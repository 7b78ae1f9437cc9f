"""Tokenizer files of a Hugging Face directory: written by an export, copied by an import."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from neox.config import NeoXConfig
from neox.convert.added_tokens import ADDED_TOKENS, complete_tokenizer
from neox.convert.hf_directory import read_json, write_json
from neox.errors import ConfigError, ConversionError, os_errors
from neox.families import Family
from neox.files import write_text
from neox.log import get_logger
from neox.tokenizer import (
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

_FAST = "PreTrainedTokenizerFast"
_CLASSES = MappingProxyType(
    {
        "HFTokenizer": _FAST,
        "HFGPT2Tokenizer": "GPT2TokenizerFast",
        "GPT2BPETokenizer": "GPT2TokenizerFast",
    }
)
"""`tokenizer_type` -> transformers' class of its exports."""
_COMPANIONS = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, TEMPLATE_FILE)
"""Files next to a `tokenizer.json` that travel with it: special tokens and the chat template."""
TOKENIZER_FILES = (TOKENIZER_FILE, *_COMPANIONS)
"""Files of a tokenizer that an import writes."""
_OTHER_VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Files of tokenizers that transformers can turn into a `tokenizer.json`."""


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
        _write_bert(tokenizer, output, max_length)
    elif source.type not in _CLASSES:
        _log.warning("%s has no Hugging Face form: the export has no tokenizer files", source.type)
    elif source.has_configuration:
        _write_vocabulary(source, output)
        _warn_of_other_ids(source, family)
        copy_companions(source.vocab_file.parent, output)
        _name_fast_class(output)
    else:
        if source.type == "HFTokenizer" or source.has_added_tokens:
            _write_vocabulary(source, output)
            _warn_of_other_ids(source, family)
        else:
            assert source.merge_file is not None, "GPT-2's tokenizer has a vocabulary and merges"
            _copy(source.vocab_file, output / "vocab.json")
            _copy(source.merge_file, output / "merges.txt")
        _write_configuration(source, output, max_length)
    is_own = template == own_chat_template(source.vocab_file, tokenizer)  # then its files are copied
    if template is not None and source.type in _CLASSES and not is_own:
        _write_chat_template(template, output)


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
        copy_companions(vocab_file.parent, output)
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


def _write_chat_template(template: ChatTemplate, output: Path) -> None:
    """Write a chat template in place of the tokenizer's own, with the special tokens that it was used with."""
    shutil.rmtree(output / TEMPLATE_DIRECTORY, ignore_errors=True)  # a copy of the tokenizer's own
    write_text(output / TEMPLATE_FILE, template.source)
    if template.tool_use is not None:
        (output / TEMPLATE_DIRECTORY).mkdir()
        write_text(output / TEMPLATE_DIRECTORY / f"{TOOL_USE}.jinja", template.tool_use)
    config = read_json(output / TOKENIZER_CONFIG)
    config.pop("chat_template", None)
    for key, token in template.tokens.items():
        if special_token(output / TOKENIZER_FILE, key) != token:
            config[key] = token
    write_json(output / TOKENIZER_CONFIG, config)


def _write_vocabulary(source: TokenizerSource, output: Path) -> None:
    """Write the `tokenizer.json`: a copy of the file, or the tokenizer with the tokens that were added to it."""
    target = output / TOKENIZER_FILE
    if not source.has_added_tokens:
        _copy(source.vocab_file, target)
        return
    assert isinstance(source.tokenizer, HFTokenizer), source.type
    with os_errors(ConversionError, f"{target}: cannot be written"):
        write_text(target, source.tokenizer.to_json())


def _write_bert(tokenizer: HFTokenizer, output: Path, max_length: int) -> None:
    """Write BERT's tokenizer, which adds [CLS] and [SEP] in transformers."""
    write_text(output / TOKENIZER_FILE, tokenizer.paired().to_str(pretty=True))
    config = {
        "tokenizer_class": _FAST,
        "clean_up_tokenization_spaces": True,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "model_max_length": max_length,
        **BERT_SPECIALS,
    }
    write_json(output / TOKENIZER_CONFIG, config)


def _write_configuration(source: TokenizerSource, output: Path, max_length: int) -> None:
    """Write the configuration of a tokenizer without one: the end of a document is every special token."""
    assert isinstance(source.tokenizer, HFTokenizer), source.type
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), source.tokenizer.eod_token)
    config = {
        "tokenizer_class": _FAST if source.has_added_tokens else _CLASSES[source.type],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **special,
    }
    write_json(output / TOKENIZER_CONFIG, config)
    write_json(output / SPECIAL_TOKENS_MAP, special)


def _warn_of_other_ids(source: TokenizerSource, family: Family) -> None:
    """Warn if transformers 5 builds the family's own tokenizer, and that splits texts in another way."""
    if family.tokenizer_pattern is None:
        return
    assert isinstance(source.tokenizer, HFTokenizer), source.type
    pre_tokenizer = json.loads(source.tokenizer.to_json()).get("pre_tokenizer") or {}
    if {"Regex": family.tokenizer_pattern} in _patterns(pre_tokenizer):
        return
    _log.warning(
        "%s splits texts in another way than %s: AutoTokenizer of transformers 5 builds %s's tokenizer for "
        "model_type %s and gives other ids; load the export's with PreTrainedTokenizerFast.from_pretrained",
        source.vocab_file,
        family.title,
        family.title,
        family.model_type,
    )


def _patterns(pre_tokenizer: dict[str, Any]) -> list[Any]:
    """Return the patterns by which a `pre_tokenizer` of a `tokenizer.json` splits texts."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return [step.get("pattern") for step in steps]


def copy_companions(source: Path, output: Path) -> None:
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
        ConversionError: If a file cannot be copied.
    """
    copied = output / TOKENIZER_FILE
    if (source / TOKENIZER_FILE).is_file():
        _copy(source / TOKENIZER_FILE, copied)
        copy_companions(source, output)
        _add_named_tokens(source, copied)
        return copied
    if any((source / name).is_file() for name in _OTHER_VOCABULARIES):
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(str(source), local_files_only=True).save_pretrained(str(output))
        except (OSError, ValueError, ImportError) as error:
            _log.warning("%s: transformers cannot read the tokenizer: %s", source, error)
        if copied.is_file():
            return copied
    _log.warning("%s has no tokenizer: set tokenizer_type and vocab_file in the configuration", source)
    return None


def _add_named_tokens(source: Path, copied: Path) -> None:
    """Complete the copy of a `tokenizer.json` with tokens that only the files next to it name.

    Args:
        source: Directory of the files.
        copied: The copy, next to copies of the files.

    Raises:
        ConversionError: If they contradict each other.
    """
    backend = tokenizer_backend(copied)
    before = backend.to_str()
    complete = complete_tokenizer(source, backend)
    if complete.backend.to_str() != before:
        write_text(copied, complete.backend.to_str(pretty=True))
        shown = ", ".join(complete.added)
        _log.info(
            "%s: as in transformers, tokens of the files next to it are added to it: %s", source / TOKENIZER_FILE, shown
        )
    if complete.named:
        path = copied.with_name(TOKENIZER_CONFIG)
        write_json(path, (read_json(path) if path.is_file() else {}) | dict(complete.named))


def _copy(source: Path, target: Path) -> None:
    """Copy one file. Raises ConversionError."""
    with os_errors(ConversionError, f"{source}: cannot be copied to {target}"):
        shutil.copyfile(source, target)
