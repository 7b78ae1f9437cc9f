"""Safe reading of single files."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from neox.checkpoint import load_file, save_file
from neox.errors import CheckpointError
from tests.errors import raises_naming


class Intruder:
    """Any class that no checkpoint should hold."""

    def __reduce__(self):
        return print, ("must never run",)


def test_numpy_states_and_plain_values_are_read(tmp_path):
    np.random.seed(3)
    path = save_file(tmp_path / "a.pt", {"np_rng_state": np.random.get_state(), "n": 1, "t": torch.arange(3)})
    loaded = load_file(path)
    assert (loaded["np_rng_state"][1] == np.random.get_state()[1]).all()
    assert loaded["t"].tolist() == [0, 1, 2]


def test_nothing_else_is_unpickled(tmp_path, capsys):
    path = tmp_path / "evil.pt"
    torch.save({"x": Intruder()}, path)
    with raises_naming(CheckpointError, path, "print"):
        load_file(path)
    path.write_bytes(pickle.dumps(Intruder(), protocol=2))
    with pytest.raises(CheckpointError):
        load_file(path)
    assert capsys.readouterr().out == ""


def test_broken_files_are_named(tmp_path):
    whole = save_file(tmp_path / "whole.pt", {"t": torch.zeros(1000)}).read_bytes()
    for name, content in (("cut", whole[: len(whole) // 2]), ("empty", b""), ("text", b"no torch file" * 20)):
        path = tmp_path / f"{name}.pt"
        path.write_bytes(content)
        with raises_naming(CheckpointError, path):
            load_file(path)
    with raises_naming(CheckpointError, tmp_path / "absent.pt"):
        load_file(tmp_path / "absent.pt")


def test_writing_into_a_loaded_tensor_leaves_the_file_alone(tmp_path):
    path = save_file(tmp_path / "a.pt", {"t": torch.zeros(1000)})
    load_file(path)["t"].fill_(1)
    assert load_file(path)["t"].sum() == 0
