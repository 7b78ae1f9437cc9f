"""Chat template of a checkpoint: the one that made the conversations on which the model was trained."""

from __future__ import annotations

from pathlib import Path

from neox.tokenizer import Tokenizer
from neox.tokenizer.beside_weights import read_beside_weights, write_beside_weights
from neox.tokenizer.chat import CHAT_TEMPLATE, ChatTemplate, own_chat_template, read_chat_template


def write_chat_template(directory: Path, template: ChatTemplate | None) -> None:
    """Write a template, if there is one, into a checkpoint. Raises CheckpointError if the disk refuses."""
    write_beside_weights(directory / CHAT_TEMPLATE, template)


def saved_chat_template(checkpoint: Path) -> ChatTemplate | None:
    """Return the template that a checkpoint carries; None if it has none. Raises CheckpointError if it is damaged."""
    return read_beside_weights(checkpoint / CHAT_TEMPLATE, "a chat template", ChatTemplate.from_json)


def find_chat_template(
    given: str | Path | None, checkpoint: Path, vocab_file: str | Path | None, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """Return the template for conversations with a checkpoint.

    It is the given one, else the checkpoint's, else the one next to the tokenizer. The given file may be missing if the
    checkpoint carries a template, which then is that of its training.

    Args:
        given: Value of the key `chat_template`.
        checkpoint: `global_stepN` directory.
        vocab_file: The tokenizer's vocabulary.
        tokenizer: The tokenizer.

    Returns:
        The template; None if there is none.

    Raises:
        CheckpointError: If the checkpoint's is damaged.
        TokenizerError: If a file cannot be read.
    """
    saved = saved_chat_template(checkpoint)
    if given is not None and (saved is None or Path(given).is_file()):
        return read_chat_template(vocab_file or "", given, tokenizer)
    if saved is None and vocab_file is not None:
        return own_chat_template(vocab_file, tokenizer)
    return saved
