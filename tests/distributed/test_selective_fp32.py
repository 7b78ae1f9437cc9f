"""Parameters of recurrent blocks that stay fp32 in 16 bits (`mamba_selective_fp32_params`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

STATES = 4
NETWORK: dict[str, Any] = {
    "attention_config": ["mamba", "mamba2_mlp", "gated_delta", "global"],
    "mamba_state_dim": STATES,
    "mamba_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "norm": "rmsnorm",
}
# Steps far below the distance of neighbouring bf16 numbers, 2^-8 of them.
SMALL_STEPS: dict[str, Any] = {
    "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
    "lr_decay_style": "constant",
    "warmup": 0.0,
    "min_lr": 0.0,
}
STEPS = 3


def found_in(jobs: list[tuple[RunPlan, RunPlan]]) -> list[dict[str, Any]]:
    """Train and save each first plan, then resume with the second one; return what mixers compute with."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint
    from neox.features.table import build_features
    from neox.model import fp32_values

    def exact(engine: Any) -> dict[str, torch.Tensor]:
        found = {}
        for index, layer in engine.model.module.weight_layers():
            found |= {f"{index}.{name}": values.clone() for name, values in fp32_values(layer).items()}
        return found

    def rounded(engine: Any) -> dict[str, torch.Tensor]:
        from neox.engine.weights import gathered

        found = {}
        for index, layer in engine.model.module.weight_layers():
            with gathered(layer):
                for name in fp32_values(layer):
                    found[f"{index}.{name}"] = layer.get_parameter(name).detach().clone()
        return found

    answers = []
    for plan, other in jobs:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device, build_features)
        answer: dict[str, Any] = {"begun": exact(engine), "begun_rounded": rounded(engine)}
        data = batches(plan, grid.data_rank)
        for _ in range(STEPS):
            engine.train_batch(data)
        answer |= {"trained": exact(engine), "trained_rounded": rounded(engine)}
        save_checkpoint(engine, Path(plan.config.checkpoint.save or ""))
        answer["next"] = engine.train_batch(data).loss
        grid, device = initialize_distributed(other)
        again = open_engine(other, grid, device, build_features)
        answer["resumed"] = exact(again)
        rest = batches(other, grid.data_rank, start=STEPS * other.batch.gradient_accumulation_steps)
        answer["resumed_next"] = again.train_batch(rest).loss
        answers.append(answer)
    return answers


# The second stage has no parameters that stay fp32.
ONE_STAGE: dict[str, Any] = {"zero": 1, "pp": 2, "attention_config": ["mamba", "mamba", "global", "global"]}
FAST = [({"zero": 1}, {"zero": 3})]
FURTHER = [
    (ONE_STAGE, ONE_STAGE),
    ({"zero": 2}, {"zero": 1, "mp": 2}),
    ({"zero": 3}, {"zero": 1, "pp": 2}),
    ({"zero": 1, "pp": 2}, {"zero": 2}),
    ({"zero": 0, "mp": 2}, {"zero": 0}),
    ({"zero": 1, "precision": "fp16"}, {"zero": 0, "precision": "fp16"}),
    ({"zero": 1, "lora": {"r": 2}}, {"zero": 1, "lora": {"r": 2}}),
]


@pytest.mark.parametrize("layouts", [FAST, pytest.param(FURTHER, marks=pytest.mark.slow)], ids=["fast", "further"])
def test_decays_are_fp32_in_16_bits_in_every_layout(tmp_path: Path, layouts: list[Any]) -> None:
    jobs = []
    for number, (first, second) in enumerate(layouts):
        folder = str(tmp_path / str(number))
        keys = {"precision": "bf16", **NETWORK, **SMALL_STEPS, "save": folder, "load": folder}
        jobs.append((tiny_plan(2, **{**keys, **first}), tiny_plan(2, **{**keys, **second})))
    ranks = run_ranks(2, found_in, jobs)
    for number, (first, second) in enumerate(layouts):
        for answers in ranks:
            found = answers[number]
            trains_them = "lora" not in first
            for name, begun in found["begun"].items():
                trained = found["trained"][name]
                assert begun.dtype == trained.dtype == torch.float32
                if name.endswith("mixer.A_log") and begun.ndim == 2:  # of Mamba: log 1 ... log D, which bf16 rounds
                    assert torch.equal(begun, torch.arange(1, STATES + 1).log().expand_as(begun))
                    assert not torch.equal(begun, found["begun_rounded"][name].float())
                # 16 bits lose such steps; the values that are computed with do not.
                assert torch.equal(trained, begun) != trains_them
                assert torch.equal(found["trained_rounded"][name], trained.to(found["trained_rounded"][name].dtype))
            names = set(found["trained"])
            assert any(name.endswith("mixer.D") for name in names) or first.get("pp")
            if first is ONE_STAGE:
                assert [bool(answers[number]["trained"]) for answers in ranks] == [True, False]
            if first.get("mp") == second.get("mp") and not first.get("pp") and not second.get("pp"):
                for name, values in found["resumed"].items():
                    assert torch.equal(values, found["trained"][name]), (first, second, name)
            assert found["resumed_next"] == pytest.approx(found["next"], rel=2e-3)


@pytest.mark.slow
def test_layer_files_hold_them_in_fp32_and_a_model_reads_them_so(tmp_path: Path) -> None:
    from neox.checkpoint import CheckpointReader, find_checkpoint
    from neox.model import GPT
    from neox.parallel import ParallelGrid

    for keeps in (True, False):
        folder = tmp_path / str(keeps)
        keys = {"precision": "bf16", **NETWORK, **SMALL_STEPS, "save": str(folder), "load": str(folder)}
        plan = tiny_plan(1, zero=1, mamba_selective_fp32_params=keeps, **keys)
        (answers,) = run_ranks(1, found_in, [(plan, plan)])
        found = answers[0]
        reader = CheckpointReader(find_checkpoint(folder), plan.layers)
        model = GPT(plan, ParallelGrid.single(), dtype=torch.bfloat16)
        assert model.sequential[2].mixer.A_log.dtype == torch.float32
        for index, name in ((2, "mixer.A_log"), (3, "mixer.dt_bias"), (4, "mixer.A_log")):
            stored = reader.shard(index, name, 0, 1)
            assert stored.dtype == (torch.float32 if keeps else torch.bfloat16)
            if keeps:
                assert torch.equal(stored, found["trained"][f"{index}.{name}"])
            else:
                assert found["trained"] == {}
        assert reader.shard(2, "mixer.in_proj.weight", 0, 1).dtype == torch.bfloat16
