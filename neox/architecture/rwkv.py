"""Kind `rwkv` on paper: RWKV 6 (arXiv:2404.05892) by gpt-neox's names: time mixing, then channel mixing.

Legend: H hidden, A width of time mixing, N heads of A / N channels, F width of channel mixing.
"""

from __future__ import annotations

from math import prod
from typing import Final

from neox.architecture.architecture import Architecture
from neox.architecture.block_kind import BlockKind, MicroBatch
from neox.architecture.parameter import ONES, ZEROS, ByChannel, FromKey, ParameterSpec, Uniform, in_module
from neox.architecture.recurrence import FP32, StateShapes

MIX_WIDTH: Final = 32
"""Width between the two small products that shift the mixture of neighbouring tokens."""
DECAY_WIDTH: Final = 64
"""Width between the two small products that shift decays."""
WKV_CHUNK: Final = 16
"""Tokens of a chunk of the recurrence."""
_SMALL: Final = Uniform(-1e-4, 1e-4)


def _until_last(block: int, blocks: int) -> float:
    """Return 1 in the first block, and nearly 0 in the last one."""
    return 1.0 - block / blocks


def _from_first(block: int, blocks: int) -> float:
    """Return 0 in the first block, and 1 in the last one."""
    return block / max(1, blocks - 1)


def _mix(channel: int, channels: int, block: int, blocks: int) -> float:
    return 1.0 - (channel / channels) ** _until_last(block, blocks)


def _mix_of_values(channel: int, channels: int, block: int, blocks: int) -> float:
    return _mix(channel, channels, block, blocks) - 0.3 * _from_first(block, blocks)


def _mix_of_gates(channel: int, channels: int, block: int, blocks: int) -> float:
    return 1.0 - (channel / channels) ** (0.5 * _until_last(block, blocks))


def _decay(channel: int, channels: int, block: int, blocks: int) -> float:
    return -6.0 + 5.0 * (channel / max(1, channels - 1)) ** (0.7 + 1.3 * _from_first(block, blocks))


def _bonus(channel: int, channels: int, block: int, blocks: int) -> float:
    zigzag = ((channel + 1) % 3 - 1) * 0.1
    return _from_first(block, blocks) * (1.0 - channel / max(1, channels - 1)) + zigzag


