"""Batches of one data-parallel rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from neox.config.sections.data import DocumentBoundaries
from neox.data.answer_pairs.pair_rows import NO_SLOT, PreferenceDataset
from neox.data.samples.rows import RowLayout
from neox.errors import DataError
from neox.log import get_logger

_log = get_logger(__name__)

Batch = dict[str, torch.Tensor]


class SampleSource(Protocol):
    """Source of samples: a `GPTDataset`, a `SentencePairDataset`, or a `BlendedDataset` of them.

    Attributes:
        seq_length: Number of tokens of a sample's input.
        num_samples: Number of samples.
    """

    seq_length: int
    num_samples: int

    @property
    def has_labels(self) -> bool:
        """Whether some tokens are not predicted, so that the labels differ from the tokens."""

    def read_labels(self, indices: np.ndarray) -> np.ndarray:
        """Return the label of each token [len(indices), seq_length + 1], negative if the token is not predicted."""

    def layout(self, indices: np.ndarray) -> RowLayout:
        """Return where the documents of samples start, and their padding, in rows of seq_length + 1 tokens."""

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return samples: token ids [len(indices), seq_length + 1], or rows of a `SentencePairDataset`."""


class BatchIterator:
    """Endless iterator over the micro batches of one data-parallel rank.

    The ranks divide the samples in gpt-neox's order, here for B = 2 samples and two ranks:

        samples       0 1 | 2 3 | 4 5 | 6 7 | 8 9 | ...
        rank           0     1     0     1     0
        micro batch    0     0     1     1     2

    A micro batch is a function of its number, so an iterator needs no saved state. A step with gradient accumulation
    takes several micro batches in a row. After the last sample the iterator starts again, with a warning.

    With `whole`, the last samples are read too if they do not fill a micro batch of all ranks. Copies of the last one
    stand in the empty places, and their labels do not count:

        samples       0 1 | 2 3 | 4 4           five samples
        rank           0     1     0     1
        micro batch    0     0     1     1      rank 1 reads copies only

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
        label_documents: bool = False,
        mark_padding: bool = False,
        boundaries: DocumentBoundaries = "index",
        whole: bool = False,
    ) -> None:
        """Set up the iterator.

        Args:
            dataset: Source of the samples.
            micro_batch_size: B, number of samples of one micro batch on one rank.
            dp_rank: Number of this data-parallel rank.
            dp_size: Number of data-parallel ranks.
            start: Number of the first micro batch. A resumed run continues where the interrupted one stopped.
            num_workers: Number of threads that read ahead, each up to two batches. With 0, batches are read on demand.
            eod: End-of-document id.
            eod_mask_loss: Whether the last token of a document predicts nothing.
            vocab_size: Number of ids. Each batch is checked for other ids.
            mark_documents: Whether batches have `document_starts`.
            label_documents: Whether they have `label_documents` if `eod_mask_loss` keeps labels, but no attention,
                within documents. Labels further ahead need it.
            mark_padding: Whether batches have `lengths`.
            boundaries: Where documents end: where they were joined, or at `eod`.
            whole: Whether samples that do not fill a micro batch of all ranks are read.

        Raises:
            DataError: If there are fewer samples than one micro batch of all ranks, or `eod` is needed and missing.
        """
        if eod is None and boundaries == "eod" and (eod_mask_loss or mark_documents):
            key = "eod_mask_loss" if eod_mask_loss else "reset_attention_mask"
            raise DataError(f'"{key}" with document_boundaries: eod needs the id of the end-of-document token')
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.eod = eod
        self.eod_mask_loss = eod_mask_loss
        self.mark_documents = mark_documents
        self.label_documents = label_documents
        self.mark_padding = mark_padding
        self.boundaries = boundaries
        self.vocab_size = vocab_size
        self.position = start
        self._global_size = micro_batch_size * dp_size
        self._batches = dataset.num_samples // self._global_size
        if whole:
            self._batches = -(-dataset.num_samples // self._global_size)
        if self._batches == 0:
            raise DataError(
                f"the data has {dataset.num_samples} samples, fewer than one micro batch of all ranks "
                f"({self._global_size})"
            )
        self._workers = num_workers
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[Batch]] = deque()

    @property
    def micro_batches(self) -> int:
        """Number of micro batches of one pass over the samples."""
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next micro batch, in CPU memory.

        Returns:
            Tensors [B, S]: `tokens` and `labels` (int64), `loss_mask` (float32) and, with `mark_documents`,
            `document_starts` (int64), under the name `label_documents` if only labels need them. With `mark_padding`
            also `lengths`, the tokens before padding (int64) [B].
        """
        position = self.position
        if position and position % self._batches == 0:
            _log.warning("all %d micro batches were read: starting again with the first", self._batches)
        if self._workers == 0:
            batch = self.read(position)
        else:
            self._read_ahead(position)
            try:
                batch = self._ahead[0].result()
            except BaseException:
                self._ahead.clear()  # the next call reads this micro batch again
                raise
            self._ahead.popleft()
        self.position = position + 1
        return batch

    def seek(self, position: int) -> None:
        """Continue with micro batch `position`. Batches that were read ahead are dropped."""
        self._ahead.clear()
        self.position = position

    def _read_ahead(self, position: int) -> None:
        """Start reading of micro batches from `position` on, which the queue does not hold yet."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="batches")
        while len(self._ahead) <= 2 * self._workers:
            self._ahead.append(self._pool.submit(self.read, position + len(self._ahead)))

    def sample_numbers(self, position: int) -> np.ndarray:
        """Return the sample numbers of micro batch `position` on this rank, int64 [B]."""
        return np.minimum(self._places(position), self.dataset.num_samples - 1)

    def _places(self, position: int) -> np.ndarray:
        """Return the numbers of a micro batch's places, int64 [B]. Those behind the last sample hold a copy of it."""
        first = (position % self._batches) * self._global_size + self.dp_rank * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size)

    def counted(self, position: int) -> torch.Tensor:
        """Return which samples of micro batch `position` count, 1 or 0, fp32 [B, 1]. Copies of the last one do not."""
        return torch.from_numpy(self._places(position) < self.dataset.num_samples).float().unsqueeze(1)

    def read(self, position: int) -> Batch:
        """Read micro batch `position`. Raises DataError for ids outside the vocabulary."""
        samples = self.sample_numbers(position)
        rows = self.dataset.read(samples)  # [B, S + 1], in the file's dtype
        self._check_ids(rows)
        tokens = torch.from_numpy(rows[:, :-1].astype(np.int64))
        loss_mask = self.counted(position).expand(tokens.shape).clone()
        starts = None
        if self.mark_documents or self.eod_mask_loss:
            starts = self.document_starts(samples, rows)
            loss_mask[self._predicts_other_document(tokens, starts)] = 0
        if self.dataset.has_labels:
            rows = self.dataset.read_labels(samples)
            loss_mask *= torch.from_numpy(rows[:, 1:] >= 0)
            rows = np.maximum(rows, 0)
            self._check_ids(rows)
        labels = torch.from_numpy(rows[:, 1:].astype(np.int64))
        batch = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if self.mark_documents:
            assert starts is not None
            batch["document_starts"] = starts[:, :-1]
        elif starts is not None and self.label_documents:
            batch["label_documents"] = starts[:, :-1]
        if self.mark_padding:
            batch["lengths"] = torch.from_numpy(self.dataset.layout(samples).lengths).clamp(max=tokens.shape[1])
        return batch

    def document_starts(self, samples: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """Return the index in the row at which the document of each token starts, int64 [B, S + 1].

        Args:
            samples: Numbers of samples [B].
            rows: Their tokens [B, S + 1].
        """
        if self.boundaries == "index":
            return torch.from_numpy(self.dataset.layout(samples).starts)
        assert self.eod is not None
        return document_starts(torch.from_numpy(rows.astype(np.int64)), self.eod)

    def _predicts_other_document(self, tokens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return where the next token begins another document, and is not predicted for that reason, bool [B, S].

        As in gpt-neox, an end-of-document token predicts the first token of the next document, unless `eod_mask_loss`
        is set. A document that ends with any other token says nothing about the one that was joined to it.
        """
        is_last = starts[:, 1:] != starts[:, :-1]
        if self.eod_mask_loss or self.eod is None:
            return is_last
        return is_last & (tokens != self.eod)

    def _check_ids(self, rows: np.ndarray) -> None:
        """Raise DataError for ids outside the vocabulary."""
        if self.vocab_size is None:
            return
        low = rows.min()
        high = rows.max()
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"the data holds token ids from {low} to {high}, but this run has {self.vocab_size} ids: it was made "
                "with another tokenizer (preprocess it again, or set the tokenizer it was made with), or holds tokens "
                "for which an imported model has no rows (tools/resize_vocabulary.py gives them some)"
            )

    def close(self) -> None:
        """Stop the reading threads."""
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


class MaskedBatchIterator(BatchIterator):
    """Endless iterator over the micro batches of masked language modelling, with the fields of `MaskedLMBatch`."""

    def __init__(
        self,
        split_rows: Callable[[np.ndarray], dict[str, np.ndarray]],
        dataset: SampleSource,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Set up the iterator.

        Args:
            split_rows: Function that splits the rows of samples into fields.
            dataset: Source of the samples.
            args: Further arguments of `BatchIterator`.
            kwargs: Keyword arguments of `BatchIterator`.
        """
        super().__init__(dataset, *args, **kwargs)
        self.split_rows = split_rows

    def read(self, position: int) -> Batch:
        """Read micro batch `position`. Raises DataError for ids outside the vocabulary."""
        fields = self.split_rows(self.dataset.read(self.sample_numbers(position)))
        self._check_ids(np.concatenate([fields["tokens"], fields["masked_ids"]], axis=1))
        batch = {name: torch.from_numpy(np.ascontiguousarray(field)) for name, field in fields.items()}
        batch["masked_weights"] = batch["masked_weights"].float()
        return batch


class PreferenceBatchIterator(BatchIterator):
    """Endless iterator over micro batches of rows of pairs."""

    dataset: PreferenceDataset

    def read(self, position: int) -> Batch:
        """Read micro batch `position`. Raises DataError for ids outside the vocabulary."""
        fields = self.dataset.fields(self.sample_numbers(position))
        if self.mark_padding:
            fields["lengths"] = (fields["slots"] != NO_SLOT).sum(axis=1)
        self._check_ids(fields["tokens"])
        self._check_ids(fields["labels"])
        batch = {name: torch.from_numpy(field) for name, field in fields.items()}
        batch["pair_mask"] *= self.counted(position)
        return batch


def document_starts(tokens: torch.Tensor, eod: int) -> torch.Tensor:
    """Return, for each token, the position in the row where its document starts if documents end at `eod`.

    Args:
        tokens: Token ids [B, S].
        eod: End-of-document id. It belongs to the document that it ends.

    Returns:
        Positions, int64 [B, S]. They are 0 for a document that starts before the row.
    """
    after_end = torch.zeros_like(tokens)
    positions = torch.arange(1, tokens.shape[1])
    after_end[:, 1:] = torch.where(tokens[:, :-1] == eod, positions, 0)
    return after_end.cummax(dim=1).values
