"""What the launcher can know of checkpoints, packages and data before ranks start."""

from __future__ import annotations

import re
import shlex
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from neox.checkpoint.save_directory.best import BestCheckpoint, BestRule, name_best
from neox.checkpoint_files.manifest import write_manifest
from neox.config import NeoXConfig, load_config
from neox.data import IndexedDataset, IndexedDatasetBuilder, pass_amounts
from neox.data.run_data import build_data_iterators
from neox.decisions.checkpoint import choose_checkpoint
from neox.errors import ConfigError
from neox.launch.hosts.placement import ChosenBy, Placement
from neox.launch.hosts.remote import path_state
from neox.launch.spec import Host
from neox.plan import RunPlan, resolve
from neox.plan.report.data_lines import data_lines, notes_on_data
from neox.plan.rules import notes_without_effect
from neox.preflight import checks
from neox.preflight.chat_checks import label_notes, packed_conversation_notes
from neox.preflight.checkpoint_checks import checkpoint_problems, finetune_notes
from neox.preflight.checks import (
    device_of_ranks,
    login_problems,
    missing_device,
    missing_packages,
    nvme_paths,
    nvme_problems,
    task_problems,
)
from neox.preflight.command_line import parse_arguments
from neox.preflight.data_amounts import read_amounts, training_tokens
from neox.preflight.data_checks import data_problems, missing_data
from neox.preflight.next_steps import next_steps
from neox.preflight.tokenizer_checks import read_vocabulary
from neox.problems import COMMAND_LINE, Missing, Problem
from neox.tokenizer import build_tokenizer
from tests.plans import small_plan

TINY = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "pos_emb": "rotary"}


def test_a_gpu_that_a_file_names_and_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shipped file names the GPU that it was made for; on a machine without one a start trains on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = Path(__file__).resolve().parents[3] / "configs" / "pythia" / "14M.yml"

    def missing(placement: Placement, *overrides: str) -> str | None:
        read = load_config([file], overrides=["host_memory_gib=64", *overrides]).config
        plan = resolve(read, placement.world_size, 50_304)
        device = device_of_ranks(plan, placement, training=True, dry_run=True)
        return missing_device(plan, device, placement, training=True)

    def ranks(count: int) -> tuple[Host, ...]:
        return (Host("localhost", tuple(range(count))),)

    here = Placement(ranks(1), ChosenBy.NOTHING, 0)
    text = missing(here)
    assert text is not None
    assert "A100" in text
    assert "`gpu_type: a100-40`" in text
    assert "on the CPU" in text
    assert missing(here, "gpu_type=null") is None, "the plan is for the CPU itself"
    small = missing(here, "host_memory_gib=1")
    assert small is not None
    assert "too little" in small
    refused = missing(Placement(ranks(8192), ChosenBy.GLOBAL_NUM_GPUS, 0))
    assert refused is not None
    assert "8192 ranks" in refused
    assert missing(Placement(ranks(8), ChosenBy.DRY_RUN_FLAGS, 0)) is None, "imagined hosts"
    assert missing(Placement(ranks(1), ChosenBy.ACCELERATORS, 1), "gpu_memory_gib=40") is None, "it has one"


def config(**keys: Any) -> NeoXConfig:
    return NeoXConfig.from_flat({**TINY, **keys}, dict.fromkeys(keys, COMMAND_LINE))


def keys_of(problems: list[Problem]) -> list[tuple[str, ...]]:
    return [problem.keys for problem in problems]


