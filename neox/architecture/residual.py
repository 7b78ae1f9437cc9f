"""Residual connections by name: where a block has norms, and what it adds to what."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple


class NormSlots(NamedTuple):
    """Names of a block's norms before and after its two sublayers; None for no norm."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None

    @property
    def number(self) -> int:
        """Number of norms."""
        return sum(name is not None for name in self)


class Residual(NamedTuple):
    """How a block adds its two sublayers to the residual stream.

    Attributes:
        norms: The block's norms.
        rule: Key of `neox.model.RESIDUAL_RULES`: what is added to what.
    """

    norms: NormSlots
    rule: Literal["sequential", "parallel", "parallel_one_norm", "post_norm"]

    def unkept_product(self, mlp: str) -> str:
        """Return the name of the weight whose product ends a block with this kind of MLP (`BlockKind`)."""
        if mlp != "dense" or self.norms.after_mlp is not None:
            return ""  # the norm keeps its input, and a sum of experts the experts' outputs
        return "mlp.dense_4h_to_h.weight"


_NORMS_BEFORE = NormSlots(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
_NORMS_AFTER = NormSlots(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
_NORMS_AROUND = NormSlots(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
RESIDUALS: Mapping[str, Residual] = MappingProxyType(
    {
        "sequential": Residual(_NORMS_BEFORE, "sequential"),
        "parallel": Residual(_NORMS_BEFORE, "parallel"),
        "parallel_one_norm": Residual(NormSlots(before_attention="input_layernorm"), "parallel_one_norm"),
        "sublayer_output_norm": Residual(_NORMS_AFTER, "sequential"),
        "sandwich": Residual(_NORMS_AROUND, "sequential"),
        "post_norm": Residual(_NORMS_AFTER, "post_norm"),
    }
)
"""Residual connections by name:

- `sequential`: y = x + attention(norm(x)), then y + mlp(norm(y)).
- `parallel`: x + attention(norm(x)) + mlp(other_norm(x)).
- `parallel_one_norm`: x + attention(norm(x)) + mlp(norm(x)).
- `sublayer_output_norm`: y = x + norm(attention(x)), then y + norm(mlp(y)) (OLMo-2).
- `sandwich`: y = x + norm(attention(norm(x))), then y + norm(mlp(norm(y))) (Gemma 2).
- `post_norm`: y = norm(x + attention(x)), then norm(y + mlp(y)), and no final norm (BERT).
"""
