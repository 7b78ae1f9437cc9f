"""Files of averaged weights, which ranks and stages divide in their own ways."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from neox.checkpoint.weights.averaged_files import AveragedFiles
from neox.checkpoint_files.names import averaged_file
from neox.errors import CheckpointError


class Trained:
    """Layer files of one layer on one tensor rank."""

    tp_size = 1
    indices = (0,)

    def state(self, index: int, tp_rank: int) -> Mapping[str, Tensor]:
        return {"word_embeddings.weight": torch.zeros(10, 10)}


def write_parts(directory: Path, stage: int, bounds: list[int]) -> None:
    """Write the values 0 to 99 in parts that end at `bounds`, one for each data rank."""
    start = 0
    for dp_rank, end in enumerate(bounds):
        values = torch.arange(start, end, dtype=torch.float32)
        torch.save({0: {"word_embeddings.weight": (start, values)}}, directory / averaged_file(dp_rank, stage))
        start = end


@pytest.mark.parametrize("last", [[100], [70, 100], [35, 70, 100]])
def test_stages_divide_a_tied_embedding_at_other_places(tmp_path: Path, last: list[int]) -> None:
    write_parts(tmp_path, 0, [30, 60, 100])
    write_parts(tmp_path, 1, last)
    found = AveragedFiles(tmp_path, Trained()).state(0, 0)["word_embeddings.weight"]  # type: ignore[arg-type]
    assert torch.equal(found.view(-1), torch.arange(100.0))


def test_missing_parts_are_named(tmp_path: Path) -> None:
    write_parts(tmp_path, 0, [30, 60])
    with pytest.raises(CheckpointError) as caught:
        AveragedFiles(tmp_path, Trained()).state(0, 0)  # type: ignore[arg-type]
    assert "word_embeddings.weight" in str(caught.value)
