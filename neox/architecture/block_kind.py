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
    """

    tokens: int
    sequence: int
    token_shares: int
    tp_size: int


def _nothing_kept(architecture: Architecture, tp_size: int) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """A kind of block on paper.

    Attributes:
        parameters: (network, key of `MLPS`) -> its parameters, in the order of its sublayers. Tensor ranks divide them
            as each says.
        attention: Its attention; None if it mixes tokens in another way.
        two_sublayers: Whether it has the network's MLP, or experts, as a second sublayer, and both are added by the
            network's residual rule. If not, it is a whole block by itself.
        keeps: What generation keeps of earlier tokens: the `keys` (and values) of each, a `state` of fixed size, or
            `nothing`. Then the whole sequence is computed at each step.
        kept: (network, tensor ranks) -> number of elements that this takes on a rank, for each token if it keeps keys,
            for each sequence if it keeps a state, which is fp32.
        mixing_flops: (network, sequence length) -> operations of a forward pass for one token which mix tokens, so that
            its matrices do not show them.
        activations: (network, micro batch) -> number of elements that its backward pass needs; None if they follow from
            attention and MLP.
        context_ranks: Why context ranks cannot divide its tokens, as a relative clause; empty if they can.
        bidirectional: Whether it can also see later tokens, in an encoder.
        has_fixed_length: Whether its parameters depend on the longest sequence.
        gated_activations: Whether it takes activations with a gate.
        refused: Keys of the YAML that do not work with it.
    """

    parameters: Callable[[Architecture, str], tuple[ParameterSpec, ...]]
    attention: Attention | None = None
    two_sublayers: bool = False
    keeps: Literal["keys", "state", "nothing"]
    kept: Callable[[Architecture, int], int] = _nothing_kept
    mixing_flops: Callable[[Architecture, int], int]
    activations: Callable[[Architecture, MicroBatch], int] | None = None
    context_ranks: str = ""
    bidirectional: bool = False
    has_fixed_length: bool = False
    gated_activations: bool = True
    refused: tuple[str, ...] = ()
