"""What the launcher makes of a checkpoint that is damaged, before and after the ranks have found it."""

from __future__ import annotations

from pathlib import Path

from neox.checkpoint import commit, stage_directory
from neox.checkpoint_files.names import layer_file
from neox.plan import RunPlan
from neox.preflight.checkpoint_checks import layer_problems
from tests.plans import SMALL, plan_of
from tests.unit.checkpoint.synthetic import seeded_weights, write_checkpoint


def put(save: Path, step: int, plan: RunPlan) -> Path:
    staged = stage_directory(save, step)
    write_checkpoint(staged, plan.layers, seeded_weights(plan.layers), client_state={"iteration": step})
    return commit(staged)


def overwrite(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def test_a_damaged_checkpoint_beside_others_does_not_refuse_a_start(tmp_path: Path) -> None:
    """The ranks compare hashes, and an older one is loaded; the launcher reads no weights, but the names of tensors."""
    plan = plan_of(1, 50, **{**SMALL, "load": str(tmp_path)})
    newest = put(tmp_path, 20, plan)
    overwrite(newest / layer_file(0, 0))
    assert len(layer_problems(plan, training=True)) == 1
    put(tmp_path, 10, plan)
    (tmp_path / "latest").write_text(newest.name)
    assert layer_problems(plan, training=True) == []


def test_a_checkpoint_that_ranks_have_found_damaged_is_not_compared(tmp_path: Path) -> None:
    plan = plan_of(1, 50, **{**SMALL, "load": str(tmp_path)})
    put(tmp_path, 10, plan)
    other = put(tmp_path, 20, plan_of(1, 50, **{**SMALL, "hidden_size": 2 * SMALL["hidden_size"]}))
    assert layer_problems(plan, training=True) != []
    assert layer_problems(plan, training=True, damaged=[other]) == []
