"""After the decisions of a start its configuration and its plan are constants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neox.config import NeoXConfig
from neox.data import IndexedDatasetBuilder
from neox.launch.supervisor.outcome import EndKind, RunEnd
from neox.plan import RunPlan, decode_payload
from neox.preflight import planning, start_run
from neox.preflight.command_line import parse_arguments
from neox.preflight.planning import read_config
from neox.preflight.start_run import StartRun
from tests.plans import SMALL
from tests.unit.preflight.test_resume_notes import put_checkpoint, put_config


@pytest.mark.parametrize("resumes", [False, True])
def test_a_start_applies_its_decisions_once_and_makes_one_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    """The ranks get the same decisions. A resume decides checkpoint, precision, length and warm-up."""
    with IndexedDatasetBuilder(str(tmp_path / "text"), np.uint16) as builder:
        builder.add_documents(np.arange(4000) % 50, [10] * 400)
    keys = {**SMALL, "data_path": str(tmp_path / "text"), "tokenizer_type": "CharLevelTokenizer", "warmup": 0.2}
    keys |= {"save": str(tmp_path / "save"), "log_dir": str(tmp_path / "run"), "split": "1"}
    if resumes:
        before = NeoXConfig.from_flat({**keys, "precision": "bf16", "train_iters": 10, "lr_decay_iters": None})
        put_checkpoint(tmp_path / "save", 4, before)
        put_config(tmp_path / "save", 4, before)
        for check in ("checkpoint_problems", "layer_problems"):  # its files are empty
            monkeypatch.setattr(planning, check, lambda *given, **named: [])
    keys |= {"train_iters": None, "lr_decay_iters": None, "num_train_epochs": 2, "precision": "auto"}
    (tmp_path / "run.yml").write_text(json.dumps(keys))
    arguments = parse_arguments(["train.py", str(tmp_path / "run.yml"), "--num_gpus", "1"])
    command = StartRun(arguments, read_config(arguments))

    counts = {"updated": 0, "plans": 0}
    launched = []

    def counted(name: str, function: Any) -> Any:
        def count(*given: Any, **named: Any) -> Any:
            counts[name] += 1
            return function(*given, **named)

        return count

    def launch(spec: Any, *given: Any, **named: Any) -> RunEnd:
        launched.append(spec)
        return RunEnd(EndKind.ASKED, 0)

    monkeypatch.setattr(NeoXConfig, "updated", counted("updated", NeoXConfig.updated))
    monkeypatch.setattr(RunPlan, "__init__", counted("plans", RunPlan.__init__))
    monkeypatch.setattr(start_run, "launch", launch)
    assert command.start() == 0
    assert counts["updated"] == 1
    assert counts["plans"] == 1

    (spec,) = launched
    plan = decode_payload(spec.arguments[spec.arguments.index("--payload") + 1])
    decided = {decision.key: decision.value for decision in plan.decisions}
    expected = {"precision", "train_iters", "num_train_epochs"}
    if resumes:
        expected |= {"load", "lr_warmup_iters"}
    assert set(decided) == expected
    assert all(plan.config.value(key) == value for key, value in decided.items())
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["decisions"] == [
        decision.to_json() for decision in plan.decisions
    ]
