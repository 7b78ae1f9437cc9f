"""Files of a Hugging Face directory around its weights: tokenizer, model card; its atomic creation and its upload."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox.config import NeoXConfig
from neox.convert.hf_weights import Export, read_json, write_json
from neox.convert.verification import Verification
from neox.errors import ConfigError, ConversionError, os_errors
from neox.families import Family
from neox.files import atomic_directory, write_text
from neox.log import get_logger
from neox.tokenizer import (
    BERT_SPECIALS,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    HFTokenizer,
    Tokenizer,
    build_tokenizer,
    special_token,
)

_log = get_logger(__name__)
_TOKENIZER_CLASSES = {
    "HFTokenizer": "PreTrainedTokenizerFast",
    "HFGPT2Tokenizer": "GPT2TokenizerFast",
    "GPT2BPETokenizer": "GPT2TokenizerFast",
}
_COMPANIONS = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Files beside a `tokenizer.json` that travel with it: special tokens and the chat template."""
_CARD_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rotary_pct",
    "use_parallel_residual",
    "tie_word_embeddings",
    "hidden_act",
)


@contextmanager
def new_directory(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory that becomes `output` when the block has ended without an exception.

    Raises:
        ConfigError: If `output` is not empty (unless `overwrite`).
        ConversionError: If it cannot be created.
    """
    if output.exists() and not overwrite and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists and is not empty; choose another directory, or pass --overwrite")
    of_the_block: OSError | None = None
    try:
        with atomic_directory(output) as partial:
            try:
                yield partial
            except OSError as error:
                of_the_block = error
                raise
    except OSError as error:
        if error is of_the_block:
            raise
        raise ConversionError(f"{output}: cannot be written: {error.strerror or error} ({error.filename})") from error


@dataclass(frozen=True)
class TokenizerSource:
    """Tokenizer, its `tokenizer_type` and the files it was built from."""

    tokenizer: Tokenizer
    type: str
    vocab_file: Path
    merge_file: Path | None

    @property
    def bos(self) -> int | None:
        """Id that begins a text: of the `bos_token` that the tokenizer's files name, else the end-of-document id."""
        if not self.has_configuration or not isinstance(self.tokenizer, HFTokenizer):
            return self.tokenizer.eod
        token = special_token(self.vocab_file, "bos_token")
        return None if token is None else self.tokenizer.backend.token_to_id(token)

    @property
    def has_configuration(self) -> bool:
        """Whether Hugging Face's `tokenizer_config.json` lies beside a `tokenizer.json`."""
        path = self.vocab_file
        return self.type == "HFTokenizer" and path.name == TOKENIZER_FILE and path.with_name(TOKENIZER_CONFIG).is_file()


def find_tokenizer(config: NeoXConfig, override: Path | None = None) -> TokenizerSource | None:
    """Build the configuration's tokenizer.

    Args:
        config: Configuration with the tokenizer's keys.
        override: Vocabulary file instead of the configuration's; a `tokenizer.json` where that gives no type.

    Returns:
        None, with a warning, if the vocabulary file does not exist: the export continues without a tokenizer.

    Raises:
        ConfigError: If `override` does not exist.
    """
    kind = config.tokenizer.tokenizer_type
    if override is not None and not config.given("tokenizer_type"):
        kind = "HFTokenizer"
    if override is not None and not override.exists():
        raise ConfigError(f"--tokenizer: {override} does not exist")
    given = override or (Path(config.tokenizer.vocab_file) if config.tokenizer.vocab_file else None)
    if given is None or not given.exists():
        reason = f"vocab_file {given} does not exist" if given else "the configuration has no vocab_file"
        _log.warning(
            "%s: the export has no tokenizer and no end-of-document id; give the file with --tokenizer", reason
        )
        return None
    merges = Path(config.tokenizer.merge_file) if config.tokenizer.merge_file else None
    return TokenizerSource(build_tokenizer(kind, given, merges), kind, given, merges)


def write_tokenizer(source: TokenizerSource, output: Path, family: Family, *, max_length: int) -> None:
    """Write the tokenizer's files as `transformers.AutoTokenizer` reads them; warn if its type has no such form.

    A warning also says where `AutoTokenizer` of transformers 5 would give other ids.

    Raises:
        ConversionError: If a file cannot be read or written.
    """
    if isinstance(source.tokenizer, HFTokenizer) and source.tokenizer.is_bert and not source.has_configuration:
        write_text(output / TOKENIZER_FILE, source.tokenizer.paired().to_str(pretty=True))
        write_json(
            output / TOKENIZER_CONFIG,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": True,
                "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
                "model_max_length": max_length,
                **BERT_SPECIALS,
            },
        )
        return
    if source.type not in _TOKENIZER_CLASSES:
        _log.warning("%s has no Hugging Face form: the export has no tokenizer files", source.type)
        return
    if source.type == "HFTokenizer":
        _copy(source.vocab_file, output / TOKENIZER_FILE)
        wanted = family.tokenizer_pattern
        if wanted and {"Regex": wanted} not in _patterns(read_json(output / TOKENIZER_FILE).get("pre_tokenizer")):
            _log.warning(
                "%s splits texts in another way than %s: AutoTokenizer of transformers 5 builds %s's tokenizer for "
                "model_type %s and gives other ids; load the export's with PreTrainedTokenizerFast.from_pretrained",
                source.vocab_file,
                family.title,
                family.title,
                family.model_type,
            )
    else:
        assert source.merge_file is not None, "GPT-2's tokenizer has a vocabulary and merges"
        _copy(source.vocab_file, output / "vocab.json")
        _copy(source.merge_file, output / "merges.txt")
    if source.has_configuration:
        copy_companions(source.vocab_file.parent, output)
        # transformers 5 builds the tokenizer of a class of its own anew, which may give other ids than the file
        config = read_json(output / TOKENIZER_CONFIG) | {"tokenizer_class": _TOKENIZER_CLASSES[source.type]}
        write_json(output / TOKENIZER_CONFIG, config)
        return
    assert isinstance(source.tokenizer, HFTokenizer), source.type
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), source.tokenizer.eod_token)
    config = {
        "tokenizer_class": _TOKENIZER_CLASSES[source.type],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **special,
    }
    write_json(output / TOKENIZER_CONFIG, config)
    write_json(output / "special_tokens_map.json", special)


