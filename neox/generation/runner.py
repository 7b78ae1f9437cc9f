"""Forward passes of a model for generation and scoring, on one rank or split over tensor ranks and pipeline stages.

Every rank of the model calls the same methods in the same order. Logits and scores are equal on all of them, so that
all choose the same tokens and stop together.

Legend: B batch, S tokens fed, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from neox.architecture import ROPE_SCALINGS, Architecture, generates_by_steps
from neox.errors import GenerationError
from neox.generation.decoding import TokenScores
from neox.generation.recorded_step import RecordedStep
from neox.launch import report_progress
from neox.model import (
    CacheStep,
    Context,
    KVCache,
    Stage,
    broadcast_from_head,
    forward_over_stages,
    vocab_parallel_cross_entropy,
)
from neox.ops import has_fast_path
from neox.parallel import ParallelGrid, gather_last_dim, gather_tensor_ranks

_SCORED_LOGITS = 2**25
"""Largest number of logits in memory while scoring."""

_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Kernels of attention on a GPU. cuDNN's is left out: it makes a plan for each length, and there are many here."""

_SLOTS = 64
"""The number of slots of recorded steps is a multiple of this one, so that kernels read whole vectors."""


class CalledNetwork:
    """A whole network that can only be called for logits; these stand for its hidden states, and its head does nothing.

    Args:
        forward: Tokens [B, S] -> logits [B, S, V/tp].
    """

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self.forward = forward


