"""Blocks `gmlp` and `amlp` on paper (gMLP, arXiv:2105.08050), as gpt-neox's layers hold them."""

from __future__ import annotations

from neox.architecture.architecture import GATED_KINDS, Architecture
from neox.architecture.choices import NORMS
from neox.architecture.parameter import ParameterSpec, in_module


def gated_block_parameters(architecture: Architecture, kind: str) -> tuple[ParameterSpec, ...]:
    """List the parameters of a block: norm, wide projection in two halves, gate over positions, output projection."""
    assert kind in GATED_KINDS, kind
    hidden = architecture.hidden_size
    inner = 4 * hidden
    length = architecture.max_positions
    norm = NORMS[architecture.norm]
    return (
        *in_module("norm", norm.parameters(hidden)),
        ParameterSpec("input_linear.weight", (2 * inner, hidden), 0, sections=(inner, inner)),
        ParameterSpec("input_linear.bias", (2 * inner,), 0, init="zeros", sections=(inner, inner), trained=False),
        *in_module("sgu.norm", norm.parameters(inner)),
        ParameterSpec("sgu.proj.weight", (length, length), init="zeros"),
        ParameterSpec("sgu.proj.bias", (length,), init="ones"),
        *_attention_parameters(architecture, kind),
        ParameterSpec("output_linear.weight", (hidden, inner), 1, init="output_weight"),
        ParameterSpec("output_linear.bias", (hidden,), init="zeros", trained=False),
    )


def _attention_parameters(architecture: Architecture, kind: str) -> tuple[ParameterSpec, ...]:
    """Return the parameters of the small attention inside an `amlp` block's gate; none for `gmlp`."""
    if kind != "amlp":
        return ()
    inner = 4 * architecture.hidden_size
    width = architecture.gmlp_width
    return (
        ParameterSpec("sgu.attn.proj_qkv.weight", (3 * width, 2 * inner)),
        ParameterSpec("sgu.attn.proj_qkv.bias", (3 * width,), init="zeros"),
        ParameterSpec("sgu.attn.proj_ffn.weight", (inner, width)),
        ParameterSpec("sgu.attn.proj_ffn.bias", (inner,), init="zeros"),
    )


def gate_flops(architecture: Architecture, kind: str, sequence: int) -> int:
    """Return the operations of a block's gate for one token that its matrices do not show: 0 for other kinds.

    The matrix over positions multiplies the 4H channels of a sample. Other matrices multiply each token's vector, and
    are counted like that.
    """
    if kind not in GATED_KINDS:
        return 0
    total = 2 * 4 * architecture.hidden_size * sequence - 2 * architecture.max_positions**2
    if kind == "amlp":
        total += 4 * architecture.gmlp_width * sequence
    return total
