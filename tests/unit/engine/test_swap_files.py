"""Tensors whose memory is a file: what they hold, what is left of them, and a disk that is too small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from neox.engine.deepspeed_patches.file_states import file_tensor, is_in_file, move_to_file
from neox.errors import TrainingError


def test_a_file_keeps_its_tensor_and_has_no_name(tmp_path: Path) -> None:
    directory = tmp_path / "missing" / "nvme"
    zeros = file_tensor(directory, 100_000, torch.float32)
    assert not zeros.any()
    tensor = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    moved, expected = tensor.view(-1), tensor.clone()
    move_to_file(tensor, directory)
    assert is_in_file(tensor)
    assert is_in_file(tensor[1:])
    assert not is_in_file(moved), "who had the memory before keeps it"
    assert torch.equal(tensor, expected)
    address = tensor.data_ptr()
    move_to_file(tensor, directory)
    assert tensor.data_ptr() == address, "it is there already"
    torch.save(tensor, tmp_path / "saved.pt")
    assert torch.equal(torch.load(tmp_path / "saved.pt"), expected)
    assert not list(directory.iterdir())


def test_small_tensors_stay(tmp_path: Path) -> None:
    step = torch.tensor(3.0)
    move_to_file(step, tmp_path)
    assert not is_in_file(step)


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory, numel in ((tmp_path, 2**50), (tmp_path / "file", 10)):
        with pytest.raises(TrainingError) as refused:
            file_tensor(directory, numel, torch.float32)
        assert "nvme_path" in str(refused.value)
