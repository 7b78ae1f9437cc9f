"""Blocks `gmlp` and `amlp` on paper (gMLP, arXiv:2105.08050), as gpt-neox's layers hold them."""

from __future__ import annotations

from dataclasses import replace

from neox.architecture.architecture import GATED_KINDS, Architecture
from neox.architecture.choices import NORMS
from neox.architecture.parameter import ParameterSpec


def gated_block_parameters(architecture: Architecture, kind: str) -> tuple[ParameterSpec, ...]:
    """List the parameters of a block: norm, wide projection in two halves, gate over positions, output projection."""
    assert kind in GATED_KINDS, kind
    h, inner, length = architecture.hidden_size, 4 * architecture.hidden_size, architecture.max_positions
    attention = (
        ParameterSpec("sgu.attn.proj_qkv.weight", (3 * architecture.gmlp_width, 2 * inner)),
        ParameterSpec("sgu.attn.proj_qkv.bias", (3 * architecture.gmlp_width,), init="zeros"),
        ParameterSpec("sgu.attn.proj_ffn.weight", (inner, architecture.gmlp_width)),
        ParameterSpec("sgu.attn.proj_ffn.bias", (inner,), init="zeros"),
    )
    return (
        *_norm(architecture, "norm", h),
        ParameterSpec("input_linear.weight", (2 * inner, h), 0, sections=(inner, inner)),
        ParameterSpec("input_linear.bias", (2 * inner,), 0, init="zeros", sections=(inner, inner), trained=False),
        *_norm(architecture, "sgu.norm", inner),
        ParameterSpec("sgu.proj.weight", (length, length), init="zeros"),
        ParameterSpec("sgu.proj.bias", (length,), init="ones"),
        *(attention if kind == "amlp" else ()),
        ParameterSpec("output_linear.weight", (h, inner), 1, init="output_weight"),
        ParameterSpec("output_linear.bias", (h,), init="zeros", trained=False),
    )


def _norm(architecture: Architecture, module: str, size: int) -> tuple[ParameterSpec, ...]:
    return tuple(replace(p, name=f"{module}.{p.name}") for p in NORMS[architecture.norm].parameters(size))


def gate_flops(architecture: Architecture, kind: str, sequence: int) -> int:
    """Return the operations of a block's gate for one token that its matrices do not show: 0 for other kinds.

    The matrix over positions multiplies the 4H channels of a sample, not each token's vector, as which other matrices
    are counted.
    """
    if kind not in GATED_KINDS:
        return 0
    attended = 4 * architecture.gmlp_width * sequence if kind == "amlp" else 0
    return 2 * 4 * architecture.hidden_size * sequence - 2 * architecture.max_positions**2 + attended
