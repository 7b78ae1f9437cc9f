"""Reward models beside transformers: the same scores of texts, both ways, in every family that has such a class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from neox.checkpoint import CheckpointReader, find_checkpoint
from neox.convert import choose_family, from_hf, to_hf
from neox.convert.verification import hf_logits, load_reference_model, single_rank_plan
from neox.errors import ConfigError, ConversionError
from neox.families import FAMILIES
from neox.plan import RunPlan, config_from_files
from neox.train.trainer import Trainer
from tests.distributed.spawn import run_ranks
from tests.distributed.test_preferences import keys_of, opened, write_preferences
from tests.distributed.training_runs import VOCAB, tiny_plan
from tests.parity.family_configs import COMMON
from tests.parity.test_hf_families import CASES, FURTHER_CASES, TOKENS, weights_of
from tests.transformers_versions import needs_rope_parameters, of_the_locked_version

ROWS = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
SCORED = {**CASES, **FURTHER_CASES}
FAMILIES_WITH_SCORES = [name for name, family in FAMILIES.items() if family.score_class is not None]


def reward_model(model_type: str, **config: Any) -> Any:
    """A model of transformers with random weights and one label."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(7)
    given = AutoConfig.for_model(model_type, **{**config, "num_labels": 1, "pad_token_id": None})
    model = AutoModelForSequenceClassification.from_config(given).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def check_scores(directory: Path, model_type: str) -> None:
    theirs = reward_model(model_type, **SCORED[model_type])
    theirs.save_pretrained(directory / "hf")
    rows = TOKENS[:1]
    with torch.inference_mode():
        wanted = theirs(rows).logits
    imported = from_hf(directory / "hf", directory / "neox")
    loaded = config_from_files([imported.config_file])
    layers = single_rank_plan(loaded, COMMON["vocab_size"]).layers
    model = load_reference_model(CheckpointReader(imported.checkpoint, layers), loaded)
    with torch.inference_mode():
        ours = model(rows)[:, -1]
    assert (ours - wanted).abs().max() < 1e-5
    assert wanted.abs().max() > 1e-3
    exported = to_hf(imported.checkpoint, loaded, directory / "back", verify=True)
    assert exported.check is not None
    assert exported.check.difference < 1e-5
    written = json.loads((directory / "back" / "config.json").read_text())
    assert written["architectures"] == [type(theirs).__name__]
    torch.testing.assert_close(hf_logits(directory / "back", rows), wanted, rtol=0, atol=1e-5)
    before = weights_of(directory / "hf")
    after = weights_of(directory / "back")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize("model_type", ["llama", pytest.param("gpt_neox", marks=needs_rope_parameters)])
def test_scores_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    check_scores(tmp_path, model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES_WITH_SCORES)
def test_scores_of_every_family(tmp_path: Path, model_type: str) -> None:
    check_scores(tmp_path, model_type)


def trained(plans: list[RunPlan]) -> list[float]:
    """On this rank: the last loss of each plan, whose run is saved."""
    losses = []
    for plan in plans:
        engine, data = opened(plan)
        Trainer(plan, engine, data).fit()
        losses.append(engine.eval_batch(data.valid[0].batches).scores["loss"])
    return losses


def test_adapters_of_a_reward_model_are_trained_and_exported(tmp_path: Path) -> None:
    keys = keys_of(write_preferences(tmp_path), "rm")
    lora = {"r": 4, "alpha": 8, "target": ["query_key_value", "dense"]}
    save = str(tmp_path / "run")
    shared = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "num_layers": 2, "lora": lora, **keys}
    plan = tiny_plan(2, **{**shared, "train_iters": 4}, checkpoint_factor=2, save=save)
    run_ranks(2, trained, [plan])
    merged = plan.config.updated({}, without=["lora"])
    layers = single_rank_plan(merged, plan.padded_vocab_size).layers
    for step in (2, 4):
        checkpoint = find_checkpoint(Path(save), step)
        model = load_reference_model(CheckpointReader(checkpoint, layers), merged)
        with torch.inference_mode():
            scores = model(ROWS)[:, -1]
        exported = to_hf(checkpoint, plan.config, tmp_path / f"hf-{step}", verify=True)
        assert exported.check is not None
        assert exported.check.difference < 1e-5
        torch.testing.assert_close(hf_logits(tmp_path / f"hf-{step}", ROWS), scores, rtol=0, atol=1e-5)
    first, last = (weights_of(tmp_path / f"hf-{step}") for step in (2, 4))
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert "score.weight" in changed
    assert {name for name in changed if name != "score.weight"} == {
        f"gpt_neox.layers.{layer}.attention.{part}.weight"
        for layer in range(2)
        for part in ("query_key_value", "dense")
    }


@of_the_locked_version
def test_classes_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    for name, family in FAMILIES.items():
        if not family.is_encoder:
            assert family.score_class == KNOWN.get(name), name


def test_other_classifiers_are_refused_by_name(tmp_path: Path) -> None:
    model = reward_model("llama", **SCORED["llama"])
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(ConversionError, match="num_labels: 2"):
        from_hf(tmp_path, tmp_path / "neox")


def test_a_family_without_such_a_class_is_refused_by_name(tmp_path: Path) -> None:
    reward_model("llama", **SCORED["llama"]).save_pretrained(tmp_path / "hf")
    loaded = config_from_files([from_hf(tmp_path / "hf", tmp_path / "neox").config_file])
    with pytest.raises(ConfigError, match="train_impl"):
        choose_family(loaded, "granite")
