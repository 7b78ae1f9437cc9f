"""The model that generation, evaluation and export read, from `load`, `save` and `finetune`."""

from __future__ import annotations

from pathlib import Path

import pytest

from neox.plan import config_from_files, model_directory, with_trained_model
from neox.plan.run_identity import RUN_FILE, identity_text, run_identity

FINETUNING = """num_layers: 2
hidden_size: 16
num_attention_heads: 2
seq_length: 8
max_position_embeddings: 8
train_micro_batch_size_per_gpu: 1
load: BASE
save: OWN
finetune: true
iteration: 3
"""


@pytest.fixture
def directories(tmp_path: Path) -> Path:
    """A base model in `base`, a directory of a run in `own`, and its YAML file."""
    (tmp_path / "base" / "global_step3").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    text = FINETUNING.replace("BASE", str(tmp_path / "base")).replace("OWN", str(tmp_path / "own"))
    (tmp_path / "c.yml").write_text(text)
    return tmp_path


def chosen(directory: Path, *overrides: str) -> tuple[str | None, int | None, bool]:
    """Return the name of the directory of `load`, `iteration` and `finetune`."""
    config = config_from_files([directory / "c.yml"], overrides=overrides)
    keys = with_trained_model(config).checkpoint
    step = "" if keys.iteration is None else f"/global_step{keys.iteration}"
    assert model_directory(config) == f"{keys.load}{step}"
    return Path(str(keys.load)).name, keys.iteration, keys.finetune


def test_a_fine_tuned_model_is_read_as_soon_as_there_is_one(directories: Path) -> None:
    assert chosen(directories) == ("base", 3, True)
    (directories / "own" / "global_step10").mkdir()
    assert chosen(directories) == ("own", None, False)
    assert chosen(directories, "iteration=10") == ("own", 10, False)


def test_a_directory_of_the_command_line_is_read(directories: Path) -> None:
    (directories / "own" / "global_step10").mkdir()
    assert chosen(directories, f"load={directories / 'base'}") == ("base", 3, True)
    both = (f"load={directories / 'base'}", f"save={directories / 'own'}")  # the command of the training, typed again
    assert chosen(directories, *both) == ("own", None, False)


def test_other_runs_read_load_and_then_save(directories: Path) -> None:
    (directories / "own" / "global_step10").mkdir()
    assert chosen(directories, "finetune=false") == ("base", 3, False)
    config = config_from_files([directories / "c.yml"], overrides=["finetune=false", "load=null"])
    assert model_directory(config) == str(directories / "own" / "global_step3")
    assert model_directory(config.updated({}, without=("iteration",))) == str(directories / "own")
    assert model_directory(config.updated({}, without=("save", "iteration"))) is None


def test_a_run_that_continues_another_one_elsewhere_is_read_as_soon_as_it_has_a_checkpoint(directories: Path) -> None:
    assert chosen(directories, "finetune=false") == ("base", 3, False)
    saved = directories / "own" / "global_step10"
    saved.mkdir()
    config = config_from_files([directories / "c.yml"], overrides=["finetune=false"])
    (saved / RUN_FILE).write_text(identity_text(run_identity(config)))
    assert chosen(directories, "finetune=false") == ("own", None, False)
    assert chosen(directories, "finetune=false", "iteration=4") == ("base", 4, False)  # not what it continues
    other = f"load={directories / 'base'}"
    assert chosen(directories, "finetune=false", other) == ("base", 3, False)


def test_the_kind_of_the_starts_weights_is_not_that_of_the_trained_ones(directories: Path) -> None:
    (directories / "own" / "global_step10").mkdir()
    text = (directories / "c.yml").read_text()
    (directories / "c.yml").write_text(text + "load_weights: ema\n")
    config = config_from_files([directories / "c.yml"])
    assert with_trained_model(config).checkpoint.load_weights == "trained"
    asked = config_from_files([directories / "c.yml"], overrides=["load_weights=ema"])
    assert with_trained_model(asked).checkpoint.load_weights == "ema"