class ModelRunner:
    """A stage that runs together with the other ranks of its model.

    Implements the protocols `LanguageModel` (generation) and `ScoringModel` (evaluation).
    """

    def __init__(
        self,
        network: Stage | CalledNetwork,
        grid: ParallelGrid,
        *,
        architecture: Architecture,
        vocab_size: int,
        device: torch.device,
        dtype: torch.dtype,
        recompute: bool = False,
        recorded: bool = False,
    ) -> None:
        """Keep the layers of this rank.

        Args:
            network: Layers of this rank, or a network without stages that can only be called.
            grid: Process groups.
            architecture: The whole network.
            vocab_size: Padded vocabulary of the whole model.
            device: Device of the layers.
            dtype: Type of hidden states.
            recompute: Compute the whole sequence at each step instead of keeping keys and values.
            recorded: Decode by steps of fixed shapes (`RecordedStep`). Only for a model on one rank whose parameters
                stay where they are.
        """
        assert not recorded or grid.tp_size == grid.pp_size == 1
        self.recorded = recorded
        self.network = network
        self.grid = grid
        self.architecture = architecture
        self.vocab_size = vocab_size
        self.max_length = architecture.max_length
        scaling = dict(architecture.rope_scaling)
        self.scores_by_length = ROPE_SCALINGS[scaling.get("rope_type", "default")].by_length
        self.device = device
        self.dtype = dtype
        self.recompute = recompute or not generates_by_steps(architecture)

    def begin(self, lengths: Sequence[int], capacity: int) -> CachedDecoding | RecomputedDecoding:
        """Start a batch of prompts; see `LanguageModel`."""
        if self.recompute:
            return RecomputedDecoding(self, lengths)
        return CachedDecoding(self, lengths, capacity)

    @torch.inference_mode()
    def score(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Score labels [B, S] given tokens [B, S]; see `ScoringModel`."""
        self._check_ids(tokens, labels)
        hidden = self.hidden(tokens)
        result = torch.empty(2, *tokens.shape, device=self.device)
        if hidden is not None:
            columns = max(1, _SCORED_LOGITS * self.grid.tp_size // (self.vocab_size * tokens.size(0)))
            for start in range(0, tokens.size(1), columns):
                here = slice(start, start + columns)
                logits = self._logits(hidden[:, here])
                result[0, :, here] = -vocab_parallel_cross_entropy(logits, labels[:, here], self.grid)
                result[1, :, here] = most_probable(logits, self.grid) == labels[:, here]
        self._from_last_stage(result)
        return result[0], result[1] > 0

    @torch.inference_mode()
    def largest_logits(self, tokens: Tensor, starts: Tensor | None, ids: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the most probable next tokens and their logits, [B, S, count] each, for a model on one rank.

        Args:
            tokens: Tokens [B, S].
            starts: Start position of each token's document [B, S]; None to attend across documents.
            ids: Vocabulary size of the tokenizer, without padding.
            count: Number of logits per position.
        """
        report_progress()
        assert isinstance(self.network, Stage)
        with self._kernels():
            hidden = forward_over_stages(self.network, tokens, Context(document_starts=starts), self.dtype)
        assert hidden is not None
        found_ids = torch.empty(*tokens.shape, count, dtype=torch.long, device=self.device)
        found = torch.empty(*tokens.shape, count, device=self.device)
        columns = max(1, _SCORED_LOGITS // (self.vocab_size * len(tokens)))
        for first in range(0, tokens.shape[1], columns):
            here = slice(first, first + columns)
            largest = self._logits(hidden[:, here])[..., :ids].float().topk(count, dim=-1)
            found_ids[:, here] = largest.indices
            found[:, here] = largest.values
        return found_ids, found

    @torch.inference_mode()
    def token_scores(self, tokens: Tensor, labels: Tensor, count: int) -> TokenScores:
        """Score tokens for a model on one rank; see `LanguageModel`. Labels have the scores of `score`."""
        assert self.grid.tp_size == self.grid.pp_size == 1
        self._check_ids(tokens, labels)
        hidden = self.hidden(tokens.to(self.device))
        assert hidden is not None
        parts = []
        columns = max(1, _SCORED_LOGITS // (self.vocab_size * tokens.size(0)))
        for start in range(0, tokens.size(1), columns):
            here = slice(start, start + columns)
            log_probabilities = self._logits(hidden[:, here]).float().log_softmax(-1)  # [B, columns, V]
            of_labels = log_probabilities.gather(-1, labels[:, here, None].to(self.device)).squeeze(-1)
            top = log_probabilities.topk(count, dim=-1)
            parts.append((of_labels.cpu(), top.indices.cpu(), top.values.cpu()))
        return TokenScores(*(torch.cat(kind, dim=1) for kind in zip(*parts, strict=True)))

    @torch.inference_mode()
    def text_scores(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the scores of texts by a reward model in fp32, [B], on every rank.

        Args:
            tokens: Texts, padded on the right [B, S].
            lengths: Number of tokens of each text [B].
        """
        self._check_ids(tokens)
        hidden = self.hidden(tokens)
        scores = torch.empty(len(tokens), device=self.device)
        if hidden is not None:
            last = hidden[torch.arange(len(tokens), device=self.device), lengths - 1]  # [B, H]
            scores = self._logits(last).squeeze(-1).float()
        self._from_last_stage(scores)
        return scores

    def _check_ids(self, *ids: Tensor) -> None:
        """Raise GenerationError for ids without rows, which on a GPU would end the process."""
        largest = max(int(part.max()) for part in ids)
        if largest >= self.vocab_size:
            raise GenerationError(
                f"the text holds token id {largest}, and the model has rows for ids up to {self.vocab_size - 1} only; "
                "leave that token out, or give it a row with tools/resize_vocabulary.py"
            )

    def next_logits(self, hidden: Tensor | None, batch: int) -> Tensor:
        """Return the logits [B, V] of the next token on every rank; hidden [B, H] on the last stage."""
        if hidden is None:
            logits = torch.empty(batch, self.vocab_size, device=self.device, dtype=self.dtype)
        else:
            logits = gather_last_dim(self._logits(hidden.unsqueeze(1)), self.grid).squeeze(1).contiguous()
        self._from_last_stage(logits)
        return logits

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor | None:
        """Return the hidden states after the final norm [B, S, H]; None on all but the last stage."""
        report_progress()  # a batch of long texts may take longer than `hang_timeout`
        with self._kernels():
            return self._hidden(tokens, cache)

    def step_logits(self, tokens: Tensor, step: CacheStep) -> Tensor:
        """Return the logits [B, V] after one more token [B, 1], for a model on one rank, without work for the host."""
        with self._kernels():
            hidden = self._hidden(tokens, step)
        assert hidden is not None
        return self.next_logits(hidden[:, -1], tokens.size(0))

    def _hidden(self, tokens: Tensor, cache: KVCache | CacheStep | None) -> Tensor | None:
        if isinstance(self.network, CalledNetwork):
            return self.network.forward(tokens)
        return forward_over_stages(self.network, tokens, Context(cache=cache), self.dtype)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, S, V/tp] of hidden states [B, S, H], on the stage of the head."""
        if isinstance(self.network, CalledNetwork):
            return hidden
        return self.network.head.logits(hidden)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache of this rank's blocks and heads for `batch` sequences of at most `capacity` tokens."""
        assert isinstance(self.network, Stage), "a network that is only called keeps nothing"
        return self.network.new_cache(batch, capacity, device=self.device, dtype=self.dtype)

    def _kernels(self) -> AbstractContextManager[None]:
        """Return the context in which attention takes one of `_KERNELS`."""
        if not has_fast_path("attention_kernels", self.device):
            return nullcontext()
        return sdpa_kernel(list(_KERNELS), set_priority=True)

    def _from_last_stage(self, x: Tensor) -> None:
        """Copy `x` from the stage that holds the head to all stages, in place."""
        if isinstance(self.network, Stage):
            broadcast_from_head(self.network, x)


class CachedDecoding:
    """Batch with a cache of keys and values, which computes each token once.

    Steps after the prompt are recorded if the runner is for recorded steps. The exception is padding that makes rows
    longer than the network is meant for: there, attention's patterns of blocks depend on the length.
    """

    def __init__(self, runner: ModelRunner, lengths: Sequence[int], capacity: int) -> None:
        """Make an empty cache; see `LanguageModel.begin`."""
        architecture = runner.architecture
        longest = architecture.max_positions - architecture.soft_prompt_tokens
        self.runner = runner
        meant = capacity + architecture.soft_prompt_tokens
        self.recorded = runner.recorded and capacity <= longest
        if self.recorded:
            capacity = min(-(-capacity // _SLOTS) * _SLOTS, longest)
        self._step: RecordedStep | None = None
        self.cache = runner.new_cache(len(lengths), capacity)
        self.cache.longest = meant
        padding = max(lengths) - torch.tensor(lengths)
        if padding.any():
            self.cache.reset(padding.to(runner.device))

    def feed(self, tokens: Tensor) -> Tensor:
        """Read tokens [B, S] and return the logits [B, V] after the last."""
        if self.recorded and self.cache.begun and tokens.size(1) == 1:
            report_progress()
            if self._step is None or not self._step.continues(self.cache):
                self._step = RecordedStep(self.runner.step_logits, self.cache)
            return self._step(tokens)
        self._step = None
        hidden = self.runner.hidden(tokens, self.cache)
        if hidden is not None:
            hidden = hidden[:, -1]
        return self.runner.next_logits(hidden, tokens.size(0))

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows [B']."""
        self.cache.reorder(rows)


class RecomputedDecoding:
    """Batch that is computed from its beginning at each step. It is slow, and a reference for the cache.

    Rows are padded on the right, where causal attention ignores the padding. Rows of the network's greatest length have
    ended; they stay as they are until the others end.
    """

    def __init__(self, runner: ModelRunner, lengths: Sequence[int]) -> None:
        """Start with no tokens; see `LanguageModel.begin`."""
        self.runner = runner
        self.lengths = list(lengths)
        self.rows: list[list[int]] = []

    def feed(self, tokens: Tensor) -> Tensor:
        """Read tokens [B, S] and return the logits [B, V] after the last."""
        if self.rows:
            for old, new in zip(self.rows, tokens, strict=True):
                old += new.tolist()
                del old[self.runner.max_length :]
        else:
            for new, length in zip(tokens, self.lengths, strict=True):
                self.rows.append(new[len(new) - length :].tolist())
        lengths = torch.tensor(list(map(len, self.rows)))
        padded = torch.zeros(len(self.rows), int(lengths.max()), dtype=torch.long)
        for target, row in zip(padded, self.rows, strict=True):
            target[: len(row)] = torch.tensor(row)
        hidden = self.runner.hidden(padded.to(self.runner.device))
        if hidden is not None:
            rows = torch.arange(len(self.rows), device=hidden.device)
            hidden = hidden[rows, (lengths - 1).to(hidden.device)]
        return self.runner.next_logits(hidden, len(self.rows))

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows [B']."""
        self.rows = [list(self.rows[row]) for row in rows.tolist()]


def most_probable(logits: Tensor, grid: ParallelGrid) -> Tensor:
    """Return the id of the largest logit over all tensor ranks.

    Args:
        logits: Logits [B, S, V/tp].
        grid: Process groups.

    Returns:
        Ids [B, S]; if logits are equal, the lowest one.
    """
    values, ids = logits.max(dim=-1)
    if grid.tp_size == 1:
        return ids
    ids = ids + grid.tp_rank * logits.size(-1)
    all_values = gather_tensor_ranks(values, grid)  # [tp, B, S]
    all_ids = gather_tensor_ranks(ids, grid)
    best = all_values.argmax(dim=0, keepdim=True)
    return all_ids.gather(0, best).squeeze(0)
