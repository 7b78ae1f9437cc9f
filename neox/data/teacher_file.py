"""Files of a teacher's largest logits for the samples of a run, and batches with them.

A directory has `identity.json`, and for each split three arrays with a row for each sample, in the order in which the
run reads them: `SPLIT.ids.npy` and `SPLIT.logits.npy` [samples, S, K], and `SPLIT.hashes.npy` with a hash of each
sample's tokens, so that other samples are never trained on with these logits.

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
    """What stored logits were computed with.

    Attributes:
        weights: Hash of the teacher's weights.
        vocab_size: Number of ids of its tokenizer.
        tokenizers: Hashes of its tokenizer; none if it has none.
        top_k: K.
    """

    weights: str
    vocab_size: int
    tokenizers: tuple[str, ...]
    top_k: int


class TeacherRows(NamedTuple):
    """Arrays of a split.

    Attributes:
        ids: Tokens, those with the largest logits first, int32 [samples, S, K].
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
    """Writer of a directory of logits, which appears when it is complete.

    Args:
        directory: The directory.
        identity: What the logits are computed with.

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
        """Return the arrays of a split, which are filled by the caller.

        Raises:
            DataError: If the disk is too small, or cannot be written.
        """
        shape = (samples, length, self._identity.top_k)
        needed = 8 * prod(shape) + 8 * samples
        free = shutil.disk_usage(self._partial).free
        if needed > free:  # a full disk would end the process at a write into a mapped file
            raise DataError(
                f"the teacher's logits of the {split} data take {needed / 1e9:.1f} GB, and {self._directory.parent} "
                f"has {free / 1e9:.1f} GB free: choose another directory, a smaller --top-k, or fewer samples"
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
        """Give the directory its name."""
        with os_errors(DataError, f"{self._directory} cannot be written"):
            write_text(self._partial / _IDENTITY, json.dumps(asdict(self._identity), indent=2) + "\n")
            self._partial.rename(self._directory)


class TeacherFile:
    """Logits of a teacher for one split of a run.

    Args:
        directory: Directory that a `TeacherWriter` has written.
        split: `train`, `valid` or `test`.
        vocab_size: Number of ids of the run.
        tokenizer: Tokenizer of the run.
        top_k: Number of logits of each token that are read, the largest ones.

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
                f"teacher_logits: {directory} is of a teacher with another vocabulary ({identity.vocab_size:,} ids; "
                f"this run has {vocab_size:,}): take a teacher with the same tokenizer"
            )
        if identity.top_k < top_k:
            raise DataError(
                f"teacher_logits: {directory} has {identity.top_k:,} logits for each token, and distillation_top_k is "
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
            numbers: Numbers of the samples [B].
            tokens: Their tokens [B, S].

        Raises:
            DataError: If the logits are of other samples.
        """
        ids, logits, hashes = self._rows
        is_there = bool(numbers.max() < len(hashes)) and ids.shape[1] == tokens.shape[1]
        if not is_there or not np.array_equal(hashes[numbers], sample_hashes(tokens)):
            raise DataError(
                f"teacher_logits: {self._directory} is of other samples than those of the {self._split} data: compute "
                "the teacher's logits again (tools/teacher_logits.py) for this data, seed, seq_length and number of "
                "samples"
            )
        own_ids = ids[numbers, :, : self._top_k].astype(np.int64)
        return {"teacher_ids": own_ids, "teacher_logits": np.array(logits[numbers, :, : self._top_k])}


class DistillationBatchIterator(BatchIterator):
    """Endless iterator over micro batches with a teacher's logits."""

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
        """Read micro batch `position`. Raises DataError for other samples than the teacher's."""
        batch = super().read(position)
        fields = self.teacher.fields(self.sample_numbers(position), batch["tokens"].numpy())
        return {**batch, **{name: torch.from_numpy(field) for name, field in fields.items()}}


def sample_batches(samples: int, size: int) -> Iterator[np.ndarray]:
    """Yield the numbers of samples in batches."""
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
            f"teacher_logits: {directory} holds no logits of a teacher: tools/teacher_logits.py writes them"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error}): compute the teacher's logits again") from error
