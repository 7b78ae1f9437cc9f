"""tools/generate.py: what it refuses before it loads a model, and how it says so."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
NAME = "v2_pp2_mp1_dp1_fp32"


def generate(monkeypatch, capsys, *arguments):
    """Run the script in this process; return (exit code, stderr)."""
    monkeypatch.chdir(GOLDEN)
    script = ROOT / "tools" / "generate.py"
    monkeypatch.setattr(sys, "argv", [str(script), f"{NAME}/{NAME}.yml", "--set", f"load={NAME}", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ("", (), "contains no prompts"),
        ("a\n\nb\n", (), "prompts.txt:2: empty prompt"),
        ("a\n", ("--set", "minimum_tokens=9", "--set", "maximum_tokens=3"), "minimum_tokens is 9"),
        ("a\n", ("--set", "num_beams=2", "--set", "temperature=1.0"), "draws no random"),
        ("a\n", ("--set", "iteration=7"), "global_step7"),
        ("a\n", ("--iteration", "7"), "global_step7"),
        ("a\n", ("--set", "load=null", "--set", "save=null"), "--set load=DIRECTORY"),
    ],
)
def test_refusals_write_nothing(tmp_path, monkeypatch, capsys, prompts, arguments, message):
    (tmp_path / "prompts.txt").write_text(prompts)
    out = tmp_path / "out.jsonl"
    code, said = generate(monkeypatch, capsys, "-i", tmp_path / "prompts.txt", "-o", out, *arguments)
    assert code == 2
    assert "error: " in said
    assert message in said
    assert not out.exists()


def test_the_file_of_prompts_is_not_written_over(tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n")
    (tmp_path / "link").symlink_to(prompts)
    code, said = generate(monkeypatch, capsys, "-i", prompts, "-o", tmp_path / "link")
    assert code == 2
    assert "is the file of prompts" in said
    assert prompts.read_text() == "a\n"


def test_a_place_that_cannot_be_written_is_said_before_the_model_is_loaded(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    code, said = generate(monkeypatch, capsys, "-o", tmp_path / "file" / "out.jsonl")
    assert code == 2
    assert f"sample_output_file {tmp_path / 'file' / 'out.jsonl'}: " in said
    assert "weights of" not in said


def test_unknown_settings_are_the_configurations_to_refuse(monkeypatch, capsys):
    code, said = generate(monkeypatch, capsys, "--set", "temprature=1")
    assert code == 2
    assert "temperature" in said