def _parameters(architecture: Architecture, mlp: str) -> tuple[ParameterSpec, ...]:
    """List the parameters with gpt-neox's shapes, in its order, and with its initial values of vectors.

    Tensor ranks divide the heads, and in channel mixing both widths. Every rank computes the mixtures of neighbouring
    tokens in full.
    """
    hidden = architecture.hidden_size
    width = architecture.rwkv_width
    heads = architecture.rwkv_heads
    inner = architecture.rwkv_mlp_width

    def mixture(name: str, init: ByChannel) -> ParameterSpec:
        return ParameterSpec(f"time_maa_{name}", (1, 1, hidden), init=init, of_norm=True)

    time = (
        mixture("x", ByChannel(_mix)),
        mixture("w", ByChannel(_mix)),
        mixture("k", ByChannel(_mix)),
        mixture("v", ByChannel(_mix_of_values)),
        mixture("r", ByChannel(_mix_of_gates)),
        mixture("g", ByChannel(_mix_of_gates)),
        ParameterSpec("time_maa_w1", (hidden, 5 * MIX_WIDTH), init=_SMALL, of_recurrence=True),
        ParameterSpec("time_maa_w2", (5, MIX_WIDTH, hidden), init=_SMALL, of_recurrence=True),
        ParameterSpec("time_decay", (1, 1, width), 2, init=ByChannel(_decay), of_norm=True),
        ParameterSpec("time_decay_w1", (hidden, DECAY_WIDTH), init=_SMALL, of_recurrence=True),
        ParameterSpec("time_decay_w2", (DECAY_WIDTH, width), 1, init=_SMALL, of_recurrence=True),
        ParameterSpec("time_faaaa", (heads, width // heads), 0, init=ByChannel(_bonus), of_norm=True),
        ParameterSpec("receptance.weight", (width, hidden), 0),
        ParameterSpec("key.weight", (width, hidden), 0),
        ParameterSpec("value.weight", (width, hidden), 0),
        ParameterSpec("output.weight", (hidden, width), 1, init=FromKey.OUTPUT_METHOD),
        ParameterSpec("gate.weight", (width, hidden), 0),
        ParameterSpec("ln_x.weight", (width,), 0, init=ONES),
        ParameterSpec("ln_x.bias", (width,), 0, init=ZEROS),
    )
    channels = (
        mixture("k", ByChannel(_mix)),
        mixture("r", ByChannel(_mix)),
        ParameterSpec("key.weight", (inner, hidden), 0),
        ParameterSpec("receptance.weight", (hidden, hidden), 0),
        ParameterSpec("value.weight", (hidden, inner), 1, init=FromKey.OUTPUT_METHOD),
    )
    norm = (ParameterSpec("weight", (hidden,), init=ONES), ParameterSpec("bias", (hidden,), init=ZEROS))
    return (
        *in_module("ln1", norm),
        *in_module("ln2", norm),
        *in_module("att", time),
        *in_module("ffn", channels),
    )


def rwkv_state(architecture: Architecture, tp_size: int) -> StateShapes:
    """Return the last normalised token before either mixing, [H] each, and a matrix of each head."""
    hidden = architecture.hidden_size
    channels = architecture.rwkv_width // architecture.rwkv_heads
    return ((hidden,), (hidden,), (architecture.rwkv_heads // tp_size, channels, channels))


def _kept(architecture: Architecture, tp_size: int) -> int:
    return sum(map(prod, rwkv_state(architecture, tp_size)))


def _flops(architecture: Architecture, sequence: int) -> int:
    """Return the operations of the recurrence for one token: 2 for each element of the states to add, and 2 to read."""
    return 4 * architecture.rwkv_width * architecture.rwkv_width // architecture.rwkv_heads


def _recomputed_flops(architecture: Architecture, sequence: int) -> int:
    """Return the operations of the recurrence, and of the two small products that shift mixtures."""
    return _flops(architecture, sequence) + 2 * 2 * 5 * MIX_WIDTH * architecture.hidden_size


def _activations(architecture: Architecture, batch: MicroBatch) -> int:
    """Return the bytes that a block keeps.

    Of width H: its input, and the sum behind time mixing; both normalised; mixtures for 5 products and for 2; sigmoids
    and values of channel mixing. Of A: receptances, keys, values, gates, decays, and outputs of heads. Of F: the
    activations and their squares.
    """
    whole = (2 + 2 + 5 + 2 + 2) * architecture.hidden_size + DECAY_WIDTH
    divided = 6 * architecture.rwkv_width + 2 * architecture.rwkv_mlp_width
    return batch.tokens * (whole + divided // batch.tp_size) * batch.bytes_per_number


def _behind(architecture: Architecture, batch: MicroBatch) -> int:
    """Return the bytes of channel mixing: six of the tensors of width H, and those of F."""
    divided = 2 * architecture.rwkv_mlp_width
    return batch.tokens * (6 * architecture.hidden_size + divided // batch.tp_size) * batch.bytes_per_number


def _recomputed(architecture: Architecture, batch: MicroBatch) -> int:
    """Return the bytes of everything between the products of time mixing at the peak of its backward pass, fp32.

    Of a token 13 tensors of A, and 4 times its share of a chunk's states; with narrow heads more is held earlier, while
    scores of pairs are computed: 18 tensors, and scores of its chunk. Two more tensors for documents, and for rows that
    are padded to whole chunks. Measured, to 5 % for heads of 8 to 128 channels.
    """
    channels = architecture.rwkv_width // architecture.rwkv_heads
    tensors = max(13 + 4 * channels / WKV_CHUNK, 18 + WKV_CHUNK / channels)
    if batch.separates_documents:
        tensors += 2
    padding = -batch.sequence % WKV_CHUNK
    if padding:
        tensors += 2
    tokens = batch.tokens * (batch.sequence + padding) // batch.sequence
    return int(tokens * tensors * architecture.rwkv_width) * FP32 // batch.tp_size


def _obstacle(architecture: Architecture, tp_size: int) -> str:
    """Return why tensor ranks cannot divide a block."""
    sizes = {
        "time mixing has": (architecture.rwkv_heads, "heads"),
        "channel mixing has": (architecture.rwkv_mlp_width, "channels (ffn_dim)"),
        "its receptances are": (architecture.hidden_size, "numbers (hidden_size)"),
    }
    for subject, (size, unit) in sizes.items():
        if size % tp_size:
            return f"{subject} {size} {unit}, which is no multiple of that"
    return ""


RWKV = BlockKind(
    parameters=_parameters,
    keeps="state",
    kept=_kept,
    mixing_flops=_flops,
    activations=_activations,
    recomputed=_recomputed,
    unkept_product=lambda architecture, mlp: "",  # receptances multiply it
    recomputed_flops=_recomputed_flops,
    behind=_behind,
    behind_recomputed=lambda parameter: parameter.startswith(("att.output.", "ffn.")),
    obstacle=_obstacle,
    context_ranks="whose states go from token to token",
    uses=("num_attention_heads", "intermediate_size", "expansion_factor", "hidden_dropout", "residual_multiplier"),
    refused=("use_mup", "soft_prompt_tuning", "sequence_parallel"),
)
