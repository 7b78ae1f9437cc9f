"""tools/average_checkpoints.py."""

from __future__ import annotations

from pathlib import Path

from neox.checkpoint import commit, open_checkpoint, stage_directory
from neox.config import NeoXConfig
from neox.preflight.checkpoint_checks import checkpoint_problems
from tests.unit.checkpoint.synthetic import seeded_weights, small_plan, write_checkpoint
from tests.unit.checkpoint.test_averaging import STATE, write_run
from tests.unit.tools.conftest import Run


def test_the_last_checkpoints_of_a_run(tmp_path: Path, run: Run) -> None:
    write_run(tmp_path / "run", {2: 1, 4: 2, 6: 2})
    done = run("average_checkpoints.py", "--input_dir", tmp_path / "run", "--last", 2, "--output_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    name = "mlp.dense_h_to_4h.weight"
    found = open_checkpoint(tmp_path / "out" / "global_step6").full(2, name)
    layers = small_plan()
    expected = (seeded_weights(layers, 4)[2, name] + seeded_weights(layers, 6)[2, name]) / 2
    assert (found - expected).abs().max() < 1e-6

    shown = run("inspect_checkpoint.py", tmp_path / "out")
    assert f"0.5 x {tmp_path}/run/global_step4 + 0.5 x {tmp_path}/run/global_step6" in shown.stdout

    staged = stage_directory(tmp_path / "kept", 3)
    write_checkpoint(staged, layers, seeded_weights(layers), client_state={**STATE, "averaged_steps": 1234})
    assert "over 1,234 steps" in run("inspect_checkpoint.py", commit(staged)).stdout

    config = NeoXConfig.from_flat({"load": str(tmp_path / "out")})
    (problem,) = checkpoint_problems(config, training=True)
    assert problem.keys == ("load", "optimizer.type")
    assert "finetune: true" in problem.message
    assert checkpoint_problems(config.updated({"finetune": True}), training=True) == []


def test_wrong_uses_are_refused(tmp_path: Path, run: Run) -> None:
    write_run(tmp_path / "run", {2: 1})
    for arguments in ((tmp_path / "run",), (tmp_path / "run", "--last", 1), (tmp_path, tmp_path, "--last", 2)):
        done = run("average_checkpoints.py", "--output_dir", tmp_path / "out", "--input_dir", *arguments)
        assert done.returncode == 2
        assert "--last" in done.stderr
