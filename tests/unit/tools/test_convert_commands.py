"""tools/convert_to_hf.py and tools/convert_from_hf.py."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from neox.checkpoint import find_checkpoint

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
RUN = "v2_pp1_mp1_dp1_fp32"


def test_there_and_back(tmp_path, run):
    there = run(
        "convert_to_hf.py",
        *("--input_dir", GOLDEN / RUN, "--config_file", GOLDEN / RUN / f"{RUN}.yml"),  # the newest one in it
        *("--output_dir", tmp_path / "hf", "--tokenizer", GOLDEN / "data" / "tokenizer.json"),
    )
    assert there.returncode == 0, there.stderr
    assert f"loading checkpoint {GOLDEN / RUN / 'global_step30'}" in there.stderr
    difference = re.search(r"largest logit difference (\S+)", there.stdout)
    assert difference is not None
    assert float(difference[1]) < 1e-5
    back = run("convert_from_hf.py", "--input_dir", tmp_path / "hf", "--output_dir", tmp_path / "back")
    assert back.returncode == 0, back.stderr
    assert find_checkpoint(tmp_path / "back").name == "global_step0"
    again = ("--input_dir", tmp_path / "hf", "--output_dir", tmp_path / "back")
    refused = run("convert_from_hf.py", *again)
    assert refused.returncode == 2
    assert "global_step0" in refused.stderr
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "hf", broken)
    (broken / "generation_config.json").write_text("{")  # read after all weights
    failed = run("convert_from_hf.py", "--input_dir", broken, "--output_dir", tmp_path / "back", "--overwrite")
    assert failed.returncode != 0
    assert find_checkpoint(tmp_path / "back").name == "global_step0"
    assert not (tmp_path / "back" / "superseded").exists()
    assert run("convert_from_hf.py", *again, "--overwrite").returncode == 0
    assert (tmp_path / "back" / "superseded" / "global_step0").is_dir()
    assert (tmp_path / "back" / "superseded" / "tokenizer.json").is_file()
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    (tmp_path / "hf" / "tokenizer.json").unlink()  # what an import before has left is not taken for the model's
    without = run("convert_from_hf.py", *again, "--overwrite")
    assert without.returncode == 0
    assert "has no tokenizer" in without.stderr
    assert "vocab_file" not in (tmp_path / "back" / "config.yml").read_text()


def test_every_reason_at_once_and_before_files_are_looked_for(tmp_path, run):
    (tmp_path / "c.yml").write_text(
        '{"norm": "batchnorm", "te_mha": true, "num_layers": 2, "hidden_size": 64,'
        ' "num_attention_heads": 4, "seq_length": 64}\n'
    )
    failed = run(
        "convert_to_hf.py",
        *("--input_dir", tmp_path / "none", "--config_file", tmp_path / "c.yml", "--output_dir", tmp_path / "hf"),
    )
    assert failed.returncode == 2
    for reason in ("norm", "te_mha"):
        assert reason in failed.stderr
    assert "Traceback" not in failed.stderr
    failed = run("convert_to_hf.py", "--input_dir", tmp_path, "--output_dir", tmp_path / "hf")
    assert failed.returncode == 2
    assert f"error: {tmp_path} " in failed.stderr
    assert "global_step" in failed.stderr
    failed = run("convert_from_hf.py", "--input_dir", tmp_path / "none", "--output_dir", tmp_path / "back")
    assert failed.returncode == 2
    assert "config.json: no such file" in failed.stderr


def test_flags_of_whole_models_are_refused_next_to_an_adapter(tmp_path, run):
    paths = ("--input_dir", tmp_path, "--output_dir", tmp_path / "out", "--adapter", "base")
    done = run("convert_to_hf.py", *paths, "--trim-vocab", "--no-verify", "--upload", "me/mine")
    assert done.returncode == 2
    for flag in ("--trim-vocab", "--verify", "--upload"):
        assert flag in done.stderr
