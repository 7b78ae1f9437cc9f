"""Means of checkpoints: their weights, any degrees, and what is refused."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from neox.checkpoint import (
    CheckpointReader,
    average_checkpoints,
    checkpoint_weights,
    commit,
    last_checkpoints,
    load_file,
    open_checkpoint,
    stage_directory,
)
from neox.errors import CheckpointError, ConfigError
from neox.launch.run_lock import reserve
from tests.errors import raises_naming
from tests.unit.checkpoint.synthetic import seeded_weights, small_plan, write_checkpoint

STATE: dict[str, Any] = {
    "args": {"num_attention_heads": 4, "num_layers": 2, "hidden_size": 16},
    "model_identity": {"gpt_j_residual": True, "vocab_size": 60, "lora": None},
}


def write_run(save: Path, degrees: dict[int, int], dtype: torch.dtype = torch.float32) -> None:
    """Write a checkpoint for each iteration, with its number of tensor ranks, whose seed is the iteration."""
    layers = small_plan()
    for iteration, tp_size in degrees.items():
        staged = stage_directory(save, iteration)
        state = {**STATE, "iteration": iteration}
        write_checkpoint(staged, layers, seeded_weights(layers, iteration, dtype), tp_size=tp_size, client_state=state)
        commit(staged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_of_checkpoints_of_any_degrees(tmp_path: Path, dtype: torch.dtype) -> None:
    write_run(tmp_path / "run", {2: 1, 4: 2, 6: 4, 8: 2}, dtype)
    paths = last_checkpoints(tmp_path / "run", 3)
    assert [path.name for path in paths] == ["global_step4", "global_step6", "global_step8"]
    weights = [0.2, 0.3, 0.5]
    last = open_checkpoint(paths[-1])
    readers = [CheckpointReader(path, last.layers) for path in paths[:-1]]
    written = average_checkpoints([*readers, last], weights, tmp_path / "mean", tp_size=4, pp_size=2)
    assert written.name == "global_step8"
    mean = open_checkpoint(written)
    assert (mean.tp_size, mean.pp_size, mean.iteration) == (4, 2, 8)
    each = [seeded_weights(small_plan(), iteration, dtype) for iteration in (4, 6, 8)]
    for key in each[0]:
        expected = sum(weight * values[key].double() for weight, values in zip(weights, each, strict=True))
        assert mean.full(*key).dtype == dtype
        torch.testing.assert_close(
            mean.full(*key).double(), expected, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=1e-6
        )
    sources = load_file(written / "mp_rank_00_model_states.pt")["averaged_from"]
    assert sources == dict(zip(map(str, paths), weights, strict=True))


@pytest.mark.parametrize("count", [2, 5, 9])
def test_weights_add_up_and_a_decay_scales_the_steps(count: int) -> None:
    assert checkpoint_weights("mean", count) == pytest.approx(checkpoint_weights("decay", count, "linear"))
    linear = checkpoint_weights("linear", count)
    assert [weight / linear[0] for weight in linear] == pytest.approx(range(1, count + 1))
    for shape in ("linear", "cosine", "minus_sqrt", "exponential"):
        weights = checkpoint_weights("decay", count, shape)
        assert sum(weights) == pytest.approx(1)
        assert min(weights) > 0
    weights = checkpoint_weights("decay", count, "minus_sqrt")
    for step in range(1, count):  # the step from checkpoint step - 1 to checkpoint step
        assert sum(weights[step:]) == pytest.approx(1 - (step / count) ** 0.5)


def test_what_cannot_be_averaged(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {2: 1, 4: 1})
    with raises_naming(ConfigError, "--last", tmp_path / "run", "global_step4"):
        last_checkpoints(tmp_path / "run", 3)
    with raises_naming(ConfigError, tmp_path / "nothing"):
        last_checkpoints(tmp_path / "nothing", 2)
    first, last = [open_checkpoint(path) for path in last_checkpoints(tmp_path / "run", 2)]
    with raises_naming(CheckpointError, tmp_path / "run"):
        average_checkpoints([first, last], [0.5, 0.5], tmp_path / "run", tp_size=1, pp_size=1)
    other = {**STATE, "args": {**STATE["args"], "num_attention_heads": 2}, "iteration": 2}
    layers = small_plan()
    path = write_checkpoint(tmp_path / "other" / "global_step2", layers, seeded_weights(layers), client_state=other)
    with raises_naming(CheckpointError, path, "num_attention_heads"):
        average_checkpoints([open_checkpoint(path), last], [0.5, 0.5], tmp_path / "out", tp_size=1, pp_size=1)
    file = first.path / "layer_02-model_00-model_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with raises_naming(CheckpointError, file.name):
        average_checkpoints([first, last], [0.5, 0.5], tmp_path / "out", tp_size=1, pp_size=1)
    assert not list((tmp_path / "out").glob("*"))


def test_a_directory_that_a_training_writes_into_is_refused(tmp_path: Path) -> None:
    """The staging directory of its save would be removed like one that an interrupted save has left."""
    write_run(tmp_path / "run", {2: 1, 4: 1})
    readers = [open_checkpoint(path) for path in last_checkpoints(tmp_path / "run", 2)]
    save = tmp_path / "of a training"
    being_written = stage_directory(save, 6)
    with ExitStack() as held:
        reserve(tmp_path / "logs", save, "train.py", held)
        with raises_naming(CheckpointError, save, "train.py"):
            average_checkpoints(readers, [0.5, 0.5], save, tp_size=1, pp_size=1)
        assert being_written.is_dir()
    average_checkpoints(readers, [0.5, 0.5], save, tp_size=1, pp_size=1)
