"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464): attention whose memory is one matrix for each head.

Token t has a query q, a key k and a value v, forgets by a factor a = exp(log_decay), and writes with strength b:

    S <- a S                    the state S [K, V] fades
    S <- S + k b (v - k S)      what it holds for the key k moves towards v
    o  = q S

Keys and queries have length 1, and queries are divided by sqrt(K). `gated_delta_recurrence` does this token by token.
`gated_delta_scan` computes the same by chunks of tokens. In a chunk of c tokens that begins with the state S,

    d[i, j] = product of a over j + 1 ... i     decay between two tokens, 0 if i < j or of different documents
    e[i]    = product of a over the chunk up to i
    M       = strictly lower part of b k k^T d  what a token's write depends on
    U, W    = (1 + M)^-1 (b v), (1 + M)^-1 (b e k)
    writes  = U - W S
    o       = (e q) S + (q k^T d) writes
    S'      = e[c] S + (d[c] k)^T writes

All but writes and S' is computed for all chunks at once.

Legend: B batch, S sequence, G heads of queries and keys, N heads of values (a multiple of G), K width of keys, V width
of values, C chunks, c tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from neox.architecture import DELTA_CHUNK
from neox.ops import recurrent_kernels
from neox.ops.chunks import heads_in_chunks, starts_in_chunks

_SMALLEST: Final = 1e-6
"""Summand of the squared length of queries and keys."""


