"""Distillation: the same numbers under every layout, and the teacher's logits that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neox.data import IndexedDatasetBuilder
from neox.data.teacher_file import TeacherIdentity, TeacherWriter
from neox.errors import DataError
from neox.plan import RunPlan
from tests.distributed.spawn import RankError, run_ranks
from tests.distributed.training_runs import SEQ, VOCAB, tiny_plan
from tests.errors import raises_naming

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "zero3": {"zero": 3},
    "tp2": {"mp": 2},
    "tp2-row": {"mp": 2, "no_weight_tying": True, "output_layer_parallelism": "row"},
    "pp2": {"pp": 2},
    "interleaved": {"pp": 2, "pipeline_schedule": "interleaved"},
    "dualpipev": {"pp": 2, "pipeline_schedule": "dualpipev"},
    "cp2": {"context_parallel_size": 2, "attention_config": [[["flash"], "all"]]},
}


SCHEDULES = ("interleaved", "dualpipev")


def keys_of(directory: Path, **others: Any) -> dict[str, Any]:
    """Write documents, and return the keys of a run that learns from a teacher."""
    random = np.random.default_rng(2)
    documents = [random.integers(0, VOCAB, random.integers(10, 40)).astype(np.int32) for _ in range(40)]
    if not (directory / "text.idx").exists():
        with IndexedDatasetBuilder(directory / "text", np.int32) as builder:
            builder.add_documents(np.concatenate(documents), list(map(len, documents)))
    return {
        "data_path": str(directory / "text"),
        "split": "80,20,0",
        "num_workers": 0,
        "num_layers": 2,
        "train_iters": STEPS,
        "eval_interval": 100,
        "eval_iters": 1,
        "loss_normalization": "tokens",
        **others,
    }


def test_a_teacher_reads_whole_samples_and_the_disk_holds_them(tmp_path: Path) -> None:
    short = tiny_plan(1, seq_length=SEQ // 2, max_position_embeddings=SEQ // 2, pos_emb="learned")
    run = tiny_plan(1, train_micro_batch_size_per_gpu=4, **keys_of(tmp_path))
    with pytest.raises(RankError, match="teacher reads 8"):
        run_ranks(1, write_teacher, (short, run, str(tmp_path / "teacher")))
    assert not (tmp_path / "teacher").exists()
    writer = TeacherWriter(tmp_path / "large", TeacherIdentity("initial", VOCAB, (), top_k=1024))
    with raises_naming(DataError, tmp_path, "GB"):
        writer.rows("train", 10**9, 4096)


def write_teacher(plans: tuple[RunPlan, RunPlan, str]) -> list[int]:
    """On one rank: write the logits of a teacher with initial weights; return how many samples the run reads."""
    from neox.engine import initialize_distributed
    from neox.generation.load import runner_of_stage
    from neox.generation.teacher import write_teacher_logits
    from neox.model import GPT
    from neox.tokenizer import build_tokenizer

    teacher, run, directory = plans
    grid, device = initialize_distributed(teacher)
    tokenizer = build_tokenizer("CharLevelTokenizer", None)
    runner = runner_of_stage(teacher, GPT(teacher, grid, device=device).eval().stage, grid, device)
    identity = TeacherIdentity("initial", VOCAB, tokenizer.known_hashes, top_k=7)
    return [write_teacher_logits(run, tokenizer, runner, identity, Path(directory), batch=3)]


def curves(plans: list[RunPlan]) -> list[list[dict[str, float]]]:
    """On this rank: the scores and norm of each step of each plan, and those of an evaluation."""
    from neox.data.run_data import build_data_iterators
    from neox.engine import initialize_distributed, initialize_engine
    from neox.tokenizer import build_tokenizer

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = build_data_iterators(plan, grid.data_rank, tokenizer=build_tokenizer("CharLevelTokenizer", None))
        steps = []
        for _ in range(STEPS):
            result = engine.train_batch(data.train)
            steps.append({**result.scores, "norm": result.grad_norm})
        steps.append(dict(engine.eval_batch(data.valid[0].batches).scores))
        answers.append(steps)
    return answers


def prepared(directory: Path) -> tuple[dict[str, Any], str]:
    """Write data and logits, and return the keys of the run, and the directory of the logits."""
    keys = keys_of(directory)
    logits = str(directory / "teacher")
    teacher = tiny_plan(1, seed=3, hidden_size=48, num_layers=2, train_batch_size=None)
    run = tiny_plan(1, train_micro_batch_size_per_gpu=4, **keys)
    samples = run_ranks(1, write_teacher, (teacher, run, logits))[0][0]
    assert samples == STEPS * 4 + 2 * 4 - 4  # one evaluation at the end
    return keys, logits


def check_layouts(directory: Path, names: list[str], **others: Any) -> None:
    keys, logits = prepared(directory)
    keys |= {
        "teacher_logits": logits,
        "distillation_top_k": 7,
        "distillation_temperature": 1.5,
        "distillation_weight": 0.7,
        **others,
    }
    for shape in ({}, {"no_weight_tying": True}):
        chosen = [name for name in names if ("row" in name) == bool(shape)]
        if not chosen:
            continue
        alone = tiny_plan(1, train_micro_batch_size_per_gpu=4, **keys, **shape)
        expected = run_ranks(1, curves, [alone])[0][0]
        if "mtp_num_layers" in others:
            total = expected[0]["loss"] + 0.5 * expected[0]["mtp_loss"]
            assert expected[0]["total_loss"] == pytest.approx(total)
            assert expected[STEPS - 1]["mtp_loss"] < expected[0]["mtp_loss"]
            assert expected[-1].keys() == {"loss", "kl", "lm_loss"}  # an evaluation
        assert expected[0]["loss"] == pytest.approx(0.7 * expected[0]["kl"] + 0.3 * expected[0]["lm_loss"], rel=1e-5)
        assert expected[0]["kl"] > 0
        assert expected[0]["kl"] != expected[STEPS - 1]["kl"]
        plans = []
        for name in chosen:
            micro = 2
            if name.startswith(("tp", "cp")):
                micro = 4
            elif name in SCHEDULES:
                micro = 1
            plans.append(tiny_plan(2, train_micro_batch_size_per_gpu=micro, **keys, **LAYOUTS[name]))
        for name, curve in zip(chosen, run_ranks(2, curves, plans)[0], strict=True):
            for step, wanted in zip(curve, expected, strict=True):
                assert step["loss"] == pytest.approx(wanted["loss"], rel=2e-6), name
                assert step == pytest.approx(wanted, rel=4e-6, abs=2e-6), name


def test_layouts_learn_alike_from_a_teacher(tmp_path: Path) -> None:
    check_layouts(tmp_path, ["tp2", "pp2"])


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_every_layout_learns_alike_from_a_teacher(tmp_path: Path, divergence: str) -> None:
    names = [name for name in LAYOUTS if name not in SCHEDULES]
    check_layouts(tmp_path, names, distillation_divergence=divergence)


@pytest.mark.slow
def test_layouts_learn_alike_from_a_teacher_with_multi_token_prediction(tmp_path: Path) -> None:
    names = [name for name in LAYOUTS if name not in SCHEDULES]
    check_layouts(tmp_path, names, mtp_num_layers=2, mtp_loss_scaling_factor=0.5)


@pytest.mark.slow
def test_other_pipeline_schedules_learn_alike_from_a_teacher(tmp_path: Path) -> None:
    check_layouts(tmp_path, list(SCHEDULES), num_layers=4)


def test_half_precision_learns_nearly_alike_from_a_teacher(tmp_path: Path) -> None:
    keys, logits = prepared(tmp_path)
    keys |= {"teacher_logits": logits, "distillation_top_k": 7, "distillation_temperature": 1.5}
    plans = []
    for precision, layout in (("fp32", {}), ("bf16", {"zero": 1}), ("bf16", {"pp": 2})):
        plans.append(tiny_plan(2, train_micro_batch_size_per_gpu=2, precision=precision, **keys, **layout))
    expected, *curves_found = run_ranks(2, curves, plans)[0]
    for curve in curves_found:
        for step, wanted in zip(curve, expected, strict=True):
            assert step["loss"] == pytest.approx(wanted["loss"], rel=0.02)
            assert step["kl"] == pytest.approx(wanted["kl"], rel=0.05)


def test_logits_of_others_are_refused(tmp_path: Path) -> None:
    keys, logits = prepared(tmp_path)
    keys |= {"teacher_logits": logits, "distillation_top_k": 7}
    shared = {**keys, "train_micro_batch_size_per_gpu": 4}
    with pytest.raises(RankError, match="other samples"):
        run_ranks(1, curves, [tiny_plan(1, **{**shared, "seed": 8})])
    identity = Path(logits) / "identity.json"
    fields = json.loads(identity.read_text())
    identity.write_text(json.dumps({**fields, "vocab_size": VOCAB + 1}))
    with pytest.raises(RankError, match="another vocabulary"):
        run_ranks(1, curves, [tiny_plan(1, **shared)])
    identity.write_text(json.dumps({**fields, "tokenizers": ["0"]}))
    with pytest.raises(RankError, match="another vocabulary"):
        run_ranks(1, curves, [tiny_plan(1, **shared)])
    (Path(logits) / "valid.ids.npy").unlink()
    identity.write_text(json.dumps(fields))
    with pytest.raises(RankError, match=r"valid\.ids\.npy is missing"):
        run_ranks(1, curves, [tiny_plan(1, **shared)])
    assert np.load(Path(logits) / "train.ids.npy", mmap_mode="r").shape[1] == SEQ
