"""tools/quickstart.py: what it takes as done."""

import runpy
from pathlib import Path

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
