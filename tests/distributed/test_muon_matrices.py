"""Muon updates each expert, and queries, keys, values and both halves of a gated MLP, as matrices of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.test_experts import DIVIDED, EXPERTS, SAVED_AT, curves, resumed
from tests.distributed.test_lora import LATENT
from tests.distributed.test_multi_token import SHARES
from tests.distributed.test_reshard import plan_of, relay_and_still, worst
from tests.distributed.training_runs import batches, tiny_plan, train_curves
from tests.plans import NETWORKS

LR = 0.02
MUON: dict[str, Any] = {
    **EXPERTS,
    "activation": "swiglu",
    "mlp_width": 40,
    "optimizer": {"type": "Muon", "params": {"lr": LR}},
    "gradient_clipping": 0.0,
    "lr_decay_style": "constant",
    "warmup": 0.0,
    "weight_decay": 0.1,
}
FUSED = {"optimizer": {"type": "Muon", "params": {"lr": LR, "split_fused": False}}}
FOUR_HEADS = {"num_kv_heads": 4}
TWO_KEY_HEADS = {"num_kv_heads": 2}


def first_step(plan: RunPlan) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return weights before a step, their gradients, and weights after it, by name."""
    from neox.engine import initialize_distributed, initialize_engine

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    module = engine.deepspeed_engine.module
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    gradients: dict[str, Tensor] = {}
    step = engine.optimizer.step

    def recording_step(*args: Any) -> Any:
        gradients.update({name: parameter.grad.clone() for name, parameter in module.named_parameters()})
        return step(*args)

    engine.optimizer.step = recording_step
    engine.train_batch(batches(plan, grid.data_rank))
    return {name: (before[name], gradients[name], after.detach()) for name, after in module.named_parameters()}


def slices(name: str, tensor: Tensor, split: bool, key_heads: int) -> Iterator[Tensor]:
    """Yield copies of the matrices of a weight of a block with 4 heads of 8 dimensions."""
    if tensor.dim() == 3:
        for expert in tensor:
            yield from expert.chunk(2) if split and "h_to_4h" in name else [expert]
    elif split and "query_key_value" in name and key_heads == 4:
        yield from (tensor.view(4, 3, 8, -1)[:, kind].reshape(32, -1) for kind in range(3))
    elif split and "query_key_value" in name:
        yield from tensor.split((32, 8 * key_heads, 8 * key_heads))
    elif split and "dense_h_to_4h" in name:
        yield from tensor.chunk(2)
    else:
        yield tensor


@pytest.mark.parametrize(("keys", "split"), [(FOUR_HEADS, True), (TWO_KEY_HEADS, True), (FUSED, False)])
def test_each_matrix_moves_as_torchs_muon_moves_it(keys: dict[str, Any], split: bool):
    key_heads = keys.get("num_kv_heads", 4)
    (moved,) = run_ranks(1, first_step, tiny_plan(1, **{**MUON, **keys}))
    count = 0
    for name, tensors in moved.items():
        if tensors[0].dim() < 2 or not any(part in name for part in ("dense", "query_key_value", "router", "gate")):
            continue
        for before, gradient, after in zip(*(slices(name, one, split, key_heads) for one in tensors), strict=True):
            matrix = torch.nn.Parameter(before.clone().contiguous())
            matrix.grad = gradient.clone().contiguous()
            torch.optim.Muon([matrix], lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
            torch.testing.assert_close(after, matrix.detach(), rtol=1e-3, atol=2e-5)
            assert (after - before).abs().max() > 1e-4, name
            count += 1
    assert count > 4 * (3 + 1) + 2 * 4 * 2, "every expert of two blocks among them"


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        pytest.param(2, [{"zero": 1}, {**DIVIDED, "zero": 2}], marks=pytest.mark.slow),
        pytest.param(
            2, [DIVIDED, {"zero": 3}, {"context_parallel_size": 2, "zero": 2}, {"pp": 2}], marks=pytest.mark.slow
        ),
        pytest.param(
            4, [*({**DIVIDED, "zero": stage} for stage in (1, 2, 3)), {**DIVIDED, "pp": 2}], marks=pytest.mark.slow
        ),
    ],
)
def test_every_layout_trains_the_same(world: int, layouts: list[dict[str, Any]]):
    """Newton-Schulz multiplies in bf16, whose sums depend on nothing but the matrix."""
    ((expected,),) = run_ranks(1, curves, [tiny_plan(1, **MUON)])
    for found in run_ranks(world, curves, [tiny_plan(world, **MUON, **layout) for layout in layouts]):
        for layout, curve in zip(layouts, found, strict=True):
            for ours, theirs in zip(curve, expected, strict=True):
                assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-4), layout


