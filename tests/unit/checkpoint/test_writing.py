"""Writing single files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from neox.checkpoint import WRITE_BYTES, load_file, save_file
from neox.errors import CheckpointError
from tests.errors import raises_naming


def test_a_file_is_written_in_small_pieces_and_read_as_saved(tmp_path, monkeypatch):
    sizes, write = [], os.write

    def recorded(descriptor, data):
        sizes.append(len(data))
        return write(descriptor, data[: len(data) // 3 + 1])  # a write may be partial

    monkeypatch.setattr(os, "write", recorded)
    one = torch.randn(3, WRITE_BYTES // 5)
    path = save_file(tmp_path / "a.pt", {"one": one, "same": one, "odd": torch.arange(7), "text": "x"})
    monkeypatch.undo()
    assert max(sizes) == WRITE_BYTES
    loaded = load_file(path)
    assert torch.equal(loaded["one"], one)
    assert loaded["same"].data_ptr() == loaded["one"].data_ptr()
    assert loaded["odd"].tolist() == list(range(7))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full stands for a full disk")
@pytest.mark.parametrize("numel", [1, 10**6])
def test_a_full_disk_is_said_in_its_own_words(numel):
    with raises_naming(CheckpointError, "/dev/full", os.strerror(errno.ENOSPC)):
        save_file(Path("/dev/full"), {"t": torch.zeros(numel)})


def test_a_missing_directory_is_named(tmp_path):
    with raises_naming(CheckpointError, tmp_path / "absent" / "a.pt"):
        save_file(tmp_path / "absent" / "a.pt", {})