def write_checkpoint(load: Path, iteration: int, **keys: Any) -> None:
    """A checkpoint's configuration, and the name of a file of weights, which are all that is looked at."""
    directory = load / f"global_step{iteration}" / "configs"
    directory.mkdir(parents=True)
    (directory / "config.yml").write_text(yaml.safe_dump({**TINY, **keys}))
    (directory.parent / "mp_rank_00_model_states.pt").touch()
    (load / "latest").write_text(f"global_step{iteration}")


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    load = tmp_path / "ck"
    write_checkpoint(load, 3, rotary_pct=0.25)
    write_checkpoint(load, 5, train_iters=9, pipe_parallel_size=2)
    assert checkpoint_problems(config(load=str(load)), training=True) == []
    (problem,) = checkpoint_problems(config(load=str(load), hidden_size=64), training=True)
    assert (problem.keys, problem.source) == (("load", "hidden_size"), COMMAND_LINE)
    assert str(load / "global_step5") in problem.message
    for keys, training, differing in (
        ({"load": str(load), "iteration": 3}, True, ("load", "rotary_pct")),
        ({"load": str(load / "global_step3")}, True, ("load", "rotary_pct")),
        ({"save": str(load), "num_layers": 4}, False, ("save", "num_layers")),
    ):
        assert keys_of(checkpoint_problems(config(**keys), training=training)) == [differing]


def test_averaged_weights_are_for_fine_tuning_and_must_be_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3)
    keys = {"load": str(tmp_path), "load_weights": "ema"}
    first = checkpoint_problems(config(**keys), training=True)[0]
    assert first.keys == ("load_weights", "finetune")
    for training in (True, False):
        (missing,) = checkpoint_problems(config(**keys, finetune=True), training=training)
        assert missing.keys == ("load_weights", "load")
    (tmp_path / "global_step3" / "averaged_dp_0000_mp_00_weights.pt").touch()
    assert checkpoint_problems(config(**keys, finetune=True), training=True) == []


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    nowhere, load = str(tmp_path / "none"), tmp_path / "ck"
    assert checkpoint_problems(config(), training=True) == []
    assert checkpoint_problems(config(load=nowhere, save=nowhere), training=True) == []  # its first start
    assert keys_of(checkpoint_problems(config(load=nowhere), training=True)) == [("load",)]
    assert keys_of(checkpoint_problems(config(save=nowhere), training=False)) == [("save",)]
    assert keys_of(checkpoint_problems(config(), training=False)) == [("load", "save")]
    load.mkdir()
    assert checkpoint_problems(config(load=str(load), save=str(load)), training=True) == []
    for key, training in (("load", True), ("save", False)):
        assert keys_of(checkpoint_problems(config(**{key: str(load)}), training=training)) == [(key,)]
    write_checkpoint(load, 5)
    (problem,) = checkpoint_problems(config(load=str(load), iteration=4), training=True)
    assert (problem.keys, problem.source) == (("iteration", "load"), COMMAND_LINE)
    assert "global_step5" in problem.message


def test_an_optimizer_state_that_cannot_be_taken_up(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5)
    path, load = tmp_path / "global_step5", {"load": str(tmp_path)}
    (path / "layer_00-model_00-model_states.pt").touch()
    client = path / "mp_rank_00_model_states.pt"
    torch.save({"optimizer": None}, client)
    (problem,) = checkpoint_problems(config(**load), training=True)
    assert problem.keys == ("load", "optimizer.type")
    assert "`no_load_optim: true`" in problem.message
    assert "`finetune: true`" in problem.message
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
    for name in ("Adam", "exp_avg_sq", "Lion", "`no_load_optim: true`", "`finetune: true`"):
        assert name in problem.message
    assert checkpoint_problems(config(**lion, no_load_optim=True), training=True) == []

    file = path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    for key, refused in ((b"param_slice_mappings", False), (b"local_sub_partitions_of_fp32_groups", True)):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", b"..." + key)
        expected = [("load", "optimizer.type")] if refused else []
        assert keys_of(checkpoint_problems(config(**load), training=True)) == expected
    write_manifest(path, 5, 1)  # of this program: another form
    assert checkpoint_problems(config(**load), training=True) == []
    (path / "manifest.json").unlink()
    file.write_bytes(b"PK, but broken")
    assert keys_of(checkpoint_problems(config(**load), training=False)) == [("load", "iteration")]
    assert choose_checkpoint(config(**load)).none_complete


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
    assert keys_of(problems) == [("use_wandb",), ("tensorboard_dir",), ("eval_tasks",), ("optimizer.type",)]
    for problem, file in zip(problems, ("wandb", "tensorboard", "eval", "bitsandbytes"), strict=True):
        assert f"{sys.executable} -m pip install -r requirements/requirements-{file}.txt" in problem.message


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
    assert problem.keys == ("use_wandb",)
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
    assert "worker: 4 ranks" in problem.message
    (tmp_path / "missing").write_text("")
    (problem,) = nvme_problems(plan, range(4), "worker", {path: path_state(Path(path))})
    assert path in problem.message


