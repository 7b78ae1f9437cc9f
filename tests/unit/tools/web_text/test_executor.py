"""Recipes as datatrove pipelines, and shards."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from neox.errors import ConfigError
from tests.errors import raises_naming
from tools.web_text import STEPS, read_recipe, run_step
from tools.web_text.document_index import ChunkRows
from tools.web_text.executor import ShardTask, pipelines, run_recipe

sys.path.append(str(Path(__file__).parent))
real: Any = importlib.import_module("real_texts")
RECIPE = """
directory: {directory}
steps:
  - dedup: {{input: {source}, skip_bad: 1}}
  - decontaminate: {{evaluation: {task}}}
  - split: {{test_percent: 20, dev_percent: 10}}
"""


def write_recipe(folder: Path, name: str) -> Path:
    texts = real.with_copies(seed=5, size=2000, most_edits=8) * 5  # several chunks
    source = real.write(folder / "in.jsonl", texts)
    with source.open("a") as file:
        file.write("not JSON\n")
    (folder / "task.jsonl").write_text(json.dumps({"text": texts[7][300:900]}) + "\n")
    recipe = folder / f"{name}.yml"
    recipe.write_text(RECIPE.format(directory=folder / name, source=source, task=folder / "task.jsonl"))
    return recipe


def outputs(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jsonl.zst"))}


def counts(folder: Path) -> list[dict[str, Any]]:
    reports = [json.loads(path.read_text())["report"] for path in sorted(folder.glob("*.step.json"))]
    return [{key: value for key, value in report.items() if key != "seconds"} for report in reports]


@pytest.mark.parametrize(("tasks", "workers"), [(3, 1), pytest.param(5, 2, marks=pytest.mark.slow)])
def test_local_tasks_make_the_same_bytes_and_reports(tmp_path: Path, tasks: int, workers: int) -> None:
    for chosen in read_recipe(write_recipe(tmp_path, "alone"), STEPS):
        run_step(chosen.step, chosen.settings)
    recipe = read_recipe(write_recipe(tmp_path, "tasks"), STEPS)
    run_recipe(recipe, "local", tasks, {"workers": workers})
    assert len(outputs(tmp_path / "alone")) == 7
    assert outputs(tmp_path / "alone") == outputs(tmp_path / "tasks")
    assert json.dumps(counts(tmp_path / "alone")).replace("alone", "tasks") == json.dumps(counts(tmp_path / "tasks"))
    assert counts(tmp_path / "tasks")[0]["bad"] == 1
    assert not list((tmp_path / "tasks").glob("*.shards"))
    assert not run_step(recipe[-1].step, recipe[-1].settings)["fresh"]


def test_shards_are_used_and_those_of_other_settings_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, *_) = read_recipe(write_recipe(tmp_path, "shards"), STEPS)
    for rank in range(3):
        ShardTask(first)(None, rank, 3)
    computed: list[int] = []
    work = importlib.import_module("tools.web_text.document_index").IndexChunk
    call = work.__call__

    def counting(self: Any, chunk: Any) -> Any:
        computed.append(chunk.content is not None)
        return call(self, chunk)

    counting.__annotations__ = {"return": ChunkRows}
    monkeypatch.setattr(work, "__call__", counting)
    run_step(first.step, first.settings)
    assert sum(computed) == 0
    chunks = -(-(tmp_path / "in.jsonl").stat().st_size // (1 << 20))
    run_step(first.step, first.settings.model_copy(update={"seed": 1}))
    assert sum(computed) == chunks > 1


def test_a_shard_that_is_missing_or_cut_off_is_computed(tmp_path: Path) -> None:
    (first, *_) = read_recipe(write_recipe(tmp_path, "shards"), STEPS)
    run_step(first.step, first.settings)
    whole = outputs(tmp_path / "shards")
    (tmp_path / "shards" / "01-dedup.jsonl.zst.step.json").unlink()
    for rank in range(2):
        ShardTask(first)(None, rank, 2)
    shard = tmp_path / "shards" / "01-dedup.jsonl.zst.shards" / "00001.results"
    lines = shard.read_bytes().splitlines(keepends=True)
    shard.write_bytes(b"".join(lines[:-1]))
    run_step(first.step, first.settings)
    assert outputs(tmp_path / "shards") == whole


@pytest.mark.slow
def test_ray_makes_the_same_bytes_and_reports_failures(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray (requirements/requirements-ray.txt) is not installed")
    for chosen in read_recipe(write_recipe(tmp_path, "alone"), STEPS):
        run_step(chosen.step, chosen.settings)
    recipe = write_recipe(tmp_path, "ray")

    def run_on_ray() -> subprocess.CompletedProcess[str]:
        tool = Path(__file__).parents[4] / "tools" / "web_text.py"
        words = ["run", str(recipe), "--executor", "ray", "--tasks", "2", "--executor-option", "workers=2"]
        return subprocess.run([sys.executable, str(tool), *words], cwd=tmp_path, capture_output=True, text=True)

    done = run_on_ray()
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "alone") == outputs(tmp_path / "ray")
    assert len(outputs(tmp_path / "ray")) == 7
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("not JSON either\n")
    failed = run_on_ray()
    assert failed.returncode == 1
    assert "in.jsonl" in failed.stderr.rpartition("error: ")[2]  # the task's own message


def test_slurm_pipelines_are_chained(tmp_path: Path) -> None:
    recipe = read_recipe(write_recipe(tmp_path, "slurm"), STEPS)
    made = [made for _, made in pipelines(recipe, "slurm", 4, {"time": "1:00:00", "partition": "cpu"})]
    assert [executor.tasks for executor in made] == [4, 1, 4, 1, 4, 1]
    assert [executor.depends for executor in made] == [None, *made[:-1]]
    with raises_naming(ConfigError, "--executor slurm"):
        list(pipelines(recipe, "slurm", 4, {"no_such_option": 1}))
