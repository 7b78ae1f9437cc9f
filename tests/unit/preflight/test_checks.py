"""What the launcher can know of checkpoints, packages and data before ranks start."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from neox.config import NeoXConfig
from neox.data import IndexedDatasetBuilder
from neox.launch.remote import path_state
from neox.preflight import checks
from neox.preflight.checks import (
    checkpoint_problems,
    finetune_notes,
    login_problems,
    missing_packages,
    nvme_paths,
    nvme_problems,
    task_problems,
)
from neox.preflight.data_checks import data_problems, missing_data
from neox.tokenizer import build_tokenizer
from tests.plans import small_plan

TINY = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "pos_emb": "rotary"}


def config(**keys: Any) -> NeoXConfig:
    return NeoXConfig.from_flat({**TINY, **keys}, dict.fromkeys(keys, "--set"))


def write_checkpoint(load: Path, iteration: int, **keys: Any) -> None:
    """The configuration of a checkpoint, which is all that is looked at."""
    directory = load / f"global_step{iteration}" / "configs"
    directory.mkdir(parents=True)
    (directory / "config.yml").write_text(yaml.safe_dump({**TINY, **keys}))
    (load / "latest").write_text(f"global_step{iteration}")


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    load = tmp_path / "ck"
    write_checkpoint(load, 3, rotary_pct=0.25)
    write_checkpoint(load, 5, train_iters=9, pipe_parallel_size=2)
    assert checkpoint_problems(config(load=str(load)), training=True) == []
    (problem,) = checkpoint_problems(config(load=str(load), hidden_size=64), training=True)
    assert problem.startswith(f"--set: {load / 'global_step5'} is of another model: hidden_size is 32 there, ")
    assert "`hidden_size: 64` (--set) here" in problem
    (problem,) = checkpoint_problems(config(load=str(load), iteration=3), training=True)
    assert "rotary_pct is 0.25 there" in problem
    (problem,) = checkpoint_problems(config(load=str(load / "global_step3")), training=True)
    assert "rotary_pct is 0.25 there" in problem
    (problem,) = checkpoint_problems(config(save=str(load), num_layers=4), training=False)
    assert "num_layers is 2 there" in problem


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    nowhere, load = str(tmp_path / "none"), tmp_path / "ck"
    assert checkpoint_problems(config(), training=True) == []
    assert checkpoint_problems(config(load=nowhere, save=nowhere), training=True) == []  # its first start
    assert "is no directory" in checkpoint_problems(config(load=nowhere), training=True)[0]
    assert "is no directory" in checkpoint_problems(config(save=nowhere), training=False)[0]
    assert "neither `load` nor `save`" in checkpoint_problems(config(), training=False)[0]
    load.mkdir()
    assert checkpoint_problems(config(load=str(load), save=str(load)), training=True) == []
    for keys, training in (({"load": str(load)}, True), ({"save": str(load)}, False)):
        assert "holds no checkpoint" in checkpoint_problems(config(**keys), training=training)[0]
    write_checkpoint(load, 5)
    (problem,) = checkpoint_problems(config(load=str(load), iteration=4), training=True)
    for words in ("--set: `iteration: 4`", str(load), "global_step5"):
        assert words in problem


def test_an_optimizer_state_that_cannot_be_taken_up(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5)
    path, load = tmp_path / "global_step5", {"load": str(tmp_path)}
    (path / "layer_00-model_00-model_states.pt").touch()
    client = path / "mp_rank_00_model_states.pt"
    torch.save({"optimizer": None}, client)
    (problem,) = checkpoint_problems(config(**load), training=True)
    assert "holds no optimizer state" in problem
    assert "`no_load_optim: true`" in problem
    assert "`finetune: true`" in problem
    assert checkpoint_problems(config(**load), training=False) == []
    for way_out in ("no_load_optim", "finetune"):
        assert checkpoint_problems(config(**load, **{way_out: True}), training=True) == []
    client.unlink()
    assert len(checkpoint_problems(config(**load), training=True)) == 1
    untouched = torch.optim.AdamW([torch.zeros(1)]).state_dict()  # before the first step, without moments
    torch.save({"optimizer": untouched}, client)  # without ZeRO the state is in there
    assert checkpoint_problems(config(**load), training=True) == []
    lion = {**load, "optimizer": {"type": "Lion"}}
    (problem,) = checkpoint_problems(config(**lion), training=True)
    for words in ("Adam (exp_avg, exp_avg_sq)", "Lion cannot go on with", "`no_load_optim: true`", "`finetune: true`"):
        assert words in problem
    assert checkpoint_problems(config(**lion, no_load_optim=True), training=True) == []

    file = path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    for key, refused in ((b"param_slice_mappings", False), (b"local_sub_partitions_of_fp32_groups", True)):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", b"..." + key)
        assert [" DeepSpeed before 0.7 " in p for p in checkpoint_problems(config(**load), training=True)] == (
            [True] if refused else []
        )
    (path / "manifest.json").touch()  # of this program: another form
    assert checkpoint_problems(config(**load), training=True) == []
    (path / "manifest.json").unlink()
    file.write_bytes(b"PK, but broken")
    assert checkpoint_problems(config(**load), training=True) == []


@pytest.mark.parametrize("written", ["", "num_layers: [", "unknown_key: 1\n"])
def test_a_configuration_that_cannot_be_compared_is_left_to_the_ranks(tmp_path: Path, written: str) -> None:
    write_checkpoint(tmp_path, 5)
    (tmp_path / "global_step5" / "configs" / "config.yml").write_text(written)
    assert checkpoint_problems(config(load=str(tmp_path), hidden_size=64), training=True) == []


def test_packages_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_is_installed", lambda name: False)
    assert missing_packages(config(eval_tasks=["wikitext=a.txt"])) == []
    keys = {"use_wandb": True, "tensorboard_dir": "tb", "eval_tasks": ["piqa"], "optimizer": {"type": "Adam8bit"}}
    problems = missing_packages(config(**keys))
    packages = [problem.split("package ")[1].split(",")[0] for problem in problems]
    assert packages == ["wandb", "tensorboard", "lm_eval", "bitsandbytes"]
    command = f"{sys.executable} -m pip install -r requirements/requirements-wandb.txt"
    assert f"not installed: {command}, or unset use_wandb" in problems[0]


def test_a_directory_of_logs_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_tracker_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not checks._is_installed("a_tracker_of_nobody")
    assert checks._is_installed("json")


def test_a_login_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_is_installed", lambda package: True)
    home = {"HOME": str(tmp_path)}
    asks = config(use_wandb=True, wandb_host="https://wandb.example.org")
    (problem,) = login_problems(asks, home)
    assert "`wandb login`" in problem
    for more in ({"WANDB_API_KEY": "x"}, {"WANDB_MODE": "offline"}):
        assert login_problems(asks, {**home, **more}) == []
    assert login_problems(config(), home) == []
    (tmp_path / ".netrc").write_text("machine wandb.example.org login user password x\n")
    assert login_problems(asks, home) == []
    assert len(login_problems(config(use_wandb=True), home)) == 1


def test_a_disk_for_offload_needs_room(tmp_path: Path) -> None:
    """Every rank of a host takes its part; the directory may be missing, but not be a file."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "missing" / "nvme")}
    plan = small_plan(4, zero_optimization={"stage": 3, "offload_optimizer": nvme, "offload_param": nvme})
    (path,) = nvme_paths(plan.config)
    assert nvme_problems(plan, range(4), "worker", {path: path_state(Path(path))}) == []
    needed = 4 * plan.memory.files
    assert nvme_problems(plan, range(4), "worker", {path: {"writable": True, "free": needed}}) == []
    (problem,) = nvme_problems(plan, range(4), "worker", {path: {"writable": True, "free": needed - 1}})
    assert "worker: 4 ranks" in problem
    (tmp_path / "missing").write_text("")
    (problem,) = nvme_problems(plan, range(4), "worker", {path: path_state(Path(path))})
    assert path in problem


