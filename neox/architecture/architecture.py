"""`Architecture`: what a network computes, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import nextafter
from typing import Any, NamedTuple, Self

_FINETUNE = {"finetune": True}
"""Marks fields that may differ from the checkpoint's when a model is fine-tuned."""


class Difference(NamedTuple):
    """One field in which a checkpoint's network differs from the one that loads it."""

    field: str
    saved: Any
    wanted: Any


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer. It holds no padding, dropout, precision or kernel choice.

    Attributes:
        num_layers: Transformer blocks.
        hidden_size: Width of the hidden states; a multiple of `num_attention_heads`.
        num_attention_heads: Attention heads of one block.
        mlp_width: Inner width of the MLP, after the activation.
        activation: Key of `ACTIVATIONS`.
        norm: Key of `NORMS`.
        norm_epsilon: The norms' epsilon.
        positions: Key of `POSITIONS`.
        rotary_ndims: Leading dimensions of each head that are rotated; 0 where positions are not rotary.
        rotary_base: Base of the rotary frequencies; 0 where positions are not rotary.
        max_positions: Longest sequence the network is meant for, in tokens. No parameter depends on it.
        attention: Key of `ATTENTION` for each block.
        parallel_residual: x + attention(ln1(x)) + mlp(ln2(x)), instead of attention first and the MLP on its result.
        tie_word_embeddings: The head multiplies by the embedding's weight.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    mlp_width: int
    activation: str
    norm: str
    norm_epsilon: float
    positions: str = field(metadata=_FINETUNE)
    rotary_ndims: int = field(metadata=_FINETUNE)
    rotary_base: float = field(metadata=_FINETUNE)
    max_positions: int = field(metadata={"stored": False})
    attention: tuple[str, ...] = field(metadata=_FINETUNE)
    parallel_residual: bool
    tie_word_embeddings: bool = field(metadata=_FINETUNE)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_fraction(self) -> float:
        """The fraction of each head that is rotated: int(head_dim * fraction) is `rotary_ndims`."""
        fraction = self.rotary_ndims / self.head_dim
        exact = int(self.head_dim * fraction) == self.rotary_ndims
        return fraction if exact else nextafter(fraction, 1.0)  # the quotient was rounded down

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return {**asdict(self), "attention": list(self.attention)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the architecture that `to_dict` described."""
        return cls(**{**values, "attention": tuple(values["attention"])})

    def differences(self, saved: Mapping[str, Any], *, finetune: bool | None = None) -> list[Difference]:
        """List the fields in which a checkpoint's network is another one.

        Args:
            saved: Field name -> value, as far as the checkpoint stores them; other fields are not compared.
            finetune: True for the fields that may differ under `finetune: true`, False for those that may not, None
                for both.

        Returns:
            One `Difference` per field, in the order of the fields.
        """
        return [
            Difference(f.name, saved[f.name], getattr(self, f.name))
            for f in fields(self)
            if f.name in saved
            and saved[f.name] != getattr(self, f.name)
            and f.metadata.get("stored", True)
            and finetune in (None, f.metadata.get("finetune", False))
        ]
