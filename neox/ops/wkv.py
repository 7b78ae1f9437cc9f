"""Time mixing of RWKV 6 (Eagle and Finch, arXiv:2404.05892): linear attention with a decay of each channel.

Token t has a receptance r, a key k, a value v and a factor a = exp(log_decay), numbers for each channel of a head. The
state S [K, V] of a head adds up k v^T and fades by channels; a token's own product counts u instead of fading:

    o  = r (S + u k v^T)
    S <- a S + k v^T

`wkv_recurrence` does this token by token. `wkv_scan` computes the same by chunks of c tokens. In a chunk that begins
with the state S,

    e[i]    = product of a over the tokens of the chunk before i
    s[i, j] = sum over channels of r[i] k[j] (product of a over j + 1 ... i - 1)   if j < i,
              sum over channels of r[i] k[i] u                                    if j = i
    o[i]    = (e[i] r[i]) S + sum over j of s[i, j] v[j]
    S'      = e[c] S + sum over j of (product of a over j + 1 ... c) k[j] v[j]^T

Products over j + 1 ... i - 1 are computed for each pair and channel: quotients e[i] / e[j + 1] would overflow where
channels forget fast.

Legend: B batch, S sequence, N heads, K width of receptances and keys, V width of values, C chunks, c tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.architecture.rwkv import WKV_CHUNK
from neox.ops import recurrent_kernels
from neox.ops.chunks import StateScan, heads_in_chunks, starts_in_chunks


def wkv_recurrence(
    receptance: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Mix token by token.

    Args:
        receptance: [B, S, N, K].
        keys: [B, S, N, K].
        values: [B, S, N, V].
        log_decay: Logarithm of the factor by which each channel fades after each token, at most 0, [B, S, N, K].
        bonus: Weight u of a token's own product, [N, K].
        state: State before the first token, [B, N, K, V].

    Returns:
        Outputs [B, S, N, V] in fp32 or a wider type, and the state after the last token.
    """
    dtype = _wide(keys)
    state = state.to(dtype)
    outputs = []
    for token in range(keys.shape[1]):
        product = keys[:, token].to(dtype).unsqueeze(-1) * values[:, token].to(dtype).unsqueeze(-2)  # [B, N, K, V]
        seen = state + bonus.to(dtype).unsqueeze(-1) * product
        outputs.append((receptance[:, token].to(dtype).unsqueeze(-2) @ seen).squeeze(-2))
        state = log_decay[:, token].to(dtype).exp().unsqueeze(-1) * state + product
    return torch.stack(outputs, dim=1), state