def test_the_quickstart_is_named_for_what_it_makes() -> None:
    for name, named in (("tokenizer.json", True), ("merges.txt", False), ("tokenizer.model", False)):
        keys = {"tokenizer_type": "HFTokenizer", "vocab_file": f"data/quickstart/{name}"}
        (problem,) = checks.vocabulary(config(**keys))[2]
        assert ("make quickstart" in problem) is named


def test_missing_data_names_the_command() -> None:
    (problem,) = missing_data(config(data_path="data/quickstart/quickstart_text_document"))
    assert problem.endswith("make them with `make quickstart`")
    (problem,) = missing_data(config(data_path="data/mine_text_document"))
    assert "--output-prefix data/mine --append-eod" in problem


def test_missing_data_of_one_and_of_several_sets(tmp_path: Path) -> None:
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


def test_a_masked_language_model_neither_writes_nor_scores_text() -> None:
    for script in ("generate", "evaluate"):
        (problem,) = task_problems(config(objective="masked_lm"), script, None)
        assert "`objective: masked_lm`" in problem
    assert task_problems(config(objective="masked_lm"), "train", None) == []


def test_masked_language_models_need_sentences_and_special_tokens(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]) + "\n")
    keys = {"objective": "masked_lm", "tokenizer_type": "BertWordPieceCase", "vocab_file": str(vocab), "train_iters": 1}
    tokenizer = build_tokenizer("BertWordPieceCase", vocab)
    prefix = str(tmp_path / "data_text_sentence")
    (problem,) = data_problems(config(**keys, data_path=prefix), tokenizer, dry_run=False)
    assert "--split-sentences" in problem
    assert f"--output-prefix {tmp_path / 'data'} " in problem
    for counts, found in (([1, 1], True), ([2], False)):
        with IndexedDatasetBuilder(prefix, np.uint16, sentences=True) as builder:
            builder.add_documents(np.array([5, 5]), [1, 1], counts)
        for dry_run in (True, False):
            problems = data_problems(config(**keys, data_path=prefix), tokenizer, dry_run=dry_run)
            assert [all(word in p for word in ("data_path", prefix, "--split-sentences")) for p in problems] == (
                [True] if found else []
            )
    other = build_tokenizer("CharLevelTokenizer", None)
    (problem,) = data_problems(config(**keys, data_path=prefix), other, dry_run=True)
    assert "--kind wordpiece" in problem


