"""Bidirectional encoders (BERT, arXiv:1810.04805) on paper: what they add to blocks, token types and two heads."""

from __future__ import annotations

from neox.architecture.architecture import Architecture
from neox.architecture.choices import norm_parameters
from neox.architecture.parameter import ZEROS, ParameterSpec

SENTENCE_CLASSES = 2
"""Logits of the sentence head: the second sentence follows the first, or it does not."""


def token_type_parameters(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Return the table of token types in layer 0, if there is one."""
    if not architecture.token_types:
        return ()
    shape = (architecture.token_types, architecture.hidden_size)
    return (ParameterSpec("tokentype_embeddings.weight", shape),)


def masked_lm_head_parameters(architecture: Architecture, padded_vocab_size: int) -> tuple[ParameterSpec, ...]:
    """Return what the head holds next to the embedding's weight: a dense layer, its norm, a bias of the logits."""
    return (
        *_dense("dense", architecture.hidden_size, architecture.hidden_size),
        *norm_parameters(architecture, "layernorm"),
        ParameterSpec("final_linear.bias", (padded_vocab_size,), 0, init=ZEROS),
    )


def sentence_head_parameters(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Return the pooler, and the two rows that read it."""
    hidden = architecture.hidden_size
    return (*_dense("pooler.dense", hidden, hidden), *_dense("binary_head", SENTENCE_CLASSES, hidden))


def _dense(module: str, outputs: int, inputs: int) -> tuple[ParameterSpec, ...]:
    """Return a linear layer that every tensor rank holds whole."""
    weight = ParameterSpec(f"{module}.weight", (outputs, inputs))
    bias = ParameterSpec(f"{module}.bias", (outputs,), init=ZEROS)
    return weight, bias