@pytest.mark.slow
@pytest.mark.parametrize("network", ["mamba", "mamba2", "gated_delta", "rwkv"])
def test_recurrent_blocks_train_the_same_in_every_layout(network: str):
    """Their projections are hidden matrices, divided by sections; convolutions, decays and small products are not."""
    keys = {**NETWORKS[network], "num_layers": 2, "optimizer": MUON["optimizer"]}
    (expected,) = run_ranks(1, train_curves, [tiny_plan(1, **keys)], 4)[0]
    layouts: list[dict[str, Any]] = [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"pp": 2}]
    for found in run_ranks(2, train_curves, [tiny_plan(2, **keys, **layout) for layout in layouts], 4):
        for layout, curve in zip(layouts, found, strict=True):
            assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in expected], rel=1e-4), layout


@pytest.mark.slow
def test_a_run_goes_on_at_other_degrees(tmp_path: Path):
    path = str(tmp_path / "muon")
    saving = tiny_plan(2, **MUON, **DIVIDED, zero=2, save=path)
    loading = [
        tiny_plan(2, **MUON, **layout, load=path) for layout in ({"zero": 1}, {**DIVIDED, "zero": 3}, {"zero": 3})
    ]
    for undisturbed, *others in run_ranks(2, resumed, [saving, *loading]):
        for curve in others:
            for ours, theirs in zip(curve, undisturbed[SAVED_AT:], strict=True):
                assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-4)


SMALL_STEPS = {"type": "Muon", "params": {"lr": 0.0005}}  # products are bf16, and turn rounding into steps
KEY_HEADS = {"num_kv_heads": 2, "activation": "swiglu", "mlp_width": 40}


def check_tensor_ranks(world: int, layouts: list[dict[str, Any]], closeness: float = 5e-6, **network: Any) -> None:
    """Compare losses and norms of layouts with those of one rank."""
    keys = {"optimizer": SMALL_STEPS, **network}
    expected = run_ranks(1, train_curves, [tiny_plan(1, **keys)], 6)[0][0]
    found = run_ranks(world, train_curves, [tiny_plan(world, **layout, **keys) for layout in layouts], 6, timeout=500)
    for layout, curve in zip(layouts, found[0], strict=True):
        for step, ((loss, norm), (loss_1, norm_1)) in enumerate(zip(curve, expected, strict=True)):
            assert loss == pytest.approx(loss_1, rel=closeness), (layout, step)
            # gradients meet the rounding of Muon's products in bf16 sooner than the loss does
            assert norm == pytest.approx(norm_1, rel=5e-5), (layout, step)
    assert expected[-1][0] < expected[0][0]


def test_tensor_ranks_gather_matrices():
    check_tensor_ranks(2, [{"mp": 2}], 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "network",
    [KEY_HEADS, LATENT, {**EXPERTS, "activation": "swiglu", "mlp_width": 40}],
    ids=["keys", "latent", "experts"],
)
def test_tensor_ranks_gather_matrices_in_more_layouts(network: dict[str, Any]):
    check_tensor_ranks(2, [{"mp": 2}, SHARES], **network)
    check_tensor_ranks(4, [{"mp": 2, "zero": 1}, {"mp": 2, "zero": 2}, {"mp": 2, "pp": 2}], **network)


@pytest.mark.slow
def test_momentum_goes_on_at_other_tensor_degrees(tmp_path: Path):
    layouts = [
        {"pp": 1, "mp": 2, "zero": 1},
        {"pp": 1, "mp": 1, "zero": 2},
        {"pp": 2, "mp": 1, "zero": 0},
        {"pp": 1, "mp": 2, "zero": 0},
    ]
    save = str(tmp_path / "relay")
    relayed = [plan_of(2, layout, save=save, load=save, optimizer=SMALL_STEPS) for layout in layouts]
    still = plan_of(2, {"pp": 1, "mp": 1, "zero": 1}, save=str(tmp_path / "still"), optimizer=SMALL_STEPS)
    got, expected = run_ranks(2, relay_and_still, relayed, still, timeout=300)[0]
    assert worst([loss for loss, _ in got], [loss for loss, _ in expected]) < 2e-6
