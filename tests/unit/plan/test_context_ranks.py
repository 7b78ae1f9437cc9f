"""Context ranks on paper: the grid, the batch, the memory, and what they do not work with."""

from __future__ import annotations

from typing import Any

import pytest

from neox.plan.ranks.topology import Topology
from neox.plan.report.as_json import plan_as_dict
from tests.plans import SMALL, problem_keys, small_plan

TWO = {"context_parallel_size": 2}


def test_neighbouring_ranks_with_the_same_weights_share_samples() -> None:
    topology = Topology(pp_size=1, dp_size=4, tp_size=2, cp_size=2)
    assert topology.data_size == 2
    assert topology.context_groups() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    with pytest.raises(ValueError, match="context"):
        Topology(dp_size=3, cp_size=2)


def test_the_batch_counts_groups_of_ranks_and_the_plan_names_the_degree() -> None:
    plan = small_plan(4, **TWO, train_micro_batch_size_per_gpu=3)
    assert (plan.grid.dp_size, plan.grid.data_size) == (4, 2)
    assert plan.batch.train_batch_size == 6
    assert plan_as_dict(plan)["grid"] == {"pp": 1, "mp": 1, "cp": 2, "dp": 2, "ep": 1, "world": 4}


LONG = {"seq_length": 16384, "max_position_embeddings": 16384, "attention_config": [[["flash"], "all"]]}


def activations(world: int, **keys: Any) -> int:
    return small_plan(world, num_layers=8, **LONG, **keys).memory.activations


@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
def test_activations_are_divided(kind: str) -> None:
    """Gathering needs copies of keys and values, which take the place of the product before the rotation.

    So it may keep less than a fourth in all: at most by that product, 3 of 18 tensors of the width of hidden states.
    """
    keys = {"compile_layers": False}
    whole = activations(1, **keys)
    part = activations(4, **keys, context_parallel_size=4, context_parallel_kind=kind)
    least = whole / 4 if kind == "ulysses" else 15 / 18 * whole / 4
    assert least <= part <= 0.3 * whole


def test_compiled_layers_keep_what_they_gather() -> None:
    gathering = {"context_parallel_size": 4, "context_parallel_kind": "all_gather"}
    kept = activations(4, **gathering, compile_layers=True)
    gathered_again = activations(4, **gathering, compile_layers=False)
    keys_and_values = 2 * 2 * 16384 * 32 * 4  # of two samples, 32 numbers wide in fp32
    assert kept - gathered_again > 6 * keys_and_values
    assert activations(4, **gathering, compile_layers=False, checkpoint_activations=True) < gathered_again


@pytest.mark.parametrize(
    ("named", "keys"),
    [
        ("seq_length", {"seq_length": 18, "max_position_embeddings": 18}),
        ("attention_config", {"attention_config": ["gmlp", "global"]}),
        ("soft_prompt_tuning", {"soft_prompt_tuning": {"enabled": True, "num_tokens": 2}}),
        ("log_gradient_noise_scale", {"log_gradient_noise_scale": True}),
        ("scaled_upper_triang_masked_softmax_fusion", {"scaled_upper_triang_masked_softmax_fusion": True}),
        ("context_parallel_kind", {"context_parallel_kind": "ulysses", "num_kv_heads": 1}),
        ("objective", {"objective": "masked_lm"}),
    ],
)
def test_what_cannot_be_divided_is_refused(named: str, keys: dict[str, Any]) -> None:
    found = problem_keys(2, **{**SMALL, **TWO, **keys})
    assert any(named in keys_of_one and "context_parallel_size" in keys_of_one for keys_of_one in found)


def test_a_world_that_is_no_multiple_is_refused() -> None:
    (found,) = problem_keys(3, **{**SMALL, **TWO})
    assert "context_parallel_size" in found


def test_tiles_and_inputs_in_main_memory_are_counted() -> None:
    keys = {"seq_length": 4096, "max_position_embeddings": 4096, "attention_config": ["flash", "flash"]}
    whole = small_plan(1, **keys).memory
    tiled = small_plan(1, **keys, mlp_tile_size=256).memory
    # kept by two layers for two samples: the first product, the activation, and the norm's output
    mlps = 2 * 2 * 4096 * (2 * 128 + 32) * 4
    gradients_of_one = mlps // 4
    assert mlps <= whole.activations - tiled.activations < mlps + gradients_of_one
    recomputed = small_plan(1, **keys, checkpoint_activations=True).memory
    moved = small_plan(1, **keys, checkpoint_activations=True, checkpoint_in_cpu=True).memory
    of_layer = 2 * 4096 * 32 * 4  # samples x tokens x width
    assert (recomputed.host, moved.host) == (0, 2 * of_layer)
    assert recomputed.activations - moved.activations == of_layer  # the layer at work has its input here
