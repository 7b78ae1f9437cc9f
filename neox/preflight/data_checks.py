"""Checks of a run's token files by the launcher before ranks start, and of its length in passes over them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from neox.config import NeoXConfig
from neox.config.sections.data import SPLITS
from neox.errors import DataError
from neox.plan import missing_for_training
from neox.plan.batch import solve_batch
from neox.plan.batch_schedule import BatchSchedule, ramp_problems
from neox.plan.topology import solve_grid
from neox.problems import Problem

if TYPE_CHECKING:
    from neox.tokenizer import Tokenizer

# What `make quickstart` makes, and its model.
_QUICKSTART_DATA: dict[tuple[str, ...], str] = {
    ("data", "quickstart", "quickstart_text_document"): "make quickstart",
    ("data", "quickstart_bert", "quickstart_text_sentence"): "make quickstart MODEL=bert",
}


def data_prefixes(config: NeoXConfig) -> dict[str, str]:
    """Return the token files of a configuration, as prefix -> the key that names it."""
    data = config.data
    prefixes = {data.data_path: "data_path"} if data.data_path else {}
    for split in SPLITS:
        for key in (f"{split}_data_paths", f"{split}_label_data_paths"):
            prefixes.update(dict.fromkeys(getattr(data, key) or (), key))
    return prefixes


def _labelled_data(config: NeoXConfig) -> dict[str, str]:
    """Return the token files that have labels, as prefix of the labels -> prefix of the data."""
    pairs = (zip(blend.labels or (), blend.paths or (), strict=False) for blend in config.data.blends)
    return dict(chain.from_iterable(pairs))


def data_problems(config: NeoXConfig, tokenizer: Tokenizer | None, *, dry_run: bool) -> list[Problem]:
    """Return the keys and token files that training misses, and files that are broken or of another tokenizer.

    Args:
        config: The configuration.
        tokenizer: The run's tokenizer; None where it is not known.
        dry_run: Whether to leave out the check of whole index files.
    """
    problems = [*missing_for_training(config), *missing_data(config)]
    prefixes = data_prefixes(config)
    if tokenizer is not None and any(Path(prefix + ".idx").exists() for prefix in prefixes):
        from neox.data import sidecar  # numpy, which a dry run without data does not need

        labelled, length = _labelled_data(config), config.model.seq_length
        found = sidecar.data_problems(prefixes, labelled, config.data, length, tokenizer, open_files=not dry_run)
        problems += [config.problem_about(f"{key}: {problem}", key) for key, problem in found]
        if _is_masked(config) and not found:
            problems += _masking_problems(config, tokenizer, prefixes)
    return problems


def _is_masked(config: NeoXConfig) -> bool:
    return config.model.objective == "masked_lm"


def _masking_problems(config: NeoXConfig, tokenizer: Tokenizer, prefixes: Mapping[str, str]) -> list[Problem]:
    """Return what masked language modelling misses: special tokens of the vocabulary, and sentences of the data."""
    from neox.data.indexed_dataset import IndexedDataset
    from neox.data.masking import MaskingVocabulary

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


def with_train_iters(config: NeoXConfig, world_size: int) -> tuple[NeoXConfig, list[str], list[Problem]]:
    """Return a configuration with the `train_iters` that its `num_train_epochs` means for its data.

    Args:
        config: The configuration.
        world_size: Number of ranks, of which the samples of one step follow.

    Returns:
        The configuration (the same where it has no `num_train_epochs`, or where batch and lengths break rules, which
        `resolve` reports), a note with the numbers, and why they cannot be told; at most one of both.
    """
    key, epochs, length = "num_train_epochs", config.training.num_train_epochs, config.model.seq_length
    grid = solve_grid(config, world_size, [])
    batch = solve_batch(config, grid.dp_size, []) if grid else None
    if epochs is None or length is None or batch is None or config.training.train_iters is not None:
        return config, [], []
    if any(ramp_problems(config, batch)):
        return config, [], []
    try:
        from neox.data.epochs import samples_of_epochs  # numpy, which a dry run without data does not need

        samples = samples_of_epochs(config.data, length, epochs)
    except (DataError, ModuleNotFoundError) as error:
        return config, [], [config.problem(key, f"is counted in the training data, which cannot be read: {error}")]
    steps = max(1, BatchSchedule.of(config, batch).steps(samples))
    note = (
        f"{config.describe_setting(key)} is train_iters {steps:,}: {samples:,} samples of {length:,} tokens, "
        f"{batch.train_batch_size:,} a step"
    )
    return config.updated({"train_iters": steps}, without=(key,), source=config.source(key).derived(key)), [note], []


def epoch_samples(config: NeoXConfig) -> int:
    """Return the samples of one pass over the training data, if the log counts passes; else 0.

    Data that cannot be read has 0 samples here; `data_problems` says why it cannot.
    """
    if config.logging.log_style != "fleetx":
        return 0
    try:
        from neox.data.epochs import samples_of_epochs  # numpy, which a dry run without data does not need

        return samples_of_epochs(config.data, config.model.seq_length or 0, 1)
    except (DataError, ModuleNotFoundError):
        return 0


def with_loss_normalization(config: NeoXConfig) -> tuple[NeoXConfig, list[str]]:
    """Decide `loss_normalization: auto` if the labels of the training data are those of conversations.

    Returns:
        The configuration, and a note if this changed it.
    """
    key = "loss_normalization"
    labels = config.data.train_label_data_paths or ()
    if config.data.loss_normalization != "auto" or not any(_are_of_conversations(prefix) for prefix in labels):
        return config, []
    source = config.source(key).derived(key)
    return config.updated({key: "tokens"}, source=source), [f"`{key}: auto` is tokens: the labels are of conversations"]


def _are_of_conversations(prefix: str) -> bool:
    """Return whether `preprocess_chat.py` wrote a dataset; False if its sidecar is missing or damaged."""
    try:
        from neox.data import sidecar  # numpy, which a dry run without data does not need

        found = sidecar.read_sidecar(prefix)
    except (DataError, ModuleNotFoundError):
        return False
    return found is not None and "chat" in found.settings


def missing_data(config: NeoXConfig) -> list[Problem]:
    """Return a sentence for each `.bin/.idx` that training needs and that does not exist, with a command for it."""
    prefixes = data_prefixes(config)
    if not prefixes:
        message = "no training data is given: set data_path to the prefix of a .bin/.idx pair"
        return [Problem(("data_path", "train_data_paths"), f"{message} (tools/preprocess_data.py writes them)")]
    problems = []
    for prefix, key in prefixes.items():
        absent = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
        if absent:
            files = " and ".join(prefix + suffix for suffix in absent)
            verb = "does" if len(absent) == 1 else "do"
            quickstart = _QUICKSTART_DATA.get(Path(prefix).parts[-3:])
            commands = [quickstart] if quickstart else _commands(config, prefix)
            if "label" in key:
                commands = ["python tools/preprocess_chat.py"]
            make = ", then ".join(f"`{command}`" for command in commands)
            message = f"{key} is {prefix!r}, but {files} {verb} not exist; make them with {make}"
            problems.append(config.problem_about(message, key))
    return problems


def _commands(config: NeoXConfig, prefix: str) -> list[str]:
    """Return the commands that make token files from text: of the Pile where the prefix is gpt-neox's for it."""
    keys = config.tokenizer
    of_pile = Path(prefix).name.startswith("pile")
    text = "data/pile" if of_pile else "FILE.jsonl.zst"
    whole = prefix.removesuffix("_document").removesuffix("_sentence").removesuffix("_text")
    flags = f"--output-prefix {quote(whole)} {'--split-sentences' if _is_masked(config) else '--append-eod'}"
    flags += f" --tokenizer-type {keys.tokenizer_type}"
    for flag, value in (("--vocab-file", keys.vocab_file), ("--merge-file", keys.merge_file)):
        flags += f" {flag} {quote(value)}" if value else ""
    get = ["python tools/prepare_data.py pile -d data --download-only"] if of_pile else []
    return [*get, f"python tools/preprocess_data.py --input {text} {flags}"]
