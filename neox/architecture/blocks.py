"""Kinds of blocks on paper: one row says everything about a kind.

A row answers what the modules, the rules, the planner, generation and the tests ask about a block, so none of them asks
for its name. Its key is a value of `attention_config`; the module of the same key is in `neox.model.BLOCKS`.

    row              read by
    ---------------  ------------------------------------------------------------------------------
    parameters       layer plan: modules, checkpoints, tensor ranks, memory of states, export
    attention        kernels, recomputed parts, dropout, positions in scores
    two_sublayers    MLP or experts, norms and sums of the residual rule, tiles
    keeps, kept      generation: a cache of keys, a state, or the whole sequence at each step; its memory
    mixing_flops     FLOPs
    activations      memory of the backward pass
    context_ranks    context parallelism
    other fields     rules
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from neox.architecture.architecture import Architecture
from neox.architecture.attention import (
    LATENT_ATTENTION,
    SELF_ATTENTION,
    SPARSE_ATTENTION,
    WINDOWED_ATTENTION,
    Attention,
)
from neox.architecture.block_kind import BlockKind
from neox.architecture.choices import MLPS, POSITIONS, norm_parameters
from neox.architecture.gated_delta import GATED_DELTA
from neox.architecture.gmlp import AMLP, GMLP
from neox.architecture.mamba import MAMBA
from neox.architecture.mamba2 import MAMBA2
from neox.architecture.parameter import ParameterSpec
from neox.architecture.recurrence import recurrent_block
from neox.architecture.residual import RESIDUALS
from neox.architecture.rwkv import RWKV
from neox.architecture.sparsity import SPARSITY


def _transformer(
    attention: Attention, *, context_ranks: str = "", bidirectional: bool = False, refused: tuple[str, ...] = ()
) -> BlockKind:
    """Return the row of a block of attention and an MLP."""

    def parameters(architecture: Architecture, mlp: str) -> tuple[ParameterSpec, ...]:
        norms = RESIDUALS[architecture.residual].norms

        def norm(module: str | None) -> tuple[ParameterSpec, ...]:
            return () if module is None else norm_parameters(architecture, module)

        return (
            *norm(norms.before_attention),
            *attention.parameters(architecture),
            *POSITIONS[architecture.positions].shared(architecture),
            *norm(norms.after_attention),
            *norm(norms.before_mlp),
            *MLPS[mlp].parameters(architecture),
            *norm(norms.after_mlp),
        )

    return BlockKind(
        parameters=parameters,
        attention=attention,
        two_sublayers=True,
        keeps="keys",
        kept=attention.cached,
        mixing_flops=attention.score_flops,
        unkept_product=lambda architecture, mlp: RESIDUALS[architecture.residual].unkept_product(mlp),
        context_ranks=context_ranks,
        bidirectional=bidirectional,
        refused=refused,
    )


BLOCKS: Mapping[str, BlockKind] = MappingProxyType(
    {
        "global": _transformer(SELF_ATTENTION, bidirectional=True),
        **dict.fromkeys(SPARSITY, _transformer(SPARSE_ATTENTION)),
        "latent": _transformer(
            LATENT_ATTENTION,
            refused=("qk_norm", "use_qk_layernorm", "no_rotary_layers", "attention_output_gate"),
        ),
        "sliding_window": _transformer(WINDOWED_ATTENTION),
        "gmlp": GMLP,
        "amlp": AMLP,
        "mamba": recurrent_block(MAMBA, "nothing"),
        "gated_delta": recurrent_block(GATED_DELTA, "mlp"),
        "mamba2": recurrent_block(MAMBA2, "nothing"),
        "mamba2_mlp": recurrent_block(MAMBA2, "mlp"),
        "rwkv": RWKV,
    }
)
"""Kind of block (`Architecture.attention`) -> its row."""


def block_kinds(architecture: Architecture) -> tuple[BlockKind, ...]:
    """Return the rows of the kinds of blocks that a network has, each once."""
    return tuple(BLOCKS[kind] for kind in dict.fromkeys(architecture.attention))


def generates_by_steps(architecture: Architecture) -> bool:
    """Return whether a step of generation computes only new tokens, as blocks keep what they need of earlier ones."""
    if architecture.bidirectional:
        return False
    return all(kind.keeps != "nothing" for kind in block_kinds(architecture))