def _patterns(pre_tokenizer: dict[str, Any] | None) -> list[Any]:
    """Return the patterns that a `tokenizer.json` splits texts by."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    return [step.get("pattern") for step in steps]


def copy_companions(source: Path, output: Path) -> None:
    """Copy the files that belong to a `tokenizer.json`. Raises ConversionError if one cannot be copied."""
    for name in _COMPANIONS:
        if (source / name).is_file():
            _copy(source / name, output / name)


def import_tokenizer(source: Path, output: Path) -> Path | None:
    """Copy the tokenizer of a Hugging Face directory; `transformers` writes a `tokenizer.json` where there is none.

    Args:
        source: Directory of the model.
        output: Directory to copy to.

    Returns:
        The `tokenizer.json`; None, with a warning, if there is no tokenizer.

    Raises:
        ConversionError: If a file cannot be copied.
    """
    if (source / TOKENIZER_FILE).is_file():
        _copy(source / TOKENIZER_FILE, output / TOKENIZER_FILE)
        copy_companions(source, output)
        return output / TOKENIZER_FILE
    if any((source / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(str(source), local_files_only=True).save_pretrained(str(output))
        except (OSError, ValueError, ImportError) as error:
            _log.warning("%s: transformers cannot read the tokenizer: %s", source, error)
    if (output / TOKENIZER_FILE).is_file():
        return output / TOKENIZER_FILE
    _log.warning("%s has no tokenizer: set tokenizer_type and vocab_file in the configuration", source)
    return None


def _copy(source: Path, target: Path) -> None:
    with os_errors(ConversionError, f"{source}: cannot be copied to {target}"):
        shutil.copyfile(source, target)


def model_card(
    *,
    name: str,
    family: Family,
    hf: Mapping[str, Any],
    export: Export,
    iteration: int | None,
    parameters: int,
    check: Verification | None,
) -> str:
    """Return the model card (`README.md`): architecture, origin and check of the weights, how to load them.

    Args:
        name: Name of the directory.
        family: Architecture of the export.
        hf: Contents of `config.json`.
        export: Weights that were written.
        iteration: Training step of the checkpoint, if known.
        parameters: Number of parameters.
        check: Result of the verification, if there was one.
    """
    rows = "\n".join(f"| {key} | {hf[key]} |" for key in _CARD_KEYS if key in hf)
    trained = "" if iteration is None else f" after {iteration:,} training steps"
    checked = (
        f"On export, this directory's logits in `transformers` were compared with the training code's: {check}."
        if check is not None
        else "The logits were not compared with the training code's on export."
    )
    return f"""---
library_name: transformers
pipeline_tag: {"fill-mask" if family.is_encoder else "text-generation"}
tags:
- {family.model_type}
---

# {name}

A {family.title} language model of {parameters:,} parameters{trained}, exported by `neox` from its training checkpoint:
{export.tensors} tensors, {export.total_bytes:,} bytes, {str(export.dtype).removeprefix("torch.")}.

| | |
|---|---|
{rows}

{checked}

```python
from transformers import {family.auto_class}, AutoTokenizer

model = {family.auto_class}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""


def upload(directory: Path, repository: str) -> str:
    """Upload a directory to the Hugging Face hub.

    Needs the package huggingface_hub and a login (`hf auth login`, or HF_TOKEN).

    Args:
        directory: Directory to upload.
        repository: `USER/NAME`; created, private, if it does not exist.

    Returns:
        The repository's address.

    Raises:
        ConversionError: If it fails.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(repository, exist_ok=True, private=True)
        api.upload_folder(folder_path=str(directory), repo_id=repository)
    except Exception as error:  # connection errors are those of the HTTP library that the hub's client uses
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConversionError(
            f"{directory} was exported, but uploading it to {repository} failed: {reason}; "
            f"log in with `hf auth login` and repeat with `hf upload {repository} {directory}`"
        ) from error
    return str(address)