def test_the_quickstart_is_named_for_what_it_makes() -> None:
    for name, named in (("tokenizer.json", True), ("merges.txt", False), ("tokenizer.model", False)):
        keys = {"tokenizer_type": "HFTokenizer", "vocab_file": f"data/quickstart/{name}"}
        (problem,) = read_vocabulary(config(**keys)).problems
        assert ("make quickstart" in problem.message) is named


def test_missing_data_names_the_command() -> None:
    (problem,) = missing_data(config(data_path="data/quickstart/quickstart_text_document"))
    assert "`make quickstart`" in problem.message
    (problem,) = missing_data(config(data_path="data/mine_text_document"))
    assert "--output-prefix data/mine --append-eod" in problem.message


def test_missing_data_of_one_and_of_several_sets(tmp_path: Path) -> None:
    assert keys_of(missing_data(NeoXConfig.from_flat({}))) == [("data_path", "train_data_paths")]
    prefix = tmp_path / "pile_text_document"
    config = NeoXConfig.from_flat({"data_path": str(prefix)})
    (problem,) = missing_data(config)
    assert f"tools/preprocess_data.py --input data/pile --output-prefix {tmp_path / 'pile'} " in problem.message
    prefix.with_suffix(".bin").touch()
    (problem,) = missing_data(config)
    assert f"{prefix}.idx" in problem.message
    assert f"{prefix}.bin" not in problem.message
    prefix.with_suffix(".idx").touch()
    assert missing_data(config) == []
    blend = NeoXConfig.from_flat({"train_data_paths": [str(prefix), str(tmp_path / "none")]})
    (problem,) = missing_data(blend)
    assert problem.keys == ("train_data_paths",)
    assert str(tmp_path / "none") in problem.message


def test_a_missing_validation_set_is_named_with_its_line(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"there{suffix}").touch()
    there = tmp_path / "there"
    sets = f"  wiki: {there}\n  code: {{path: {tmp_path}/code, labels: {tmp_path}/labels}}\n"
    file = tmp_path / "run.yml"
    file.write_text(f"train_data_paths: [{there}]\nvalid_data_paths:\n{sets}")
    found = missing_data(load_config([file]).config)
    assert [(problem.keys, problem.source.line) for problem in found] == [
        (("valid_data_paths.code",), 4),
        (("valid_data_paths.code.labels",), 4),
    ]


def test_a_masked_language_model_neither_writes_nor_scores_text() -> None:
    for script in ("generate", "evaluate"):
        assert keys_of(task_problems(config(objective="masked_lm"), script, None)) == [("objective",)]
    assert task_problems(config(objective="masked_lm"), "train", None) == []


