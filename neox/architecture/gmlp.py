"""Blocks `gmlp` and `amlp` on paper (gMLP, arXiv:2105.08050), as gpt-neox's layers hold them."""

from __future__ import annotations

from neox.architecture.architecture import Architecture
from neox.architecture.block_kind import BlockKind, MicroBatch
from neox.architecture.choices import NORMS
from neox.architecture.parameter import ONES, ZEROS, FromKey, ParameterSpec, in_module


def _gated_block_parameters(architecture: Architecture, *, has_attention: bool) -> tuple[ParameterSpec, ...]:
    """List the parameters of a block: norm, wide projection in two halves, gate over positions, output projection."""
    hidden = architecture.hidden_size
    inner = 4 * hidden
    length = architecture.max_positions
    norm = NORMS[architecture.norm]
    attention: tuple[ParameterSpec, ...] = ()
    if has_attention:
        width = architecture.gmlp_width
        attention = (
            ParameterSpec("sgu.attn.proj_qkv.weight", (3 * width, 2 * inner)),
            ParameterSpec("sgu.attn.proj_qkv.bias", (3 * width,), init=ZEROS),
            ParameterSpec("sgu.attn.proj_ffn.weight", (inner, width)),
            ParameterSpec("sgu.attn.proj_ffn.bias", (inner,), init=ZEROS),
        )
    return (
        *in_module("norm", norm.parameters(hidden)),
        ParameterSpec("input_linear.weight", (2 * inner, hidden), 0, sections=(inner, inner)),
        ParameterSpec("input_linear.bias", (2 * inner,), 0, init=ZEROS, sections=(inner, inner), trained=False),
        *in_module("sgu.norm", norm.parameters(inner)),
        ParameterSpec("sgu.proj.weight", (length, length), init=ZEROS),
        ParameterSpec("sgu.proj.bias", (length,), init=ONES),
        *attention,
        ParameterSpec("output_linear.weight", (hidden, inner), 1, init=FromKey.OUTPUT_METHOD),
        ParameterSpec("output_linear.bias", (hidden,), init=ZEROS, trained=False),
    )


def _gate_flops(architecture: Architecture, sequence: int, *, has_attention: bool) -> int:
    """Return the operations of a block's gate for one token that its matrices do not show.

    The matrix over positions multiplies the 4H channels of a sample. Other matrices multiply each token's vector, and
    are counted like that.
    """
    total = 2 * 4 * architecture.hidden_size * sequence - 2 * architecture.max_positions**2
    if has_attention:
        total += 4 * architecture.gmlp_width * sequence
    return total


def _gate_activations(architecture: Architecture, batch: MicroBatch, *, has_attention: bool) -> int:
    """Return the bytes that a block's backward pass needs for one micro batch.

    Every tensor rank holds these whole, each 4H wide: the gate joined over ranks, normalised and applied; with
    attention three more for its values and result. Tensor ranks divide the wide product and its activation (8H each),
    of which one rank's gate is a half, and the gated half (4H). The matrix over positions is held once.
    """
    hidden = architecture.hidden_size
    inner = 4 * hidden
    inputs = 2 * hidden // batch.token_shares  # of the block, and the norm's output
    gate_tensors = 2 + 3 * has_attention + (batch.tp_size > 1)
    whole = inputs + gate_tensors * inner
    divided = (2 + 2 + 1) * inner // batch.tp_size
    norms = (hidden // batch.token_shares + inner) * batch.norm_bytes
    return (
        batch.tokens * ((whole + divided) * batch.bytes_per_number + norms) + batch.sequence**2 * batch.bytes_per_number
    )


def _kind(*, has_attention: bool) -> BlockKind:
    """Return the row of a block that gates over positions, with or without a small attention inside."""
    return BlockKind(
        parameters=lambda architecture, _: _gated_block_parameters(architecture, has_attention=has_attention),
        keeps="nothing",
        mixing_flops=lambda architecture, sequence: _gate_flops(architecture, sequence, has_attention=has_attention),
        unkept_product=lambda architecture, mlp: "output_linear.weight",
        activations=lambda architecture, batch: _gate_activations(architecture, batch, has_attention=has_attention),
        context_ranks="which mix all tokens of a sample",
        has_fixed_length=True,
        gated_activations=False,
        refused=("use_mup", "residual_multiplier", "soft_prompt_tuning"),
    )


GMLP = _kind(has_attention=False)
AMLP = _kind(has_attention=True)