def test_labels_that_are_not_those_of_their_data(tmp_path: Path) -> None:
    prefixes = [str(tmp_path / name) for name in ("text", "label")]
    for prefix, sizes in zip(prefixes, ([3, 4], [4, 3]), strict=True):
        with IndexedDatasetBuilder(prefix, np.int32) as builder:
            builder.add_documents(np.arange(7), sizes)
    tokenizer = build_tokenizer("CharLevelTokenizer", None)
    keys = {"train_data_paths": prefixes[:1], "train_label_data_paths": prefixes[1:], "train_iters": 1}
    (problem,) = data_problems(config(**keys), tokenizer, dry_run=False)
    assert problem.startswith("--set: train_label_data_paths: ")
    assert "4 tokens in sequence 0, and the data has 3" in problem
    whole = {"train_data_paths": prefixes[:1], "train_iters": 1, "pack_impl": "unpacked", "allow_chopped": False}
    assert data_problems(config(**whole, seq_length=2), tokenizer, dry_run=False) == []
    (problem,) = data_problems(config(**whole, seq_length=1), tokenizer, dry_run=False)
    assert "allow_chopped is false" in problem
    keys["train_label_data_paths"] = [str(tmp_path / "none")]
    (problem,) = data_problems(config(**keys), tokenizer, dry_run=False)
    assert "none.bin" in problem


def test_finetuning_may_depart_from_its_checkpoint_and_says_where(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5)
    keys = {"load": str(tmp_path), "finetune": True}
    positions = config(**keys, pos_emb="none")
    assert checkpoint_problems(positions, training=True) == []
    assert "pos_emb is rotary there" in finetune_notes(positions)[0]
    assert checkpoint_problems(positions, training=False) != []  # text of another network would be wrong
    assert checkpoint_problems(config(**keys, hidden_size=64), training=True) != []
    assert finetune_notes(config(**keys)) == []
