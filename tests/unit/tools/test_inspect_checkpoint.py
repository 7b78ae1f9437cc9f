"""tools/inspect_checkpoint.py and tools/reshard.py."""

from __future__ import annotations

import json
from pathlib import Path

from neox.checkpoint import commit, load_file, open_checkpoint, reshard, save_file, stage_directory
from neox.errors import CheckpointError
from tests.errors import raises_naming
from tests.unit.checkpoint.synthetic import seeded_weights, small_plan, write_checkpoint

ROOT = Path(__file__).parents[3]


def test_inspect_and_reshard(tmp_path, run):
    layers = small_plan()
    weights = seeded_weights(layers)
    state = {"args": {"num_attention_heads": 4}, "model_identity": {"gpt_j_residual": True, "vocab_size": 60}}
    staged = stage_directory(tmp_path / "a", 3)
    write_checkpoint(staged, layers, weights, tp_size=2, pp_size=2, client_state=state)
    commit(staged)

    shown = run("inspect_checkpoint.py", tmp_path / "a", "--json", "--tensors")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert (found["iteration"], found["tp_size"], found["pp_size"], found["problems"]) == (3, 2, 2, [])
    assert found["parameters"] == layers.numel
    tensors = {(t["index"], t["name"]): t for t in found["tensors"]}
    assert tensors[2, "attention.dense.bias"]["norm"] == weights[2, "attention.dense.bias"].double().norm().item()

    source = tmp_path / "a" / "global_step3"
    done = run("reshard.py", "--input_dir", source, "--output_dir", tmp_path / "b", "--model-parallel-size", 4)
    assert done.returncode == 0, done.stderr
    same = run("inspect_checkpoint.py", source, tmp_path / "b")
    assert same.returncode == 0, same.stderr
    assert "all tensors are equal" in same.stdout

    path = tmp_path / "b" / "global_step3" / "layer_03-model_01-model_states.pt"
    state = {k: v.clone() for k, v in load_file(path).items()}
    state["mlp.dense_h_to_4h.bias"][0] += 1
    path.unlink()  # still mapped
    save_file(path, state)
    other = run("inspect_checkpoint.py", source, tmp_path / "b")
    assert other.returncode == 3
    assert "mlp.dense_h_to_4h.bias: values" in other.stdout
    assert "1 tensors differ" in other.stdout
    broken = run("inspect_checkpoint.py", tmp_path / "b" / "global_step3")
    assert broken.returncode == 4
    assert "sha256 differs" in broken.stdout or "bytes instead of" in broken.stdout


def test_messages(tmp_path, run):
    failed = run("inspect_checkpoint.py", tmp_path / "global_step3")
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: ")
    assert "Traceback" not in failed.stderr
    layers = small_plan()
    write_checkpoint(tmp_path / "global_step3", layers, seeded_weights(layers), tp_size=2)
    failed = run(
        "reshard.py", "--input_dir", tmp_path / "global_step3", "--output_dir", tmp_path, "--model-parallel-size", 1
    )
    assert "gpt_j_residual" in failed.stderr
    for wrong, what in (
        (tmp_path / "empty", "has no model files"),
        (tmp_path / "none", f"is not a directory ({tmp_path} has global_step3); give"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        failed = run("reshard.py", "--input_dir", wrong, "--output_dir", tmp_path / "c", "--model-parallel-size", 1)
        assert f"error: {wrong} {what}" in failed.stderr


def test_resharding_never_takes_up_damage(tmp_path):
    layers = small_plan()
    staged = stage_directory(tmp_path / "a", 3)
    write_checkpoint(staged, layers, seeded_weights(layers), client_state={"iteration": 3})
    file = commit(staged) / "layer_02-model_00-model_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with raises_naming(CheckpointError, "layer_02-model_00-model_states.pt"):
        reshard(open_checkpoint(file.parent), tmp_path / "b", tp_size=1, pp_size=1)
    assert not (tmp_path / "b").exists()