def test_what_another_machine_may_have_hides_nothing_that_is_wrong_everywhere(tmp_path: Path) -> None:
    """A plan on one machine for another one: files and directories of the other one are missing, no more."""
    file = tmp_path / "file"
    file.write_text("abc\nabcdefgh\n")  # and nothing can be written below it, even by root
    tasks = ["lambada=/absent/x.jsonl", f"needle={file}/x.svg", f"perplexty={file}", "needle=x.png"]
    keys = {"seq_length": 8, "eval_tasks": tasks, "eval_stride": 9, "eval_results_prefix": f"{file}/run"}
    found = task_problems(config(**keys), "train", None)
    missing = [str(problem) for problem in found if isinstance(problem, Missing)]
    assert len(missing) == 3
    assert all(place in text for place, text in zip(("/absent/x.jsonl", f"{file}/run", "x.svg"), missing, strict=True))
    wrong = "\n".join(str(problem) for problem in found if not isinstance(problem, Missing))
    assert len(wrong.splitlines()) == 3
    assert all(name in wrong for name in ("perplexty", "x.png", "eval_stride"))

    keys = {"sample_input_file": "/absent/p.txt", "num_return_sequences": 2, "sample_output_file": f"{file}/x/out"}
    copies, output, prompts = task_problems(config(**keys), "generate", None)
    assert "num_return_sequences" in str(copies)
    assert not isinstance(copies, Missing)
    assert isinstance(output, Missing)
    assert isinstance(prompts, Missing)


def test_masked_language_models_need_sentences_and_special_tokens(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]) + "\n")
    keys = {"objective": "masked_lm", "tokenizer_type": "BertWordPieceCase", "vocab_file": str(vocab), "train_iters": 1}
    tokenizer = build_tokenizer("BertWordPieceCase", vocab)
    prefix = str(tmp_path / "data_text_sentence")
    (problem,) = data_problems(config(**keys, data_path=prefix), tokenizer, dry_run=False)
    assert f"--output-prefix {tmp_path / 'data'} --split-sentences" in problem.message
    for counts, found in (([1, 1], True), ([2], False)):
        with IndexedDatasetBuilder(prefix, np.uint16, sentences=True) as builder:
            builder.add_documents(np.array([5, 5]), [1, 1], counts)
        for dry_run in (True, False):
            problems = data_problems(config(**keys, data_path=prefix), tokenizer, dry_run=dry_run)
            assert keys_of(problems) == ([("data_path", "bert_binary_head")] if found else [])
    other = build_tokenizer("CharLevelTokenizer", None)
    (problem,) = data_problems(config(**keys, data_path=prefix), other, dry_run=True)
    assert problem.keys == ("vocab_file", "objective")
    assert "--kind wordpiece" in problem.message


def test_labels_that_are_not_those_of_their_data(tmp_path: Path) -> None:
    prefixes = [str(tmp_path / name) for name in ("text", "label")]
    for prefix, sizes in zip(prefixes, ([3, 4], [4, 3]), strict=True):
        with IndexedDatasetBuilder(prefix, np.int32) as builder:
            builder.add_documents(np.arange(7), sizes)
    tokenizer = build_tokenizer("CharLevelTokenizer", None)
    keys = {"train_data_paths": prefixes[:1], "train_label_data_paths": prefixes[1:], "train_iters": 1}
    (problem,) = data_problems(config(**keys), tokenizer, dry_run=False)
    assert (problem.keys, problem.source) == (("train_label_data_paths",), COMMAND_LINE)
    assert "sequence 0" in problem.message
    whole = {"train_data_paths": prefixes[:1], "train_iters": 1, "pack_impl": "unpacked", "allow_chopped": False}
    assert data_problems(config(**whole, seq_length=2), tokenizer, dry_run=False) == []
    (problem,) = data_problems(config(**whole, seq_length=1), tokenizer, dry_run=False)
    assert "allow_chopped" in problem.message
    keys["train_label_data_paths"] = [str(tmp_path / "none")]
    (problem,) = data_problems(config(**keys), tokenizer, dry_run=False)
    assert "none.bin" in problem.message


def planned_with_data(config: NeoXConfig) -> tuple[RunPlan, list[str], list[Problem]]:
    """Return a plan with the amounts of its data, the notes on them, and why the data does not suffice."""
    found = read_amounts(config)
    plan = resolve(config, 1, 200, amounts=found.amounts)
    try:
        return plan, [*found.notes, *notes_on_data(plan)], list(found.problems)
    except ConfigError as error:
        return plan, list(found.notes), [*found.problems, *error.problems]


