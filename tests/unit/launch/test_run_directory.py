"""The run directory, the script that is found, and data that is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from neox.config import NeoXConfig
from neox.errors import LaunchError
from neox.launch.preflight import missing_data
from neox.launch.run_directory import run_directory, write_run_directory


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_directory(None, "configs/20B.yml") == tmp_path / "runs" / "20B"
    assert run_directory("logs", "20B") == tmp_path / "logs"


def test_what_is_written(tmp_path: Path) -> None:
    for steps in (1, 2):
        write_run_directory(
            tmp_path / "run",
            plan={"grid": {"pp": steps}},
            deepspeed={"steps": steps},
            config={"train_iters": steps},
            commands=["python deepy.py 'a b'"],
        )
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"plan.json", "deepspeed.json", "config.yml", "command.txt", "ranks"}
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == {"grid": {"pp": 2}}
    assert yaml.safe_load((tmp_path / "run" / "config.yml").read_text()) == {"train_iters": 2}
    assert (tmp_path / "run" / "command.txt").read_text() == "python deepy.py 'a b'\n"
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="choose another log_dir"):
        write_run_directory(tmp_path / "file", plan={}, deepspeed={}, config={}, commands=[])


def test_missing_data_names_the_command(tmp_path: Path) -> None:
    assert "data_path" in missing_data(NeoXConfig.from_flat({}))[0]
    prefix = tmp_path / "pile_text_document"
    config = NeoXConfig.from_flat({"data_path": str(prefix)})
    (problem,) = missing_data(config)
    assert "tools/preprocess_data.py" in problem
    assert f"--output-prefix {tmp_path / 'pile'} " in problem
    prefix.with_suffix(".bin").touch()
    assert f"{prefix}.idx does not exist" in missing_data(config)[0]
    prefix.with_suffix(".idx").touch()
    assert missing_data(config) == []
    blend = NeoXConfig.from_flat({"train_data_paths": [str(prefix), str(tmp_path / "none")]})
    assert [str(tmp_path / "none") in problem for problem in missing_data(blend)] == [True]
