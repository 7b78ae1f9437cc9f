"""Batches: which samples a rank reads at which step, and the tensors made of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from neox.errors import DataError
from neox.log import get_logger

_LOG = get_logger(__name__)

Batch = dict[str, torch.Tensor]


class SampleSource(Protocol):
    """What a batch is read from: `GPTDataset` or `BlendedDataset`. num_samples: how many can be read."""

    seq_length: int
    num_samples: int

    def read(self, indices: np.ndarray) -> np.ndarray: ...


class BatchIterator:
    """An endless iterator over this data rank's micro batches; its position is a plain number.

    Micro batch n of all data ranks together is the samples [n * B * dp, (n + 1) * B * dp), of which rank r takes the
    r-th B (gpt-neox's order); a step with gradient accumulation takes that many micro batches one after the other.
    micro_batch_size: B, samples of one micro batch on one rank. start: the micro batch to begin with, so that a resumed
        run sees what an undisturbed one would. When the samples end it begins again, with a warning.
    num_workers: threads that read ahead (each up to two batches); 0 reads when asked.
    eod: end-of-document id; with `eod_mask_loss` the positions whose input is `eod` do not count in the loss.
    vocab_size: ids from it on are refused.
    mark_documents: batches also say where documents start, as `document_starts` [B, S].
    """

    def __init__(
        self,
        dataset: SampleSource,
        micro_batch_size: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        start: int = 0,
        num_workers: int = 2,
        eod: int | None = None,
        eod_mask_loss: bool = False,
        vocab_size: int | None = None,
        mark_documents: bool = False,
    ) -> None:
        if (eod_mask_loss or mark_documents) and eod is None:
            key = "eod_mask_loss" if eod_mask_loss else "reset_attention_mask"
            raise DataError(f'"{key}" needs the id of the end-of-document token')
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.masked_id = eod if eod_mask_loss else None
        self.closing_id = eod if mark_documents else None
        self.vocab_size = vocab_size
        self.position = start
        self._global_size = micro_batch_size * dp_size
        self._batches = dataset.num_samples // self._global_size
        if self._batches == 0:
            raise DataError(
                f"the data gives {dataset.num_samples} samples, fewer than one micro batch of all ranks "
                f"({self._global_size})"
            )
        self._workers = num_workers
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[Batch]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return `tokens` and `labels` (int64) and `loss_mask` (float32), each [B, S], on the CPU, and
        `document_starts` (int64) where that was asked for."""
        position = self.position
        if position and position % self._batches == 0:
            _LOG.warning("all %d micro batches were read; beginning again with the first", self._batches)
        if self._workers == 0:
            batch = self.read(position)
        else:
            self._pool = self._pool or ThreadPoolExecutor(self._workers, thread_name_prefix="batches")
            while len(self._ahead) <= 2 * self._workers:
                self._ahead.append(self._pool.submit(self.read, position + len(self._ahead)))
            batch = self._ahead.popleft().result()
        self.position = position + 1
        return batch

    def sample_numbers(self, position: int) -> np.ndarray:
        """The samples of micro batch `position` that belong to this rank, int64 [B]."""
        first = (position % self._batches) * self._global_size + self.dp_rank * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size)

    def read(self, position: int) -> Batch:
        """Read micro batch `position`, whatever the iterator's own position."""
        rows = self.dataset.read(self.sample_numbers(position))  # [B, S + 1], in the file's dtype
        if self.vocab_size is not None and (rows.max() >= self.vocab_size or rows.min() < 0):
            raise DataError(
                f"the data holds token ids from {rows.min()} to {rows.max()}, but the tokenizer has {self.vocab_size} "
                "ids: it was made with another tokenizer; preprocess it again, or name the tokenizer it was made with"
            )
        tokens = torch.from_numpy(rows[:, :-1].astype(np.int64))
        labels = torch.from_numpy(rows[:, 1:].astype(np.int64))
        loss_mask = torch.ones(tokens.shape) if self.masked_id is None else (tokens != self.masked_id).float()
        batch = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if self.closing_id is not None:
            batch["document_starts"] = document_starts(tokens, self.closing_id)
        return batch

    def close(self) -> None:
        """Stop the reading threads."""
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def document_starts(tokens: torch.Tensor, eod: int) -> torch.Tensor:
    """Return the place in its row of the first token of each token's document: [B, S] -> int64 [B, S].

    An end-of-document token belongs to the document it ends; a document cut by the row's beginning starts at 0.
    """
    after_end = torch.zeros_like(tokens)
    places = torch.arange(1, tokens.shape[1])
    after_end[:, 1:] = torch.where(tokens[:, :-1] == eod, places, 0)
    return after_end.cummax(dim=1).values