def gated_delta_recurrence(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the rule token by token.

    Args:
        queries: [B, S, G, K].
        keys: [B, S, G, K].
        values: [B, S, N, V].
        log_decay: Logarithm of the factor by which each token forgets, at most 0, [B, S, N].
        strength: Strength of each token's write, [B, S, N].
        state: State before the first token, [B, N, K, V].

    Returns:
        Outputs [B, S, N, V], and the state after the last token.
    """
    copies = values.shape[2] // keys.shape[2]
    unit_queries, unit_keys = _of_unit_length(queries, keys)
    unit_queries = unit_queries.repeat_interleave(copies, dim=2)  # [B, S, N, K]
    unit_keys = unit_keys.repeat_interleave(copies, dim=2)
    dtype = unit_keys.dtype
    state = state.to(dtype)
    outputs = []
    for token in range(values.shape[1]):
        key = unit_keys[:, token].unsqueeze(-2)  # [B, N, 1, K]
        state = state * log_decay[:, token].to(dtype).exp()[..., None, None]
        missing = values[:, token].to(dtype).unsqueeze(-2) - key @ state  # [B, N, 1, V]
        state = state + key.mT @ (missing * strength[:, token].to(dtype)[..., None, None])
        outputs.append((unit_queries[:, token].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, dim=1).to(values.dtype), state


def gated_delta_scan(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    state: Tensor | None = None,
    starts: Tensor | None = None,
    chunk: int = DELTA_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Apply the rule by chunks.

    Args:
        queries: As for `gated_delta_recurrence`.
        keys: The same.
        values: The same.
        log_decay: The same.
        strength: The same.
        state: State before the first token; zeros if None.
        starts: Index in the row at which each token's document starts, [B, S], without a `state`; None for one
            document a row. No bit of a document depends on those before it.
        chunk: Tokens of a chunk.

    Returns:
        Outputs [B, S, N, V], and the state after the last token, [B, N, K, V].
    """
    if recurrent_kernels.takes_kernel(recurrent_kernels.LINEAR_ATTENTION, keys) and keys.dtype.itemsize == 2:
        return recurrent_kernels.gated_delta_scan(queries, keys, values, log_decay, strength, state, starts)
    batch, length, groups, _ = keys.shape
    heads = values.shape[2]
    chunk = min(chunk, length)
    q, k = _of_unit_length(queries, keys)
    dtype = k.dtype
    # Padding has keys of 0, so it writes nothing, and a decay of 1.
    q = heads_in_chunks(q, chunk).unsqueeze(2)  # [B, G, 1, C, c, K]
    k = heads_in_chunks(k, chunk).unsqueeze(2)
    v = heads_in_chunks(values.to(dtype), chunk).unflatten(1, (groups, -1))  # [B, G, N/G, C, c, V]
    b = heads_in_chunks(strength.to(dtype).unsqueeze(-1), chunk).unflatten(1, (groups, -1))  # [B, G, N/G, C, c, 1]
    fading = heads_in_chunks(log_decay.to(dtype).unsqueeze(-1), chunk).squeeze(-1).unflatten(1, (groups, -1))

    # Decays between tokens, [B, G, N/G, C, c, c], from the beginning of the chunk, and over all of it.
    between = torch.ones(chunk, chunk, dtype=torch.bool, device=k.device).tril()
    from_before = fading.cumsum(-1).exp().unsqueeze(-1)  # [B, G, N/G, C, c, 1]
    if starts is not None:
        first, began_before = (tensor[:, None, None] for tensor in starts_in_chunks(starts, chunk))  # [B, 1, 1, C, c]
        between = between & (first.unsqueeze(-1) == first.unsqueeze(-2))
        from_before = from_before * began_before.unsqueeze(-1)
    decay = _DecaysBetween.apply(fading, between)
    to_end = decay[..., -1, :].unsqueeze(-1)

    # Writes of a chunk: [U, W] = (1 + M)^-1 [b v, b e k].
    dependence = (k @ k.mT) * (decay * b)
    wanted = torch.cat((v * b, k * (from_before * b)), dim=-1)
    solved = torch.linalg.solve_triangular(dependence, wanted, upper=False, unitriangular=True)
    own, of_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)

    # Writes and the states before each chunk, [B, G, N/G, C, K, V], and the state after the last.
    if state is None:
        state = v.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
    of_chunk = from_before[..., -1:, :]
    writes, before, last = _ChunkScan.apply(
        own, of_state, k * to_end, of_chunk, state.to(dtype).unflatten(1, (groups, -1))
    )

    outputs = (q * from_before) @ before + ((q @ k.mT) * decay) @ writes
    outputs = outputs.flatten(1, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return outputs.to(values.dtype), last.flatten(1, 2)


def _of_unit_length(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries of length 1 / sqrt(K) and keys of length 1, in fp32 or a wider type."""
    dtype = torch.promote_types(keys.dtype, torch.float32)
    queries, keys = queries.to(dtype), keys.to(dtype)
    queries = queries * torch.rsqrt(queries.square().sum(-1, keepdim=True) + _SMALLEST) * queries.shape[-1] ** -0.5
    keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + _SMALLEST)
    return queries, keys


class _DecaysBetween(torch.autograd.Function):
    """exp(sum of log decays over j + 1 ... i) for tokens i and j of a chunk; 0 for those that do not see each other.

    Each sum has only its own terms, so that a document's decays have no rounding of those before it.
    """

    @staticmethod
    def forward(ctx: Any, log_decay: Tensor, visible: Tensor) -> Tensor:
        """Return decays [..., i, j] for log decays [..., c] and the pairs that see each other, bool [..., i, j]."""
        length = log_decay.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).tril(-1)
        terms = log_decay.unsqueeze(-1) * later  # term i of the sum that begins after j
        # Not in place: compiled by torch 2.11, a function's result that was changed in place has no gradient.
        decays = terms.cumsum(-2).exp_() * visible
        ctx.save_for_backward(decays)
        return decays

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the log decays: a token's is that of all sums which go over it."""
        (decays,) = ctx.saved_tensors
        of_sums = gradient * decays
        of_ends = of_sums.sum(-1) - of_sums.sum(-2)  # of the sum up to i from the chunk's beginning
        return of_ends.flip(-1).cumsum(-1).flip(-1), None


class _ChunkScan(torch.autograd.Function):
    """Writes U - W S and states S' = e S + D^T (U - W S) of one chunk after another."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, of_state: Tensor, kept_keys: Tensor, fading: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the writes [..., C, c, V], the states before each chunk [..., C, K, V], and the last one.

        Args:
            ctx: Context.
            own: U, [..., C, c, V].
            of_state: W, [..., C, c, K].
            kept_keys: D, keys times what is left of them at the end of the chunk, [..., C, c, K].
            fading: e, decay over a chunk, [..., C, 1, 1].
            state: The first state, [..., K, V].
        """
        writes = torch.empty_like(own)
        before = own.new_empty(*own.shape[:-2], *state.shape[-2:])
        for chunk in range(own.shape[-3]):
            before[..., chunk, :, :] = state
            written = own[..., chunk, :, :] - of_state[..., chunk, :, :] @ state
            writes[..., chunk, :, :] = written
            state = fading[..., chunk, :, :] * state + kept_keys[..., chunk, :, :].mT @ written
        ctx.save_for_backward(of_state, kept_keys, fading, writes, before)
        return writes, before, state

    @staticmethod
    def backward(ctx: Any, of_writes: Tensor, of_before: Tensor, of_last: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients: of states from the last chunk to the first, the others of all chunks at once."""
        of_state, kept_keys, fading, writes, before = ctx.saved_tensors
        of_own = torch.empty_like(writes)
        of_after = torch.empty_like(before)  # gradients of the states after each chunk
        gradient = of_last
        for chunk in reversed(range(writes.shape[-3])):
            of_after[..., chunk, :, :] = gradient
            of_written = of_writes[..., chunk, :, :] + kept_keys[..., chunk, :, :] @ gradient
            of_own[..., chunk, :, :] = of_written
            gradient = of_before[..., chunk, :, :] + fading[..., chunk, :, :] * gradient
            gradient = gradient - of_state[..., chunk, :, :].mT @ of_written
        of_fading = (of_after * before).sum((-2, -1), keepdim=True)
        return of_own, -(of_own @ before.mT), writes @ of_after.mT, of_fading, gradient
