"""Flags and the keys they stand for, and the script that ranks run."""

from __future__ import annotations

from pathlib import Path

import pytest

from neox.errors import ConfigError
from neox.preflight.command_line import find_lone_tool, find_script, overrides, parse_arguments


def test_flags_become_keys() -> None:
    words = ["generate.py", "-d", "configs", "a", "--eval_tasks", "wikitext", "lambada", "--iteration", "5"]
    words += ["-i", "in.txt", "-o", "out.txt", "--set", "top_k=3", "b"]
    arguments = parse_arguments(words)
    assert arguments.conf_file == ["a", "b"]
    assert set(overrides(arguments)) == {
        "sample_input_file=in.txt",
        "sample_output_file=out.txt",
        "iteration=5",
        'eval_tasks=["wikitext", "lambada"]',
        "top_k=3",
    }
    assert find_script("train.py").name == "train.py"


def test_a_short_flag_is_a_file_where_text_is_written_and_a_setting_elsewhere() -> None:
    words = ["train.py", "a", "--set", "seed=1", "-o", "optimizer.params.lr=1e-4", "-o", "seed=2"]
    words += ["--override", "top_k=3"]
    assert overrides(parse_arguments(words)) == ["seed=1", "optimizer.params.lr=1e-4", "seed=2", "top_k=3"]
    words[0] = "tools/generate.py"
    assert overrides(parse_arguments(words)) == ["sample_output_file=seed=2", "seed=1", "top_k=3"]


def test_a_file_of_completions_for_another_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["train.py", "a", "-o", "out.txt"])
    assert "-o out.txt" in capsys.readouterr().err


def test_scripts_and_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_script("generate").parent.name == "tools"
    with pytest.raises(ConfigError) as error:
        find_script("trian")
    assert "train.py" in str(error.value)
    for script in ("train.py", "generate.py", "preprocess_data", "nothing.py", "doctor"):
        assert find_lone_tool(script) is None
    tool = find_lone_tool("reshard")
    assert tool is not None
    assert tool.parts[-2:] == ("tools", "reshard.py")
    Path("reshard.py").touch()  # a script of one's own with that name
    assert find_lone_tool("reshard") is None
    assert find_script("reshard") == tmp_path / "reshard.py"


def test_flags_of_deepspeeds_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.py", "a", "--num_accelerators", "4", "--launcher_args", "--mca btl ^openib"]
    assert overrides(parse_arguments(words)) == ["num_gpus=4", "launcher_args=--mca btl ^openib"]
    with pytest.raises(SystemExit):
        parse_arguments(["train.py", "a", "--enable_each_rank_log", "logs"])
    assert "ranks/HOST" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_arguments(["train.py", "a", "--ssh_port", "22"])
    assert "--set ssh_port=" in capsys.readouterr().err
