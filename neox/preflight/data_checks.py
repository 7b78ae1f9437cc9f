"""Checks by the launcher of a run's token files, and commands that make those that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from neox.config import NeoXConfig
from neox.config.sections.preferences import PATH_KEYS, REWARD_KEYS
from neox.errors import DataError
from neox.plan import missing_for_training, used_vocabulary
from neox.problems import Missing, Problem
from neox.storage import ids_file, is_remote

if TYPE_CHECKING:
    from neox.tokenizer import Tokenizer

# Bytes of an index that a dry run reads in a tenth of a second.
_LARGEST_INDEX = 1 << 26
# Last parts of the prefixes that `make quickstart` makes, and the command.
_QUICKSTART_DATA: Mapping[tuple[str, ...], str] = {
    ("data", "quickstart", "quickstart_text_document"): "make quickstart",
    ("data", "quickstart_bert", "quickstart_text_sentence"): "make quickstart MODEL=bert",
}


def data_prefixes(config: NeoXConfig) -> dict[str, str]:
    """Return the prefixes of a configuration's token files, each with the key that names it."""
    data = config.data
    prefixes = {data.data_path: "data_path"} if data.data_path else {}
    for blend in data.blends:
        prefixes.update(dict.fromkeys(blend.paths or (), f"{blend.split}_data_paths"))
        prefixes.update(dict.fromkeys(blend.labels or (), f"{blend.split}_label_data_paths"))
    for name, item in data.validation_sets.items():
        prefixes[item.path] = f"valid_data_paths.{name}"
        if item.labels is not None:
            prefixes[item.labels] = f"valid_data_paths.{name}.labels"
    for key in (*PATH_KEYS, *REWARD_KEYS):
        prefixes.update(dict.fromkeys(config.value(key) or (), key))
    return prefixes


def _labelled_data(config: NeoXConfig) -> dict[str, str]:
    """Return the prefixes of label files, each with the prefix of the data that they label."""
    labelled: dict[str, str] = {}
    for blend in config.data.blends:
        labelled |= dict(zip(blend.labels or (), blend.paths or (), strict=False))
    for item in config.data.validation_sets.values():
        if item.labels is not None:
            labelled[item.labels] = item.path
    return labelled


def data_problems(config: NeoXConfig, tokenizer: Tokenizer | None, *, dry_run: bool) -> list[Problem]:
    """Return the keys and token files that training misses, and files that are broken or of another tokenizer.

    Args:
        config: The configuration.
        tokenizer: Tokenizer of the run; None if it is not known.
        dry_run: Whether to leave out the check of large index files.
    """
    problems = [*missing_for_training(config), *Missing.of(missing_data(config))]
    prefixes = {prefix: key for prefix, key in data_prefixes(config).items() if not is_remote(prefix)}
    if tokenizer is None or not any(Path(f"{prefix}.idx").exists() for prefix in prefixes):
        return problems
    from neox.data.dataset_problems import dataset_problems  # numpy, which a dry run without data does not need

    found = dataset_problems(
        prefixes,
        _labelled_data(config),
        config.data,
        config.model.seq_length,
        tokenizer,
        used_vocabulary(config, tokenizer.vocab_size),
        largest_index=_LARGEST_INDEX if dry_run else None,
    )
    for key, problem in found:
        problems.append(config.problem_about(f"{key}: {problem}", key))
    if _is_masked(config) and not found:
        problems += _masking_problems(config, tokenizer, prefixes)
    if any(config.data.fim_rates):
        problems += _fim_problems(config, tokenizer)
    if not found:
        from neox.preflight.read_sets import read_set_problems  # numpy

        problems += read_set_problems(config, tokenizer)
    return problems


def _fim_problems(config: NeoXConfig, tokenizer: Tokenizer) -> list[Problem]:
    """Return why the tokenizer does not serve `fim_rate`."""
    from neox.data.samples.fill_in_middle import FillInMiddle

    try:
        FillInMiddle.of(config.data, max(config.data.fim_rates), tokenizer, config.training.seed)
    except DataError as error:
        return [config.problem("fim_rate", f"does not go with the tokenizer: {error}", "fim_tokens", "fim_split")]
    return []


def _is_masked(config: NeoXConfig) -> bool:
    return config.model.objective == "masked_lm"


