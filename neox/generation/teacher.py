"""Computation of a teacher's largest logits for the samples of a distillation run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from neox.data.batches import BatchIterator
from neox.data.run_data import build_data_iterators, sample_counts
from neox.data.teacher_file import TeacherIdentity, TeacherWriter, sample_batches, sample_hashes
from neox.errors import ConfigError
from neox.generation.runner import ModelRunner
from neox.log import progress
from neox.plan import RunPlan
from neox.tokenizer import Tokenizer


class _Split(NamedTuple):
    """Split of a run's data.

    Attributes:
        name: Name of the split in file names.
        batches: The run's iterator over its batches.
        samples: Number of samples that the run reads.
    """

    name: str
    batches: BatchIterator
    samples: int


def write_teacher_logits(
    run: RunPlan, tokenizer: Tokenizer, teacher: ModelRunner, identity: TeacherIdentity, directory: Path, *, batch: int
) -> int:
    """Compute the teacher's largest logits for all samples that a run reads, and write them to files.

    Args:
        run: Plan of the run, without `teacher_logits`.
        tokenizer: Tokenizer of run and teacher.
        teacher: The teacher, on one rank.
        identity: Identity of the teacher.
        directory: Directory to write.
        batch: Number of samples in a forward pass.

    Returns:
        Number of samples.

    Raises:
        ConfigError: If samples are longer than the teacher's maximum length.
        DataError: If data is missing or damaged, or the directory cannot be written.
    """
    length = run.batch_schedule.full_length
    if length > teacher.max_length:
        raise ConfigError(
            f"the run's samples have {length:,} tokens (seq_length), but the teacher reads {teacher.max_length:,} at "
            "most: use a teacher that reads longer texts, or a smaller seq_length"
        )
    writer = TeacherWriter(directory, identity)
    total = 0
    for split in _splits(run, tokenizer):
        length = split.batches.dataset.seq_length
        rows = writer.rows(split.name, split.samples, length)
        with progress(f"teacher, {split.name}", split.samples, "samples") as bar:
            for numbers in sample_batches(split.samples, batch):
                sampled = split.batches.dataset.read(numbers).astype(np.int64)
                tokens = sampled[:, :-1]
                starts = None
                if split.batches.mark_documents:
                    starts = split.batches.document_starts(numbers, sampled)[:, :-1].to(teacher.device)
                on_device = torch.from_numpy(tokens).to(teacher.device)
                ids, logits = teacher.largest_logits(on_device, starts, identity.vocab_size, identity.top_k)
                rows.ids[numbers] = ids.cpu().numpy()
                rows.logits[numbers] = logits.cpu().numpy()
                rows.hashes[numbers] = sample_hashes(tokens)
                bar.update(len(numbers))
        total += split.samples
    writer.commit()
    return total


def _splits(run: RunPlan, tokenizer: Tokenizer) -> Iterator[_Split]:
    """Yield the splits that a run reads."""
    data = build_data_iterators(run, tokenizer=tokenizer)
    counts = sample_counts(run.config.training, run.batch.train_batch_size)
    train = run.batch_schedule.samples(run.config.training.train_iters or 0)
    yield _Split("train", data.train, min(train, data.train.dataset.num_samples))
    for kind, sets, count in (("valid", data.valid, counts.valid), ("test", data.test, counts.test)):
        for item in sets:
            name = kind if item.name is None else f"{kind}-{item.name}"
            stored = item.batches.dataset.num_samples
            yield _Split(name, item.batches, stored if count is None else min(count, stored))
