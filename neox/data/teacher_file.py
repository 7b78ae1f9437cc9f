"""Files with a teacher's largest logits for the samples of a run, and batches that include them.

A directory holds `identity.json` and three arrays per split: `SPLIT.ids.npy` and `SPLIT.logits.npy` [samples, S, K],
and `SPLIT.hashes.npy` [samples]. Rows are in the order in which the run reads the samples. The hash of each sample's
tokens ensures that the logits are never used with other samples.

Legend: B samples, S tokens of a sample, K logits of the teacher.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from neox.data.batches import Batch, BatchIterator, SampleSource
from neox.errors import DataError, os_errors
from neox.files import write_text
from neox.tokenizer import Tokenizer

_IDENTITY = "identity.json"


@dataclass(frozen=True)
class TeacherIdentity:
    """Teacher that stored logits were computed with.

    Attributes:
        weights: Hash of the teacher's weights.
        vocab_size: Vocabulary size of its tokenizer.
        tokenizers: Hashes of its tokenizer; empty if its identity is unknown.
        top_k: K.
    """

    weights: str
    vocab_size: int
    tokenizers: tuple[str, ...]
    top_k: int


class TeacherRows(NamedTuple):
    """Arrays of a split.

    Attributes:
        ids: Token ids in descending order of their logits, int32 [samples, S, K].
        logits: Their logits, fp32 [samples, S, K].
        hashes: Hash of each sample's tokens, uint64 [samples].
    """

    ids: np.ndarray
    logits: np.ndarray
    hashes: np.ndarray


def sample_hashes(tokens: np.ndarray) -> np.ndarray:
    """Return a hash of each sample's tokens [B, S], uint64 [B]."""
    rows = np.ascontiguousarray(tokens, dtype="<i8")
    found = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
    return np.frombuffer(b"".join(found), dtype="<u8")


