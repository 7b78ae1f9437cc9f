"""Identity of a tokenizer, saved in checkpoints to detect that a model is used with another tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neox.errors import TokenizerError
from neox.tokenizer.base import Tokenizer
from neox.tokenizer.beside_weights import read_beside_weights, write_beside_weights
from neox.tokenizer.huggingface import HFTokenizer
from neox.tokenizer.tokenizer_types import build_tokenizer

if TYPE_CHECKING:
    from neox.config import NeoXConfig

TOKENIZER_IDENTITY = "tokenizer_identity.json"
"""Name of the file in a checkpoint."""
_SHOWN_DIGITS = 12


@dataclass(frozen=True)
class TokenizerIdentity:
    """Fields that identify a tokenizer.

    Attributes:
        tokenizer_type: NeoX's name of the type.
        content_hash: `Tokenizer.content_hash`.
        original_hash: Hash without added tokens; the same as `content_hash` if none were added to those of the file.
        vocab_size: Number of ids.
        added_tokens: Value of the key `added_tokens`.
        vocab_file: Path of the vocabulary, for messages; None for a tokenizer type without a file.
    """

    tokenizer_type: str
    content_hash: str
    original_hash: str
    vocab_size: int
    added_tokens: tuple[str, ...] = ()
    vocab_file: str | None = None

    def __str__(self) -> str:
        file = f" {self.vocab_file}" if self.vocab_file else ""
        return f"{self.tokenizer_type}{file} ({self.vocab_size:,} ids, hash {self.content_hash[:_SHOWN_DIGITS]})"

    def same_ids(self, other: TokenizerIdentity) -> bool:
        """Return whether common ids mean the same tokens: the tokenizers are equal, or one extends the other."""
        ours = {self.content_hash, self.original_hash}
        theirs = {other.content_hash, other.original_hash}
        if self.content_hash in theirs or other.content_hash in ours:
            return True
        shared = min(len(self.added_tokens), len(other.added_tokens))
        same_start = self.added_tokens[:shared] == other.added_tokens[:shared]
        return self.original_hash == other.original_hash and same_start

    def difference(self, checkpoint: Path, saved: TokenizerIdentity) -> str:
        """Return the message that a checkpoint was trained with another tokenizer, with the possible fixes."""
        return (
            f"{checkpoint} was trained with the tokenizer {saved}, but this one is {self}, whose ids stand for other "
            "tokens; set vocab_file and tokenizer_type to the checkpoint's, or `allow_other_tokenizer: true` if this "
            "is intended"
        )


def identify(
    tokenizer: Tokenizer, vocab_file: str | Path | None, added_tokens: Sequence[str] = ()
) -> TokenizerIdentity:
    """Return the identity of a tokenizer.

    Args:
        tokenizer: The tokenizer, with its added tokens.
        vocab_file: Path of its vocabulary.
        added_tokens: Value of the key `added_tokens`.
    """
    return TokenizerIdentity(
        tokenizer.name,
        tokenizer.content_hash,
        tokenizer.original_hash or tokenizer.content_hash,
        tokenizer.vocab_size,
        tuple(added_tokens),
        None if vocab_file is None else str(vocab_file),
    )


def identify_configured(config: NeoXConfig, tokenizer: Tokenizer) -> TokenizerIdentity:
    """Return the identity of a configuration's tokenizer."""
    return identify(tokenizer, config.tokenizer.vocab_file, config.tokenizer.added_tokens)


def is_larger(tokenizer: Tokenizer, saved: TokenizerIdentity) -> bool:
    """Return whether a tokenizer has all tokens of an earlier one with the same ids, and possibly more.

    The hashes are compared after removing the later tokens. If these cannot be removed, the tokens are compared one by
    one with the file of the earlier tokenizer. The result is False if that file has changed or is missing.

    Args:
        tokenizer: The tokenizer.
        saved: Identity of the earlier one.
    """
    if not isinstance(tokenizer, HFTokenizer) or tokenizer.vocab_size < saved.vocab_size:
        return False
    try:
        if tokenizer.with_vocabulary(saved.vocab_size).content_hash == saved.content_hash:
            return True
    except TokenizerError:
        pass  # later tokens are part of its own vocabulary
    try:
        earlier = build_tokenizer(saved.tokenizer_type, saved.vocab_file, added_tokens=saved.added_tokens)
    except TokenizerError:
        return False
    if not isinstance(earlier, HFTokenizer) or earlier.content_hash != saved.content_hash:
        return False
    for number in range(saved.vocab_size):
        if tokenizer.backend.id_to_token(number) != earlier.backend.id_to_token(number):
            return False
    return True


def write_tokenizer_identity(directory: Path, identity: TokenizerIdentity | None) -> None:
    """Write an identity, if there is one, to a checkpoint. Raises CheckpointError if it cannot be written."""
    write_beside_weights(directory / TOKENIZER_IDENTITY, identity)


def saved_tokenizer_identity(checkpoint: Path) -> TokenizerIdentity | None:
    """Return the identity saved in a checkpoint; None if it has none. Raises CheckpointError if it is damaged."""
    return read_beside_weights(checkpoint / TOKENIZER_IDENTITY, "the identity of a tokenizer", _from_json)


def _from_json(fields: Mapping[str, Any]) -> TokenizerIdentity:
    identity = TokenizerIdentity(**fields)
    return replace(identity, added_tokens=tuple(identity.added_tokens))


def other_tokenizer(config: NeoXConfig, tokenizer: Tokenizer, checkpoint: Path) -> str | None:
    """Return why a configuration's tokenizer does not match a checkpoint's; None if it does, or nothing is known.

    Raises:
        CheckpointError: If the checkpoint's identity is damaged.
    """
    if config.checkpoint.allow_other_tokenizer:
        return None
    saved = saved_tokenizer_identity(checkpoint)
    if saved is None:
        return None
    ours = identify_configured(config, tokenizer)
    if ours.same_ids(saved):
        return None
    return ours.difference(checkpoint, saved)
