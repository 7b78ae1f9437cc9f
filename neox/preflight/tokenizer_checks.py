"""Check of a run's tokenizer by the launcher, and the vocabulary that a dry run assumes without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from neox.checkpoint_files.finding import newest_checkpoint
from neox.config import NeoXConfig
from neox.errors import CheckpointError, TokenizerError
from neox.preflight.checkpoint_checks import key_of_checkpoint
from neox.problems import Missing, Problem

if TYPE_CHECKING:
    from neox.tokenizer import Tokenizer

# Number of ids that a dry run assumes without the tokenizer's files.
_ASSUMED_SIZES = {"GPT2BPETokenizer": 50257, "HFGPT2Tokenizer": 50257, "HFTokenizer": 50277}
_ASSUMED_OTHERWISE = 50257
# Last parts of the path of the tokenizer that `make quickstart` makes.
_QUICKSTART = ("data", "quickstart", "tokenizer.json")
# File name and address of GPT-NeoX-20B's tokenizer.
_FILE_OF_20B = "20B_tokenizer.json"
_URL_OF_20B = "https://huggingface.co/EleutherAI/gpt-neox-20b/resolve/main/tokenizer.json"


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a run, as far as it can be built.

    Attributes:
        size: Number of ids; an assumed one without a tokenizer.
        tokenizer: The tokenizer; None if it cannot be built.
        problems: Why it cannot be built.
    """

    size: int
    tokenizer: Tokenizer | None
    problems: tuple[Problem, ...] = ()


def read_vocabulary(config: NeoXConfig) -> Vocabulary:
    """Build the tokenizer of a configuration."""
    is_installed = True
    try:
        from neox.tokenizer import tokenizer_of  # numpy, without which a plan can be made

        tokenizer = tokenizer_of(config)
    except TokenizerError as error:
        message = f"{error}{_how_to_get_it(config)}"
    except ModuleNotFoundError as error:  # a plan only needs pydantic and PyYAML
        message = f"the tokenizer cannot be read: the package {error.name} is not installed (`make install`)"
        is_installed = False
    else:
        return Vocabulary(tokenizer.vocab_size, tokenizer)
    problem = config.problem_about(message, "vocab_file", "tokenizer_type")
    if is_installed and _has_files(config):
        return Vocabulary(_assumed_size(config), None, (problem,))
    return Vocabulary(_assumed_size(config), None, tuple(Missing.of([problem])))


def other_tokenizer_problems(config: NeoXConfig, tokenizer: Tokenizer | None, *, training: bool) -> list[Problem]:
    """Return a problem if the checkpoint to load was trained with another tokenizer."""
    key = key_of_checkpoint(config, training=training)
    directory = config.value(key)
    if tokenizer is None or directory is None:
        return []
    from neox.tokenizer import other_tokenizer

    chosen = newest_checkpoint(directory, config.checkpoint.iteration)
    if chosen is None:
        return []
    try:
        difference = other_tokenizer(config, tokenizer, chosen)
    except CheckpointError as error:
        return [config.problem_about(str(error), key)]
    return [] if difference is None else [config.problem_about(difference, key, "vocab_file")]


def prompt_problems(config: NeoXConfig, tokenizer: Tokenizer | None) -> list[Problem]:
    """Return the problem that the text of a soft prompt has no tokens."""
    settings = config.model.soft_prompt_tuning
    if tokenizer is None or settings is None or not settings.enabled or not settings.init_string:
        return []
    if tokenizer.encode(settings.init_string):
        return []
    rule = "has no tokens; give another text, or remove it"
    return [config.problem("soft_prompt_tuning.init_string", rule, "vocab_file")]


def _assumed_size(config: NeoXConfig) -> int:
    settings = config.tokenizer
    if settings.padded_vocab_size is not None:
        return settings.padded_vocab_size
    return _ASSUMED_SIZES.get(settings.tokenizer_type, _ASSUMED_OTHERWISE) + len(settings.added_tokens)


def _has_files(config: NeoXConfig) -> bool:
    """Return whether the files of the tokenizer are given and on this machine."""
    settings = config.tokenizer
    if settings.vocab_file is None:
        return False
    files = [Path(settings.vocab_file)]
    if settings.merge_file is not None:
        files.append(Path(settings.merge_file))
    return all(file.exists() for file in files)


def _how_to_get_it(config: NeoXConfig) -> str:
    """Return a hint, in brackets, at how to get the tokenizer that cannot be built; nothing if none is known."""
    settings = config.tokenizer
    if settings.vocab_file is None:
        return " (`python tools/train_tokenizer.py` makes one)"
    file = Path(settings.vocab_file)
    if not config.given("tokenizer_type") and file.name.endswith("tokenizer.json"):
        default = settings.tokenizer_type
        return f" (gpt-neox's default is {default}; `tokenizer_type: HFTokenizer` reads a tokenizer.json)"
    if file.exists():
        return ""
    if file.parts[-3:] == _QUICKSTART:
        return " (`make quickstart` makes it)"
    if file.name == _FILE_OF_20B:
        return f" (get it: `curl --create-dirs -o {quote(str(file))} {_URL_OF_20B}`)"
    return ""
