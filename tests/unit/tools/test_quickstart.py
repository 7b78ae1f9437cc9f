"""tools/quickstart.py: what it takes as done."""

import json
import runpy
from pathlib import Path

from neox.launch.status.run_status import run_status

TOOL = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "quickstart.py"))


def test_training_carried_on_beyond_its_steps_is_finished(tmp_path):
    finished = TOOL["finished_checkpoint"]
    assert finished(tmp_path / "none", 120) is None
    for name in ("global_step80", "global_step119", "global_step200.partial"):
        (tmp_path / name).mkdir()
    assert finished(tmp_path, 120) is None
    (tmp_path / "global_step120").mkdir()
    assert finished(tmp_path, 120) == tmp_path / "global_step120"
    (tmp_path / "global_step240").mkdir()
    assert finished(tmp_path, 120) == tmp_path / "global_step240"


def test_its_speed_is_that_of_the_status(tmp_path):
    rows = []
    for step in range(1, 121):
        row = {"iteration": step, "kind": "step", "train/lm_loss": 5.0, "runtime/iteration_time": 1.0}
        rows.append(json.dumps({**row, "runtime/tokens_per_sec": 100.0 + step}))
    (tmp_path / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    figures = TOOL["read_figures"](tmp_path)
    assert figures.steps == 120
    assert figures.speed == run_status(tmp_path)["tokens_per_second"] == 195.5
