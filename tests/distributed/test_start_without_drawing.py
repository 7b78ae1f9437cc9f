"""A start from a checkpoint draws only what the checkpoint lacks, and begins with the same weights to the bit.

Memory that nothing was written to is NaN here, so that a parameter which is neither drawn nor read shows up.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from neox.convert import from_hf
from neox.plan import RunPlan, config_from_files, resolve
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, begun_start, tiny_plan
from tests.field.hf_models import write_llama

LORA = {"lora": {"r": 4, "alpha": 8, "target": ["query_key_value", "dense"]}}
FINETUNED = {"finetune": True}
UNTIED = {"no_weight_tying": True}
# Keys of the saving run, keys of the loading one, and the names of parameters that are drawn.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "resumed": ({}, {}, ()),
    "resumed in another precision": ({}, {"precision": "bf16"}, ()),
    "resumed under ZeRO 3": ({"zero": 3}, {"zero": 3}, ()),
    "resumed with adapters": (LORA, LORA, ("lora_A",)),
    "weights alone": ({}, {"no_load_optim": True}, ()),
    "new adapters": ({}, {**FINETUNED, **LORA}, ("lora_A",)),
    "new adapters under ZeRO 3": ({}, {**FINETUNED, **LORA, "zero": 3}, ("lora_A",)),
    "added tokens": (UNTIED, {**FINETUNED, **UNTIED, "padded_vocab_size": 96}, ()),
    "head from the embedding": ({}, {**FINETUNED, **UNTIED}, ()),
    "new score head": (UNTIED, {**FINETUNED, **UNTIED, "train_impl": "rm"}, ("rm_linear.weight",)),
    "new soft prompt": (
        {},
        {**FINETUNED, "soft_prompt_tuning": {"enabled": True, "num_tokens": 3}},
        ("soft_embedding_weight",),
    ),
    "new module of multi-token prediction": (UNTIED, {**FINETUNED, **UNTIED, "mtp_num_layers": 1}, ("eh_proj.weight",)),
    "experts": (
        {
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_router_type": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_ffn_hidden_size": 24,
        },
        {
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_router_type": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_ffn_hidden_size": 24,
        },
        (),
    ),
    "average": ({"ema_decay": 0.9}, {**FINETUNED, "load_weights": "ema"}, ()),
}
TRAINING: dict[str, Any] = {
    "train_iters": 4,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
}
QUICK = ("resumed", "new adapters")


def starts(saving: RunPlan | None, loading: RunPlan) -> tuple[list[str], list[str]]:
    """Save a run, and build a model from its checkpoint with all weights drawn first, and without.

    Returns:
        Names of tensors that differ or are not finite, and names of parameters that were drawn.
    """
    from neox.engine import build_loaded_model, initialize_distributed, open_engine, save_checkpoint
    from neox.engine.build_engine import build_model
    from neox.engine.checkpoints import loading as module
    from neox.engine.distributed import from_first_rank
    from neox.engine.weights import gathered, weight_layers
    from neox.features.table import build_features
    from neox.model.initial_weights import InitialWeights
    from neox.objectives import build_objective

    grid, device = initialize_distributed(saving or loading)
    if saving is not None:
        engine = open_engine(saving, grid, device, build_features)
        engine.train_batch(batches(saving, grid.dp_rank))
        save_checkpoint(engine, saving.config.checkpoint.save)

    start = from_first_rank(lambda: begun_start(loading))
    assert start.checkpoint is not None
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written to is NaN
    assert not torch.empty(3).isfinite().any()
    drawn: list[str] = []
    full = InitialWeights.full

    def noted(self: InitialWeights, spec: Any, entry: Any) -> torch.Tensor:
        drawn.append(spec.name)
        return full(self, spec, entry)

    def all_drawn(plan: Any, grid: Any, objective: Any, device: Any, loaded: Any) -> torch.nn.Module:
        assert loaded
        return build_model(plan, grid, objective, device)

    found = []
    for builds in (all_drawn, build_model):
        drawn.clear()
        with mock.patch.object(module, "build_model", builds), mock.patch.object(InitialWeights, "full", noted):
            model = build_loaded_model(loading, grid, device, build_objective(loading), start)
        tensors = dict(model.named_buffers())
        for index, layer in weight_layers(model):
            with gathered(layer):
                tensors |= {f"{index} {name}": p.detach().clone() for name, p in layer.named_parameters()}
        found.append(tensors)
    wanted, built = found
    assert wanted.keys() == built.keys()
    different = [name for name, value in built.items() if not torch.equal(value, wanted[name])]
    different += [name for name, value in built.items() if not math.isfinite(value.double().sum())]
    return different, sorted(set(drawn))


def check(world: int, layout: dict[str, Any], name: str, directory: Path) -> None:
    saving, loading, drawn = CASES[name]
    precise = {"train_micro_batch_size_per_gpu": 1, **layout}
    plans = (
        tiny_plan(world, **{**precise, **saving}, save=str(directory)),
        tiny_plan(world, **{**precise, **loading}, load=str(directory)),
    )
    names: list[str] = []
    for different, of_rank in run_ranks(world, starts, *plans):
        assert not different
        assert "pp" in layout or bool(of_rank) == bool(drawn)  # a stage draws its own parameters only
        names += of_rank
    assert {wanted for wanted in drawn if any(wanted in one for one in names)} == set(drawn)
    assert bool(names) == bool(drawn)


@pytest.mark.parametrize("name", QUICK)
def test_weights_are_those_of_a_start_that_draws_all(tmp_path: Path, name: str) -> None:
    check(1, {}, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_other_starts(tmp_path: Path, name: str) -> None:
    check(1, {}, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"pp": 2}, {"mp": 2}, {"zero": 3}])
def test_layouts(tmp_path: Path, layout: dict[str, Any]) -> None:
    check(2, layout, "new adapters" if "pp" not in layout else "resumed", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["new module of multi-token prediction", "new score head", "head from the embedding"])
def test_what_is_new_on_the_last_stage(tmp_path: Path, name: str) -> None:
    check(2, {"pp": 2}, name, tmp_path)


@pytest.mark.slow
def test_adapters_on_a_hugging_face_model(tmp_path: Path) -> None:
    imported = from_hf(write_llama(tmp_path / "hf", 257), tmp_path / "ck")
    keys = {**TRAINING, **FINETUNED, **LORA, "load": str(tmp_path / "ck")}
    loading = resolve(config_from_files([imported.config_file]).updated(keys), 1, 257)
    [(different, drawn)] = run_ranks(1, starts, None, loading)
    assert not different
    assert drawn
    assert all("lora_A" in name for name in drawn)
