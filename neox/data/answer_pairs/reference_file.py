"""Files of the reference model's log-probabilities, next to the data that they belong to."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from neox.data.answer_pairs.answers import AnswerPairs
from neox.errors import DataError, os_errors
from neox.files import atomic_write

START = "start"
"""Name of the reference model without `precompute_model_name`, before a hash of its weights."""


@dataclass(frozen=True)
class ReferenceIdentity:
    """What log-probabilities were computed from.

    Attributes:
        weights: Identity of the model's weights.
        data: Hash of the answers (`hash_of_pairs`).
        precision: Number format of the computation.
    """

    weights: str
    data: str
    precision: str


def reference_path(prefix: str, name: str) -> Path:
    """Return the file of the log-probabilities of a dataset by a reference model with a name."""
    return Path(f"{prefix}.{name}.reference.npz")


def start_path(prefix: str, identity: ReferenceIdentity) -> Path:
    """Return the file of a reference model without a name: each start has its own, so that models share the data."""
    digest = hashlib.sha256(f"{identity.weights} {identity.precision}".encode()).hexdigest()
    return reference_path(prefix, f"{START}-{digest[:8]}")


def hash_of_pairs(pairs: AnswerPairs) -> str:
    """Return a hash of the tokens of all pairs, and of where their answers are."""
    digest = hashlib.sha256()
    for number in range(len(pairs)):
        for document in pairs.documents(number):
            digest.update(document.ids.astype("<i8").tobytes())
            digest.update(np.packbits(document.in_answer).tobytes())
            digest.update(len(document.ids).to_bytes(8, "little"))
    return digest.hexdigest()


def read_reference(path: Path, identity: ReferenceIdentity) -> np.ndarray | None:
    """Return stored log-probabilities [pairs, 2], or None if there is no file.

    Args:
        path: The file.
        identity: What they are to be computed from.

    Raises:
        DataError: If the file is damaged, or was computed from other weights or data, or in another precision.
    """
    if not path.exists():
        return None
    with os_errors(DataError, f"{path} cannot be read"):
        try:
            with np.load(path, allow_pickle=False) as file:
                values: np.ndarray = file["log_probs"]
                stored: Mapping[str, str] = json.loads(str(file["identity"]))
        except (ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} is damaged ({error}): remove it, so that it is computed again") from error
    different = []
    for what, wanted in asdict(identity).items():
        if stored.get(what) != wanted:
            different.append(f"{what} (there {stored.get(what)}, here {wanted})")
    if different:
        raise DataError(
            f"{path} was computed from another reference: {', '.join(different)}; choose another "
            "precompute_model_name, or remove the file so that it is computed from the weights this run starts from"
        )
    return values


def write_reference(path: Path, values: np.ndarray, identity: ReferenceIdentity) -> None:
    """Write log-probabilities [pairs, 2] atomically. Raises DataError if the file cannot be written."""
    with os_errors(DataError, f"{path} cannot be written"), atomic_write(path) as file:
        np.savez(file, log_probs=values, identity=np.array(json.dumps(asdict(identity))))