class TeacherWriter:
    """Writer of a directory of logits, which gets its final name when it is complete.

    Args:
        directory: The directory.
        identity: The teacher.

    Raises:
        DataError: If the directory exists, or cannot be written.
    """

    def __init__(self, directory: Path, identity: TeacherIdentity) -> None:
        if directory.exists():
            raise DataError(f"{directory} exists: remove it, or choose another directory for the teacher's logits")
        self._directory = directory
        self._partial = directory.with_name(f"{directory.name}.incomplete")
        self._identity = identity
        with os_errors(DataError, f"{self._partial} cannot be written"):
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)

    def rows(self, split: str, samples: int, length: int) -> TeacherRows:
        """Create the arrays of a split; the caller fills them.

        Raises:
            DataError: If the disk has too little space, or cannot be written.
        """
        shape = (samples, length, self._identity.top_k)
        needed = 8 * prod(shape) + 8 * samples
        free = shutil.disk_usage(self._partial).free
        if needed > free:  # writing to a memory-mapped file on a full disk would kill the process
            raise DataError(
                f"the teacher's logits for the {split} data take {needed / 1e9:.1f} GB, but {self._directory.parent} "
                f"has only {free / 1e9:.1f} GB free: choose another directory, a smaller --top-k, or fewer samples"
            )
        with os_errors(DataError, f"{self._partial} cannot be written"):
            return TeacherRows(
                self._array(split, "ids", np.int32, shape),
                self._array(split, "logits", np.float32, shape),
                self._array(split, "hashes", np.uint64, (samples,)),
            )

    def _array(self, split: str, name: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
        path = self._partial / f"{split}.{name}.npy"
        array: np.ndarray = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        return array

    def commit(self) -> None:
        """Give the complete directory its final name."""
        with os_errors(DataError, f"{self._directory} cannot be written"):
            write_text(self._partial / _IDENTITY, json.dumps(asdict(self._identity), indent=2) + "\n")
            self._partial.rename(self._directory)


class TeacherFile:
    """Reader of a teacher's logits for one split of a run.

    Args:
        directory: Directory written by `TeacherWriter`.
        split: `train`, `valid` or `test`.
        vocab_size: Vocabulary size of the run.
        tokenizer: Tokenizer of the run.
        top_k: Number of logits to read per token, the largest ones.

    Raises:
        DataError: If files are missing or damaged, the teacher has another vocabulary, or too few logits are stored.
    """

    def __init__(self, directory: Path, split: str, vocab_size: int, tokenizer: Tokenizer, top_k: int) -> None:
        self._directory = directory
        self._split = split
        self._top_k = top_k
        identity = _read_identity(directory)
        same_tokenizer = not identity.tokenizers or not set(identity.tokenizers).isdisjoint(tokenizer.known_hashes)
        if identity.vocab_size != vocab_size or not same_tokenizer:
            raise DataError(
                f"teacher_logits: the teacher of {directory} has another vocabulary ({identity.vocab_size:,} tokens; "
                f"this run has {vocab_size:,}): use a teacher with the same tokenizer"
            )
        if identity.top_k < top_k:
            raise DataError(
                f"teacher_logits: {directory} has {identity.top_k:,} logits per token, but distillation_top_k is "
                f"{top_k:,}: set it to {identity.top_k:,}, or compute the teacher's logits again"
            )
        self._rows = TeacherRows(*(self._open(name) for name in TeacherRows._fields))

    def _open(self, name: str) -> np.ndarray:
        path = self._directory / f"{self._split}.{name}.npy"
        try:
            array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise DataError(
                f"{path} is missing: compute the teacher's logits for the {self._split} data too "
                "(tools/teacher_logits.py)"
            ) from None
        except (ValueError, OSError) as error:
            raise DataError(f"{path} is damaged ({error}): compute the teacher's logits again") from error
        return array

    def fields(self, numbers: np.ndarray, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Return `teacher_ids` (int64) and `teacher_logits` (fp32) of samples, [B, S, K] each.

        Args:
            numbers: Indices of the samples [B].
            tokens: Their tokens [B, S].

        Raises:
            DataError: If the logits were computed for other samples.
        """
        ids, logits, hashes = self._rows
        is_there = bool(numbers.max() < len(hashes)) and ids.shape[1] == tokens.shape[1]
        if not is_there or not np.array_equal(hashes[numbers], sample_hashes(tokens)):
            raise DataError(
                f"teacher_logits: {self._directory} was computed for other samples than those of the {self._split} "
                "data: compute the teacher's logits again (tools/teacher_logits.py) with this run's data, seed, "
                "seq_length and number of samples"
            )
        return {
            "teacher_ids": ids[numbers, :, : self._top_k].astype(np.int64),
            "teacher_logits": np.array(logits[numbers, :, : self._top_k]),
        }


class DistillationBatchIterator(BatchIterator):
    """Infinite iterator over micro batches that include a teacher's logits."""

    def __init__(self, teacher: TeacherFile, dataset: SampleSource, *args: Any, **kwargs: Any) -> None:
        """Set up the iterator.

        Args:
            teacher: The teacher's logits.
            dataset: Source of the samples.
            args: Further arguments of `BatchIterator`.
            kwargs: Keyword arguments of `BatchIterator`.
        """
        super().__init__(dataset, *args, **kwargs)
        self.teacher = teacher

    def read(self, position: int) -> Batch:
        """Read micro batch `position`. Raises DataError if the logits were computed for other samples."""
        batch = super().read(position)
        fields = self.teacher.fields(self.sample_numbers(position), batch["tokens"].numpy())
        for name, field in fields.items():
            batch[name] = torch.from_numpy(field)
        return batch


def sample_batches(samples: int, size: int) -> Iterator[np.ndarray]:
    """Yield the indices of samples in batches."""
    for first in range(0, samples, size):
        yield np.arange(first, min(samples, first + size))


def _read_identity(directory: Path) -> TeacherIdentity:
    """Return the identity of a directory of logits. Raises DataError if there is none."""
    path = directory / _IDENTITY
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        tokenizers: Sequence[str] = fields.pop("tokenizers")
        return TeacherIdentity(tokenizers=tuple(tokenizers), **fields)
    except FileNotFoundError:
        raise DataError(
            f"teacher_logits: {directory} has no logits of a teacher: write them with tools/teacher_logits.py"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error}): compute the teacher's logits again") from error