def _masking_problems(config: NeoXConfig, tokenizer: Tokenizer, prefixes: Mapping[str, str]) -> list[Problem]:
    """Return what masked language modelling misses: special tokens of the vocabulary, and sentences of the data."""
    from neox.data.masked.masking import MaskingVocabulary
    from neox.data.token_files.indexed_dataset import IndexedDataset

    try:
        MaskingVocabulary.of(tokenizer)
    except DataError as error:
        rule = f"does not serve {config.describe_setting('objective')}: {error}"
        return [config.problem("vocab_file", rule, "objective")]
    if not config.model.bert_binary_head:
        return []
    problems = []
    for prefix, key in prefixes.items():
        if Path(f"{prefix}.idx").is_file() and not IndexedDataset(prefix).has_sentences:
            message = (
                f"{key}: the documents of {prefix} are not divided into sentences, of which `bert_binary_head` makes "
                "pairs: make the data with tools/preprocess_data.py --split-sentences"
            )
            problems.append(config.problem_about(message, key, "bert_binary_head"))
    return problems


def missing_data(config: NeoXConfig) -> list[Problem]:
    """Return a problem for each pair of files that training needs and that does not exist, with a command for it."""
    prefixes = data_prefixes(config)
    if not prefixes and config.preferences.is_paired:
        keys = ("pos_train_data_paths", "neg_train_data_paths")
        message = f"no pairs of answers are given: set {' and '.join(keys)}"
        return [Problem(keys, f"{message} (tools/preprocess_preferences.py writes them)")]
    if not prefixes:
        message = "no training data is given: set data_path to the prefix of a .bin/.idx pair"
        return [Problem(("data_path", "train_data_paths"), f"{message} (tools/preprocess_data.py writes them)")]
    problems = []
    for prefix, key in prefixes.items():
        if is_remote(prefix):  # of a dry run: nothing is copied
            continue
        files = (ids_file(prefix), Path(f"{prefix}.idx"))
        absent = [str(file) for file in files if not file.is_file()]
        if absent:
            do_not = "does not" if len(absent) == 1 else "do not"
            message = f"{key} is {prefix!r}, but {' and '.join(absent)} {do_not} exist; "
            if meant := _longer_prefix(prefix):
                message += f"did you mean {meant!r}?"
            else:
                message += "make them with " + ", then ".join(
                    f"`{command}`" for command in _commands(config, prefix, key)
                )
            problems.append(config.problem_about(message, key))
    return problems


def _longer_prefix(prefix: str) -> str | None:
    """Return the prefix of token files if a user gave only its beginning: tools append to --output-prefix."""
    for end in ("_text_document", "_messages_document", "_text_sentence"):
        if Path(f"{prefix}{end}.idx").is_file():
            return prefix + end
    return None


def _commands(config: NeoXConfig, prefix: str, key: str) -> list[str]:
    """Return the commands that make the token files with a prefix that a key names."""
    if key in (*PATH_KEYS, *REWARD_KEYS):
        return ["python tools/preprocess_preferences.py"]
    for end in ("_messages_document", "_messages_label_document"):
        if prefix.endswith(end):
            flags = f"--output-prefix {quote(prefix.removesuffix(end))}"
            if config.tokenizer.vocab_file:
                flags += f" --vocab-file {quote(config.tokenizer.vocab_file)}"
            return [f"python tools/preprocess_chat.py --input chats.jsonl {flags}"]
    if key.endswith(("label_data_paths", ".labels")):
        return ["python tools/preprocess_chat.py"]
    path = Path(prefix)
    if quickstart := _QUICKSTART_DATA.get(path.parts[-3:]):
        return [quickstart]
    commands = []
    text = "FILE.jsonl.zst"
    if path.name.startswith("pile"):  # gpt-neox's name for the Pile
        commands.append("python tools/prepare_data.py pile -d data --download-only")
        text = "data/pile"
    commands.append(f"python tools/preprocess_data.py --input {text} {_preprocess_flags(config, prefix)}")
    return commands


def _preprocess_flags(config: NeoXConfig, prefix: str) -> str:
    """Return the flags of `preprocess_data.py` that write the token files of a run."""
    keys = config.tokenizer
    output = prefix.removesuffix("_document").removesuffix("_sentence").removesuffix("_text")
    documents = "--split-sentences" if _is_masked(config) else "--append-eod"
    flags = f"--output-prefix {quote(output)} {documents} --tokenizer-type {keys.tokenizer_type}"
    if keys.vocab_file:
        flags += f" --vocab-file {quote(keys.vocab_file)}"
    if keys.merge_file:
        flags += f" --merge-file {quote(keys.merge_file)}"
    return flags
