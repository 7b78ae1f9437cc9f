"""Batches: gpt-neox's order over ranks, steps and resumes; masks; ids that do not fit."""

import logging

import numpy as np
import pytest
import torch

from neox.data.batches import BatchIterator
from neox.errors import DataError
from tests.errors import raises_naming


class Counting:
    """Sample i is i, i + 1, ..., i + seq_length."""

    def __init__(self, samples: int, seq_length: int = 4) -> None:
        self.num_samples, self.seq_length = samples, seq_length
        self.has_labels = False

    def read(self, indices):
        return (np.asarray(indices)[:, None] + np.arange(self.seq_length + 1)).astype(np.uint16)


def firsts(iterator, batches):
    result = [next(iterator)["tokens"][:, 0].tolist() for _ in range(batches)]
    iterator.close()
    return result


def test_a_batch_has_tokens_labels_and_a_mask():
    batch = next(BatchIterator(Counting(10), 2, num_workers=0))
    assert batch["tokens"].tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [2, 3, 4, 5]]
    assert batch["loss_mask"].tolist() == [[1.0] * 4] * 2
    assert [batch[name].dtype for name in batch] == [torch.int64, torch.int64, torch.float32]
    assert all(tensor.is_contiguous() for tensor in batch.values())


def test_the_end_of_a_document_can_be_left_out_of_the_loss():
    batch = next(BatchIterator(Counting(10), 2, num_workers=0, eod=3, eod_mask_loss=True, boundaries="eod"))
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 1]]  # where the input is the end, as in gpt-neox
    with raises_naming(DataError, "eod_mask_loss"):
        BatchIterator(Counting(10), 2, eod_mask_loss=True, boundaries="eod")


def test_labels_further_ahead_know_their_document():
    """Attention crosses documents, and labels do not: only then the batch says where documents start."""
    keys = {"num_workers": 0, "eod": 3, "boundaries": "eod", "label_documents": True}
    batch = next(BatchIterator(Counting(10), 2, eod_mask_loss=True, **keys))
    assert batch["label_documents"].tolist() == [[0, 0, 0, 0], [0, 0, 0, 3]]
    assert "document_starts" not in batch
    assert "label_documents" not in next(BatchIterator(Counting(10), 2, **keys))
    both = next(BatchIterator(Counting(10), 2, eod_mask_loss=True, mark_documents=True, **keys))
    assert "label_documents" not in both
    assert both["document_starts"].tolist() == batch["label_documents"].tolist()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_ranks_share_each_micro_batch_and_any_position_can_be_resumed(num_workers):
    ranks = [BatchIterator(Counting(64), 2, dp_rank=r, dp_size=3, num_workers=num_workers) for r in range(3)]
    seen = [firsts(iterator, 8) for iterator in ranks]
    for n in range(8):
        assert [first for rank in seen for first in rank[n]] == list(range(6 * n, 6 * n + 6))
    resumed = BatchIterator(Counting(64), 2, dp_rank=1, dp_size=3, start=5, num_workers=num_workers)
    assert firsts(resumed, 3) == seen[1][5:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_after_the_last_whole_batch_it_starts_again_with_a_warning(num_workers, caplog):
    with caplog.at_level(logging.WARNING, logger="neox"):
        assert firsts(BatchIterator(Counting(11), 4, num_workers=num_workers), 5) == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [0, 1, 2, 3],
        ]
    assert caplog.text.count("starting again") == 2
    assert firsts(BatchIterator(Counting(11), 4, start=7, num_workers=num_workers), 1) == [[4, 5, 6, 7]]


def test_too_little_data_and_foreign_ids_are_refused():
    with raises_naming(DataError, 7, 8):
        BatchIterator(Counting(7), 4, dp_size=2)
    iterator = BatchIterator(Counting(20), 4, vocab_size=10)
    next(iterator)
    with raises_naming(DataError, 4, 11, 10):
        next(iterator)
    iterator.close()


def test_a_pass_over_all_samples_counts_each_once_on_any_number_of_ranks():
    """11 samples fill two micro batches of three ranks with 2 samples each, but for the last place."""
    for ranks, size in ((1, 11), (2, 4), (3, 2), (4, 16)):
        counted = []
        for rank in range(ranks):
            iterator = BatchIterator(Counting(11), size, dp_rank=rank, dp_size=ranks, num_workers=0, whole=True)
            assert iterator.micro_batches == -(-11 // (ranks * size))
            for _ in range(iterator.micro_batches):
                batch = next(iterator)
                assert batch["tokens"].shape == (size, 4)
                for row, mask in zip(batch["tokens"], batch["loss_mask"], strict=True):
                    assert len(mask.unique()) == 1
                    if mask[0]:
                        counted.append(int(row[0]))
        assert sorted(counted) == list(range(11)), (ranks, size)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_read_that_fails_moves_no_later_batch(num_workers):
    """A micro batch is a function of its number: whoever catches an error gets the same one when it asks again."""

    class Unreliable(Counting):
        fails = True

        def read(self, indices):
            if self.fails and 4 in np.asarray(indices):
                raise OSError("the disk is away")
            return super().read(indices)

    source = Unreliable(20)
    iterator = BatchIterator(source, 2, num_workers=num_workers)
    found = [next(iterator)["tokens"][:, 0].tolist() for _ in range(2)]
    with pytest.raises(OSError, match="away"):
        next(iterator)
    source.fails = False
    found += firsts(iterator, 3)
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