def wkv_scan(
    receptance: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: Tensor | None = None,
    starts: Tensor | None = None,
    chunk: int = WKV_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Mix by chunks.

    Args:
        receptance: As for `wkv_recurrence`.
        keys: The same.
        values: The same.
        log_decay: The same.
        bonus: The same.
        state: State before the first token; zeros if None.
        starts: Index in the row at which each token's document starts, [B, S], without a `state`; None for one
            document a row. No bit of a document depends on those before it.
        chunk: Tokens of a chunk.

    Returns:
        Outputs [B, S, N, V] in fp32 or a wider type, and the state after the last token, [B, N, K, V].
    """
    if recurrent_kernels.takes_kernel(recurrent_kernels.LINEAR_ATTENTION, keys) and keys.dtype.itemsize == 2:
        return recurrent_kernels.wkv_scan(receptance, keys, values, log_decay, bonus, state, starts)
    batch, length, heads, width = keys.shape
    dtype = _wide(keys)
    # Padding has keys of 0, so it adds nothing, and a decay of 1.
    r, k, v, fading = (heads_in_chunks(x.to(dtype), chunk) for x in (receptance, keys, values, log_decay))
    up_to = fading.cumsum(-2)
    from_state = F.pad(up_to[..., :-1, :], (0, 0, 1, 0)).exp()  # e, [B, N, C, c, K]
    kept = up_to[..., -1, :].exp().unsqueeze(-1)  # e[c], [B, N, C, K, 1]
    to_end = F.pad(fading.flip(-2).cumsum(-2).flip(-2)[..., 1:, :], (0, 0, 0, 1)).exp()
    visible = torch.ones(chunk, chunk, dtype=torch.bool, device=keys.device).tril(-1)
    if starts is not None:
        first, began_before = (tensor.unsqueeze(1) for tensor in starts_in_chunks(starts, chunk))  # [B, 1, C, c]
        visible = visible & (first.unsqueeze(-1) == first.unsqueeze(-2))
        sees_state = began_before.unsqueeze(-1)
        from_state = from_state * sees_state
        kept = kept * sees_state[..., -1:, :]
        to_end = to_end * (first == first[..., -1:]).unsqueeze(-1)

    # Scores of pairs of a chunk. A token's own product counts `bonus`.
    scores = _DecayedScores.apply(r, k, fading) * visible
    own = (r * k * bonus.to(dtype)[None, :, None, None, :]).sum(-1, keepdim=True)

    added = (k * to_end).mT @ v  # [B, N, C, K, V]
    if state is None:
        state = added.new_zeros(batch, heads, width, v.shape[-1])
    states, last = StateScan.apply(kept, added, state.to(dtype), 2)
    outputs = scores @ v + own * v + (r * from_state) @ states
    return outputs.flatten(2, 3)[:, :, :length].transpose(1, 2), last


def _wide(x: Tensor) -> torch.dtype:
    """Return fp32, or the type of a tensor if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


class _DecayedScores(torch.autograd.Function):
    """Scores with earlier tokens of a chunk: for j < i, the sum over channels of r[i] k[j] exp(sum of f[j+1 ... i-1]).

    All pairs of the same distance are computed at once. No tensor has a number for each pair and channel.
    """

    @staticmethod
    def forward(ctx: Any, receptance: Tensor, keys: Tensor, log_decay: Tensor) -> Tensor:
        """Return scores [..., i, j], 0 for j >= i, of receptances, keys and log decays [..., c, K]."""
        length = keys.shape[-2]
        scores = keys.new_zeros(*keys.shape[:-1], length)
        for distance, faded in _pairs_by_distance(log_decay):
            products = receptance[..., distance:, :] * keys[..., :-distance, :] * faded
            scores.diagonal(-distance, -2, -1).copy_(products.sum(-1))
        ctx.save_for_backward(receptance, keys, log_decay)
        return scores

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients.

        A pair's product changes with the logarithm of its decay as it does with that of r or of k. So the gradient of
        the sums of log decays up to i - 1, and up to j, is r dr, and -k dk.
        """
        receptance, keys, log_decay = ctx.saved_tensors
        of_receptance = torch.zeros_like(receptance)
        of_keys = torch.zeros_like(keys)
        for distance, faded in _pairs_by_distance(log_decay):
            weighted = faded * gradient.diagonal(-distance, -2, -1).unsqueeze(-1)
            of_receptance[..., distance:, :] += weighted * keys[..., :-distance, :]
            of_keys[..., :-distance, :] += weighted * receptance[..., distance:, :]
        of_sums = F.pad((receptance * of_receptance)[..., 1:, :], (0, 0, 0, 1)) - keys * of_keys
        return of_receptance, of_keys, of_sums.flip(-2).cumsum(-2).flip(-2)


def _pairs_by_distance(log_decay: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each distance d of two tokens of a chunk, and exp(sum of f[i - d + 1 ... i - 1]) for i = d ... c - 1."""
    length = log_decay.shape[-2]
    total = torch.zeros_like(log_decay[..., 1:, :])
    for distance in range(1, length):
        yield distance, total.exp()
        total = total[..., 1:, :] + log_decay[..., 1 : length - distance, :]