def test_amounts_of_training_data(tmp_path: Path) -> None:
    prefixes = [str(tmp_path / name) for name in "ab"]
    for prefix in prefixes:
        with IndexedDatasetBuilder(prefix, np.uint16) as builder:
            builder.add_documents(np.arange(100), [10] * 10)
    keys = {"train_data_paths": prefixes, "train_iters": 20, "seq_length": 100, "train_micro_batch_size_per_gpu": 1}
    assert training_tokens(config(**keys)) == (100, 100)
    assert training_tokens(config(data_path=prefixes[0], split="80,20")) == (80,)
    assert training_tokens(config(data_path=str(tmp_path / "none"))) == ()
    plan, notes, problems = planned_with_data(config(**keys))
    assert problems == []
    assert plan.amounts.dataset_tokens == (100, 100)
    assert len(notes) == 2
    _, _, (problem,) = planned_with_data(config(**keys, train_data_max_passes=1))
    assert problem.keys[0] == "train_data_max_passes"


def test_passes_over_a_part_count_its_documents(tmp_path: Path) -> None:
    """`split` divides documents: a part of few documents may have another share of the tokens than of the documents."""
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_documents(np.arange(100), [60, 20, 20])
    keys = {"data_path": str(tmp_path / "x"), "split": "67,33,0", "train_iters": 8, "train_micro_batch_size_per_gpu": 1}
    plan, _, _ = planned_with_data(config(**keys, seq_length=20))
    assert plan.amounts.dataset_tokens == (80,)
    (line,) = data_lines(plan)
    assert "160 tokens" in line
    assert "(2 passes)" in line
    plan, _, _ = planned_with_data(config(**keys, seq_length=60, pack_impl="unpacked"))
    assert plan.amounts.pass_tokens == (120,)


@pytest.mark.parametrize(
    "keys",
    [
        {"pack_impl": "pack_until_overflow", "allow_chopped": False, "seq_length": 8},
        {"split": "1,50,50", "seq_length": 8},
    ],
)
def test_training_data_without_a_usable_document_has_a_plan(tmp_path: Path, keys: dict[str, Any]) -> None:
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_documents(np.arange(100), [10] * 10)
    keys = {"data_path": str(tmp_path / "x"), "train_iters": 8, "train_micro_batch_size_per_gpu": 1, **keys}
    plan, _, _ = planned_with_data(config(**keys))
    (line,) = data_lines(plan)
    assert line.endswith("x 100 % (no usable document)")


@pytest.mark.parametrize(
    ("packing", "samples"),
    [
        ({"pack_impl": "unpacked"}, 11),
        ({"pack_impl": "unpacked", "allow_chopped": False}, 10),
        ({"pack_impl": "pack_until_overflow"}, 6),
    ],
)
def test_passes_over_padded_samples_count_the_padding(tmp_path: Path, packing: dict[str, Any], samples: int) -> None:
    """A pass over 11 documents, of which one is longer than a sample of 20 tokens."""
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_documents(np.arange(140), [10] * 10 + [40])
        builder.add_document([1])  # it has no token to predict
    keys = {"train_data_paths": [str(tmp_path / "x")], "seq_length": 20, "train_micro_batch_size_per_gpu": 1, **packing}
    plan, _, problems = planned_with_data(config(**keys, train_iters=samples, train_data_max_passes=1))
    assert problems == []
    assert plan.amounts.pass_tokens == (samples * 20,)
    (line,) = data_lines(plan)
    assert "(1 passes)" in line
    settings = resolve(config(**keys, train_iters=samples, train_data_max_passes=1), 1, 512)
    tokenizer = build_tokenizer("CharLevelTokenizer", None)
    build_data_iterators(settings, 0, 0, tokenizer=tokenizer, cache_dir=tmp_path)  # the start agrees
    _, _, (problem,) = planned_with_data(config(**keys, train_iters=samples + 1, train_data_max_passes=1))
    assert problem.keys[0] == "train_data_max_passes"


