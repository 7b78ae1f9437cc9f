"""Batches of one data-parallel rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from neox.errors import DataError
from neox.log import get_logger

_log = get_logger(__name__)

Batch = dict[str, torch.Tensor]


class SampleSource(Protocol):
    """Source of a batch's samples: `GPTDataset`, `SentencePairDataset`, or a `BlendedDataset` of them."""

    seq_length: int
    num_samples: int

    @property
    def has_labels(self) -> bool:
        """Whether some tokens are not to be predicted, as `read_labels` says."""

    def read_labels(self, indices: np.ndarray) -> np.ndarray:
        """Return labels [len(indices), seq_length + 1] at the places of their tokens, below 0 where left out."""

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return samples `indices`: [len(indices), seq_length + 1], or rows of `SentencePairDataset`."""


class BatchIterator:
    """Endless iterator over the micro batches of one data-parallel rank.

    Micro batch n of all ranks together is the samples [n * B * dp_size, (n + 1) * B * dp_size), of which rank r takes
    the r-th B (gpt-neox's order). A step with gradient accumulation takes several micro batches in a row. After the
    last sample it starts again, with a warning.

    Attributes:
        position: Number of the next micro batch.
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
        """Set up the iterator.

        Args:
            dataset: Source of the samples.
            micro_batch_size: B, samples of one micro batch on one rank.
            dp_rank: This data-parallel rank.
            dp_size: Number of data-parallel ranks.
            start: First micro batch, so that a resumed run reads what an uninterrupted one would.
            num_workers: Threads that read ahead, each up to two batches; 0 reads on demand.
            eod: End-of-document id.
            eod_mask_loss: Whether positions whose input is `eod` are left out of the loss.
            vocab_size: Limit of the ids, which are checked in each batch.
            mark_documents: Whether batches hold `document_starts`.

        Raises:
            DataError: If the data give less than one micro batch, or `eod` is needed and missing.
        """
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
        """Return the next micro batch, on the CPU.

        Returns:
            `tokens` and `labels` (int64), `loss_mask` (float32) and, if asked for, `document_starts` (int64), each
            [B, S].
        """
        position = self.position
        if position and position % self._batches == 0:
            _log.warning("all %d micro batches were read: starting again with the first", self._batches)
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
        """Return the samples of micro batch `position` of this rank, int64 [B]."""
        first = (position % self._batches) * self._global_size + self.dp_rank * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size)

    def read(self, position: int) -> Batch:
        """Read micro batch `position`. Raises DataError for ids outside the vocabulary."""
        samples = self.sample_numbers(position)
        rows = self.dataset.read(samples)  # [B, S + 1], in the file's dtype
        self._check_ids(rows)
        tokens = torch.from_numpy(rows[:, :-1].astype(np.int64))
        loss_mask = torch.ones(tokens.shape) if self.masked_id is None else (tokens != self.masked_id).float()
        if self.dataset.has_labels:
            rows = self.dataset.read_labels(samples)
            loss_mask *= torch.from_numpy(rows[:, 1:] >= 0)
            rows = np.maximum(rows, 0)
            self._check_ids(rows)
        labels = torch.from_numpy(rows[:, 1:].astype(np.int64))
        batch = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if self.closing_id is not None:
            batch["document_starts"] = document_starts(tokens, self.closing_id)
        return batch

    def _check_ids(self, rows: np.ndarray) -> None:
        if self.vocab_size is not None and (rows.max() >= self.vocab_size or rows.min() < 0):
            raise DataError(
                f"the data holds token ids from {rows.min()} to {rows.max()}, but the tokenizer has {self.vocab_size} "
                "ids: it was made with another tokenizer; preprocess it again, or set the tokenizer it was made with"
            )

    def close(self) -> None:
        """Stop the reading threads."""
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


class MaskedBatchIterator(BatchIterator):
    """Endless iterator over the micro batches of masked language modelling: the fields of `MaskedLMBatch` by name."""

    def __init__(
        self,
        split_rows: Callable[[np.ndarray], dict[str, np.ndarray]],
        dataset: SampleSource,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Set up the iterator.

        Args:
            split_rows: Takes the rows of samples apart.
            dataset: Source of the samples.
            args: As of `BatchIterator`.
            kwargs: As of `BatchIterator`.
        """
        super().__init__(dataset, *args, **kwargs)
        self.split_rows = split_rows

    def read(self, position: int) -> Batch:
        """Read micro batch `position`. Raises DataError for ids outside the vocabulary."""
        fields = self.split_rows(self.dataset.read(self.sample_numbers(position)))
        self._check_ids(np.concatenate([fields["tokens"], fields["masked_ids"]], axis=1))
        batch = {name: torch.from_numpy(np.ascontiguousarray(field)) for name, field in fields.items()}
        return {**batch, "masked_weights": batch["masked_weights"].float()}


def document_starts(tokens: torch.Tensor, eod: int) -> torch.Tensor:
    """Return the position in its row of the first token of each token's document.

    Args:
        tokens: Token ids [B, S].
        eod: End-of-document id, which belongs to the document it ends.

    Returns:
        Positions, int64 [B, S]; 0 for a document that began before the row.
    """
    after_end = torch.zeros_like(tokens)
    positions = torch.arange(1, tokens.shape[1])
    after_end[:, 1:] = torch.where(tokens[:, :-1] == eod, positions, 0)
    return after_end.cummax(dim=1).values
