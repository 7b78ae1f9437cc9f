"""A save that fails names what went wrong, removes its files, and leaves the engine as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neox.engine.checkpoints import saving
from neox.engine.checkpoints.saving import CheckpointFiles
from neox.errors import CheckpointError
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan


def test_all_files_that_could_not_be_written_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: Any) -> None:
        raise CheckpointError(f"{path.name}: no space")

    monkeypatch.setattr(saving, "save_file", full)
    files = CheckpointFiles()
    files.raise_problems()
    files.put(tmp_path / "first", {})
    with pytest.raises(CheckpointError, match=r"^first: no space$"):
        files.raise_problems()
    for name in ("second", "third", "fourth", "fifth"):
        files.put(tmp_path / name, {})
    with pytest.raises(CheckpointError) as caught:
        files.raise_problems()
    assert str(caught.value).startswith("first: no space; second: no space; third: no space; 2 more")
    assert caught.value.__cause__ is files.problems[0]


def save_with_a_broken_feature(save: Path) -> tuple[bool, list[str], bool]:
    """Whether the error came through, what it left in `save`, and whether DeepSpeed has its checkpoint engine back."""
    from neox.engine import Feature, initialize_distributed, initialize_engine, save_checkpoint

    class Broken(Feature):
        def files(self, engine: Any) -> dict[str, Any]:
            raise ZeroDivisionError

    plan = tiny_plan(1, save=str(save))
    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device, lambda model, start: (Broken(),))
    engine.train_batch(batches(plan, grid.dp_rank))
    its_own = engine.deepspeed_engine.checkpoint_engine
    is_raised = False
    try:
        save_checkpoint(engine, save)
    except ZeroDivisionError:
        is_raised = True
    left = sorted(path.name for path in save.iterdir())
    engine.features = ()
    save_checkpoint(engine, save)
    return is_raised, left, engine.deepspeed_engine.checkpoint_engine is its_own


def test_any_error_removes_the_staged_files(tmp_path: Path) -> None:
    assert run_ranks(1, save_with_a_broken_feature, tmp_path)[0] == (True, [], True)
    assert (tmp_path / "global_step1" / "manifest.json").exists()