def test_the_plan_names_what_best_fit_packing_wastes(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        for size in (17, 40, 17, 17):
            builder.add_document(np.ones(size, dtype=np.uint16))
    keys = {"train_data_paths": [str(tmp_path / "x")], "seq_length": 16, "pack_impl": "best_fit"}
    keys |= {"train_iters": 1, "train_micro_batch_size_per_gpu": 1}
    _, notes, _ = planned_with_data(config(**keys))
    (note,) = [note for note in notes if "best_fit" in note]
    assert "25.0%" in note


def test_padding_and_cuts_are_counted_by_one_look_at_the_labels_and_say_by_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, kind in (("x", np.uint16), ("labels", np.int32)):
        with IndexedDatasetBuilder(tmp_path / name, kind) as builder:
            builder.add_documents(np.ones(80, dtype=kind), [20] * 4)
    keys = {"train_data_paths": [str(tmp_path / "x")], "seq_length": 16, "pack_impl": "unpacked"}
    keys |= {"train_label_data_paths": [str(tmp_path / "labels")], "max_lost_labels": 0.5}
    keys |= {"train_iters": 1, "train_micro_batch_size_per_gpu": 1}
    looks = []
    blocks = IndexedDataset.blocks

    def counted(dataset: IndexedDataset, *arguments: Any) -> Any:
        looks.append(dataset.prefix)
        return blocks(dataset, *arguments)

    monkeypatch.setattr(IndexedDataset, "blocks", counted)
    plan, notes, problems = planned_with_data(config(**keys))
    assert problems == []
    assert plan.amounts.pass_tokens == (4 * 16,)
    assert any(f"{1 - 16 / 19:.1%}" in note for note in notes if "4 of 4 documents are cut" in note)
    assert len(looks) == 1
    assert not any("first" in note for note in notes)
    monkeypatch.setattr(pass_amounts, "COUNTED_DOCUMENTS", 3)
    _, notes, _ = planned_with_data(config(**keys))
    assert any("first 3 documents" in note for note in notes if "padding" in note)


def test_a_tokenizer_without_tokens_for_fill_in_the_middle(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_document([1, 2, 3])
    tokenizer = build_tokenizer("HFTokenizer", Path(__file__).parents[2] / "golden" / "data" / "tokenizer.json")
    keys = {"data_path": str(tmp_path / "x"), "train_iters": 1}
    (problem,) = data_problems(config(**keys, fim_rate=0.5), tokenizer, dry_run=True)
    assert problem.keys[0] == "fim_rate"
    assert "fim_tokens" in problem.message
    named = ["<|endoftext|>", "<|padding|>", "the"]
    assert data_problems(config(**keys, fim_rate=0.5, fim_tokens=named), tokenizer, dry_run=True) == []


def test_finetuning_may_depart_from_its_checkpoint_and_says_where(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5)
    keys = {"load": str(tmp_path), "finetune": True}
    positions = config(**keys, pos_emb="none")
    assert checkpoint_problems(positions, training=True) == []
    assert "pos_emb is rotary" in finetune_notes(positions)[0]
    assert checkpoint_problems(positions, training=False) != []  # text of another network would be wrong
    assert checkpoint_problems(config(**keys, hidden_size=64), training=True) != []
    assert finetune_notes(config(**keys)) == []


def test_the_start_of_a_prefix_is_completed(tmp_path: Path) -> None:
    (tmp_path / "own_text_document.idx").touch()
    (problem,) = missing_data(config(data_path=str(tmp_path / "own")))
    assert str(tmp_path / "own_text_document") in problem.message


def test_conversations_that_lose_their_answers(tmp_path: Path) -> None:
    """30 conversations of 8 tokens, the last three of which are trained; three of them are one token shorter."""
    sizes = [8] * 27 + [7] * 3
    for name in ("text", "label"):
        with IndexedDatasetBuilder(tmp_path / name, np.int32) as builder:
            for size in sizes:
                ids = np.full(size, 5, dtype=np.int32)
                if name == "label":
                    ids[:-3] = -100
                builder.add_document(ids)
    keys: dict[str, Any] = {
        "train_data_paths": [str(tmp_path / "text")],
        "train_label_data_paths": [str(tmp_path / "label")],
        "pack_impl": "unpacked",
        "train_iters": 10,
        "train_micro_batch_size_per_gpu": 1,
    }

    _, notes, problems = planned_with_data(config(**keys, seq_length=7))
    assert problems == []
    assert not any("are cut" in note for note in notes)

    _, notes, (problem,) = planned_with_data(config(**keys, seq_length=6))
    assert problem.keys == ("max_lost_labels", "seq_length")
    assert any("27 of 30 documents are cut and 0 left out, which loses 30.0%" in note for note in notes)
    evaluated = {"valid_data_paths": keys["train_data_paths"], "valid_label_data_paths": keys["train_label_data_paths"]}
    _, notes, problems = planned_with_data(config(**keys, **evaluated, seq_length=6, max_lost_labels=0.3))
    assert problems == []
    assert sum("which loses 30.0% of the evaluated tokens" in note for note in notes) == 1

    plan, notes, _ = planned_with_data(config(**keys, seq_length=4, max_lost_labels=1))
    assert plan.amounts.pass_tokens == (3 * 4,)  # one token of the three shorter ones is left
    assert any("3 of 30 documents are cut and 27 left out" in note for note in notes)
    assert any("read 3.3 times" in line or "3.33 passes" in line for line in data_lines(plan))


def test_conversations_in_one_sample() -> None:
    keys = {"train_data_paths": ["x"], "train_label_data_paths": ["y"], "pack_impl": "pack_until_overflow"}
    assert "attend to those before" in packed_conversation_notes(config(**keys))[0]
    assert "do not attend" in packed_conversation_notes(config(**keys, reset_attention_mask=True))[0]
    assert packed_conversation_notes(config(**{**keys, "pack_impl": "unpacked"})) == []


def test_conversations_without_labels_have_a_note(tmp_path: Path) -> None:
    prefix = str(tmp_path / "chats_messages_document")
    labels = str(tmp_path / "chats_messages_label_document")
    Path(f"{labels}.idx").touch()
    (note,) = label_notes(config(train_data_paths=[prefix]))
    assert f"train_label_data_paths: [{labels}]" in note
    assert len(label_notes(config(data_path=prefix))) == 1
    assert label_notes(config(train_data_paths=[prefix], train_label_data_paths=[labels])) == []
    assert label_notes(config(train_data_paths=[str(tmp_path / "x_text_document")])) == []


def test_missing_conversations_name_the_tool_that_makes_them(tmp_path: Path) -> None:
    prefix = str(tmp_path / "chats_messages_document")
    (problem,) = missing_data(config(train_data_paths=[prefix], vocab_file="tok.json"))
    assert f"tools/preprocess_chat.py --input chats.jsonl --output-prefix {tmp_path}/chats" in problem.message
    assert "--vocab-file tok.json" in problem.message


def test_keys_of_evaluations_without_validation_data_have_a_note() -> None:
    keys = {"train_data_paths": ["x"], "eval_iters": 2, "ema_decay": 0.9, "eval_ema": True}

    def noted(**more: Any) -> list[str]:
        notes = notes_without_effect(config(**keys, **more))
        return [note.keys[0] for note in notes if "valid_data_paths" in note.keys]

    assert noted() == ["eval_iters", "eval_ema"]
    assert noted(valid_data_paths=["y"]) == []
    del keys["train_data_paths"]
    assert noted(data_path="x") == []


def test_the_commands_after_a_training_name_its_files_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train.py", "-d", "configs", "a.yml", "b.yml", "--set", "save=runs/x y", "--overwrite"]
    arguments = parse_arguments(words)
    keys = {"seq_length": 8, "train_micro_batch_size_per_gpu": 1, "train_iters": 1}
    plan = resolve(config(save="runs/x y", **keys), 1, 100)
    text, export = next_steps(arguments, plan)
    assert "tools/generate.py -d configs a.yml b.yml --set 'save=runs/x y' --set text_gen_type=interactive" in text
    assert "tools/convert_to_hf.py --input_dir 'runs/x y' --output_dir 'runs/x y-hf'" in export
    assert list(next_steps(arguments, resolve(config(**keys), 1, 100))) == []
    monkeypatch.chdir(tmp_path)
    script = shlex.split(next(next_steps(arguments, plan)).partition(": ")[2])[1]
    assert Path(script).is_file()


def test_the_commands_after_a_training_take_what_it_has_saved() -> None:
    """Not the weights that it began with, whether a file or the command line names them."""
    keys = {"seq_length": 8, "train_micro_batch_size_per_gpu": 1, "train_iters": 1}
    words = ["train.py", "a.yml", "--set", "load=runs/base", "--set", "save=runs/new", "--set", "iteration=7"]
    plan = resolve(config(save="runs/new", load="runs/base", iteration=7, load_weights="ema", **keys), 1, 100)
    text, _ = next_steps(parse_arguments(words), plan)
    assert re.findall(r"--set (\S+)", text)[:4] == [
        "save=runs/new",
        "load=runs/new",
        "iteration=null",
        "load_weights=null",
    ]


def test_after_a_training_the_best_checkpoint_is_exported_apart_from_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = tmp_path / "run"
    arguments = parse_arguments(["train.py", "a.yml"])
    keys = {"seq_length": 8, "train_micro_batch_size_per_gpu": 1, "train_iters": 3, "save": f"{save}/"}
    keys |= {"save_best": "validation/lm_loss", "checkpoint_factor": 1, "eval_interval": 1}

    def exports(**more: str) -> list[str]:
        return [step for step in next_steps(arguments, resolve(config(**keys, **more), 1, 100)) if "export" in step]

    monkeypatch.chdir(Path(__file__).resolve().parents[3])
    for step in (2, 3):
        (save / f"global_step{step}").mkdir(parents=True)
        (save / f"global_step{step}" / "mp_rank_00_model_states.pt").touch()
    (save / "latest").write_text("global_step3")
    last = f"to export the model: python tools/convert_to_hf.py --input_dir {save} --output_dir {save}-hf"
    name_best(save, BestCheckpoint("global_step3", 3, 1.5, BestRule("validation/lm_loss")))
    assert exports() == [last]
    name_best(save, BestCheckpoint("global_step2", 2, 1.25, BestRule("validation/lm_loss")))
    best, then = exports()
    assert then == last
    texts = [step for step in next_steps(arguments, resolve(config(**keys), 1, 100)) if "generate" in step]
    assert [f"--set load={save}/best" in step for step in texts] == [False, True]
    assert "(validation/lm_loss 1.25 at step 2)" in best
    assert f"--input_dir {save}/best --output_dir {save}-best-hf" in best
    assert exports(hf_export="best") == [f"exported models (best): {save}-hf/best"]


def test_after_a_training_on_conversations_the_first_command_keeps_one(tmp_path: Path) -> None:
    save = tmp_path / "run"
    checkpoint = save / "global_step3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "mp_rank_00_model_states.pt").touch()
    (save / "latest").write_text(checkpoint.name)
    arguments = parse_arguments(["train.py", "a.yml", "--set", f"save={save}"])
    keys = {"seq_length": 8, "train_micro_batch_size_per_gpu": 1, "train_iters": 3}
    plan = resolve(config(save=str(save), **keys), 1, 100)
    assert [step for step in next_steps(arguments, plan) if "--chat" in step] == []
    (checkpoint / "chat_template.json").write_text("{}")
    conversation = next(next_steps(arguments, plan))
    assert f"tools/generate.py a.yml --set save={save} --chat" in conversation


def test_a_training_of_no_steps_is_refused_before_its_ranks_start():
    """It passed a dry run, and a rank then found no documents to train on and blamed `split`."""
    problems = data_problems(config(train_iters=0), None, dry_run=True)
    assert ("train_iters",) in [problem.keys for problem in problems]
