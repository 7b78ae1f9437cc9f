"""Texts of evaluation tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from neox.errors import ConfigError
from tests.errors import raises_naming
from tests.unit.evaluation.local_tasks import write_tasks


@pytest.mark.slow
def test_prompts_and_answers_of_each_kind_of_task(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from neox.evaluation.task_texts import task_documents

    tasks = write_tasks(tmp_path)
    found = list(task_documents(tasks))
    assert [document.meta["task"] for document in found] == [
        name for name in ("local_choice", "local_rolling", "local_until") for _ in range(3)
    ]
    choice, rolling = found[0].text, found[3].text
    assert choice.splitlines() == [f"Is water wet? {answer}" for answer in ("yes", "no", "perhaps so")]
    assert rolling == ("Is water wet? It goes on. " * 5).strip()
    with raises_naming(ConfigError, "no_such_task"):
        list(task_documents([str(tmp_path / "no_such_task.yaml")]))
