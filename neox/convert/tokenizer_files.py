"""The tokenizer in the form `transformers.AutoTokenizer` reads."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from neox.config import NeoXConfig
from neox.errors import ConversionError
from neox.log import get_logger
from neox.tokenizer import END_OF_DOCUMENT, Tokenizer, build_tokenizer

_log = get_logger(__name__)
_CLASSES = {
    "HFTokenizer": "PreTrainedTokenizerFast",
    "HFGPT2Tokenizer": "GPT2TokenizerFast",
    "GPT2BPETokenizer": "GPT2TokenizerFast",
}


@dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer that was found, and the files it came from."""

    tokenizer: Tokenizer
    type: str
    vocab_file: Path
    merge_file: Path | None


def find_tokenizer(config: NeoXConfig, override: Path | None = None) -> TokenizerSource | None:
    """Build the config's tokenizer; None, with a warning, when its file is not there (the export goes on without).

    override: a vocabulary file instead of the config's; a `tokenizer.json` where the config gives no type. Raises
    ConversionError if it is missing.
    """
    kind = config.tokenizer.tokenizer_type
    if override is not None and not config.given("tokenizer_type"):
        kind = "HFTokenizer"
    if override is not None and not override.exists():
        raise ConversionError(f"tokenizer file {override} does not exist")
    given = override or (Path(config.tokenizer.vocab_file) if config.tokenizer.vocab_file else None)
    if given is None or not given.exists():
        what = f"vocab_file {given} does not exist" if given else "the config names no vocab_file"
        _log.warning("%s: the export gets no tokenizer and no end-of-document id; give the file with --tokenizer", what)
        return None
    merges = Path(config.tokenizer.merge_file) if config.tokenizer.merge_file else None
    return TokenizerSource(build_tokenizer(kind, given, merges), kind, given, merges)


def write_tokenizer(source: TokenizerSource, output: Path, *, max_length: int) -> None:
    """Write the tokenizer files of a Hugging Face directory; says aloud when the type has no such form."""
    if source.type not in _CLASSES:
        _log.warning("%s has no Hugging Face form here: the export has no tokenizer files", source.type)
        return
    if source.type == "HFTokenizer":
        shutil.copyfile(source.vocab_file, output / "tokenizer.json")
    else:
        assert source.merge_file is not None, "GPT-2's tokenizer is a vocabulary and merges"
        shutil.copyfile(source.vocab_file, output / "vocab.json")
        shutil.copyfile(source.merge_file, output / "merges.txt")
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_DOCUMENT)
    config = {
        "tokenizer_class": _CLASSES[source.type],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **special,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (output / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")
