"""The form of a row in the table of kinds of blocks: what a kind has, how it divides, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from neox.architecture.architecture import Architecture
from neox.architecture.attention import Attention
from neox.architecture.parameter import ParameterSpec


class MicroBatch(NamedTuple):
    """A micro batch on one rank.

    Attributes:
        tokens: Number of its tokens.
        sequence: Tokens of a sample.
        token_shares: Number of tensor ranks that divide tokens between them outside of matrix products.
        tp_size: Number of tensor ranks.
        bytes_per_number: Bytes of an element of the hidden states.
        separates_documents: Whether the documents in a row are kept apart.
        norm_bytes: Bytes of an element by which what a norm keeps exceeds its input.
    """

    tokens: int
    sequence: int
    token_shares: int
    tp_size: int
    bytes_per_number: int
    separates_documents: bool
    norm_bytes: int


def _nothing_kept(architecture: Architecture, tp_size: int) -> int:
    return 0


def _is_not_behind(parameter: str) -> bool:
    return False


def _nothing_recomputed(architecture: Architecture, batch: MicroBatch) -> int:
    return 0


def _none(architecture: Architecture, tp_size: int) -> str:
    return ""


def _of_network(architecture: Architecture) -> str:
    return architecture.residual


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """A kind of block on paper.

    Attributes:
        parameters: (network, key of `MLPS`) -> its parameters, in the order of its sublayers. Tensor ranks divide them
            as each says.
        attention: Its attention; None if it mixes tokens in another way.
        two_sublayers: Whether it has the network's MLP, or experts, as a second sublayer, and both are added by the
            network's residual rule. If not, it is a whole block by itself.
        residual: Network -> key of `RESIDUALS` by which it adds two sublayers.
        keeps: What generation keeps of earlier tokens: the `keys` (and values) of each, a `state` of fixed size, or
            `nothing`. Then the whole sequence is computed at each step.
        kept: (network, tensor ranks) -> number of elements that this takes on a rank, for each token if it keeps keys,
            for each sequence if it keeps a state, which is fp32.
        mixing_flops: (network, sequence length) -> operations of a forward pass for one token which mix tokens, so that
            its matrices do not show them.
        activations: (network, micro batch) -> bytes that its backward pass needs, of two sublayers only those of the
            first one; None if they follow from attention and MLP.
        recomputed: (network, micro batch) -> bytes that its backward pass computes again at once, however the run
            recomputes.
        unkept_product: (network, key of `MLPS`) -> name of the weight whose product ends the block, if the backward
            pass does not need its result; empty if it does.
        recomputed_flops: (network, sequence length) -> operations for one token that this repeats.
        behind: (network, micro batch) -> bytes of `activations` that are used only behind the recomputed part, so that
            they are freed when that part's backward pass runs.
        behind_recomputed: Name of a parameter -> whether only what comes behind the recomputed part uses it, so that
            ZeRO 3 has released it when that part's backward pass runs.
        obstacle: (network, tensor ranks) -> why these cannot divide it, as a clause; empty if they can, or if the
            shapes of its parameters say so.
        context_ranks: Why context ranks cannot divide its tokens, as a relative clause; empty if they can.
        bidirectional: Whether it can also see later tokens, in an encoder.
        has_fixed_length: Whether its parameters depend on the longest sequence.
        gated_activations: Whether it takes activations with a gate.
        uses: Keys of the YAML that it uses, although it has no attention or no MLP, whose keys they are otherwise.
        refused: Keys of the YAML that do not work with it.
    """

    parameters: Callable[[Architecture, str], tuple[ParameterSpec, ...]]
    attention: Attention | None = None
    two_sublayers: bool = False
    residual: Callable[[Architecture], str] = _of_network
    keeps: Literal["keys", "state", "nothing"]
    kept: Callable[[Architecture, int], int] = _nothing_kept
    mixing_flops: Callable[[Architecture, int], int]
    activations: Callable[[Architecture, MicroBatch], int] | None = None
    recomputed: Callable[[Architecture, MicroBatch], int] = _nothing_recomputed
    unkept_product: Callable[[Architecture, str], str]
    recomputed_flops: Callable[[Architecture, int], int] = _nothing_kept
    behind: Callable[[Architecture, MicroBatch], int] = _nothing_recomputed
    behind_recomputed: Callable[[str], bool] = _is_not_behind
    obstacle: Callable[[Architecture, int], str] = _none
    context_ranks: str = ""
    bidirectional: bool = False
    has_fixed_length: bool = False
    gated_activations: bool = True
    uses: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
