"""Configurations of gpt-neox of every year, read as the gpt-neox of their time read them."""

from __future__ import annotations

from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.plan import resolve
from tests.plans import problem_keys

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "output_layer_parallelism": "column",
    "train_micro_batch_size_per_gpu": 1,
    "train_iters": 2,
}
FUSED = "scaled_upper_triang_masked_softmax_fusion"
FLASH = {"attention_config": [[["flash"], 2]], FUSED: True}
WITHOUT_FUSED_SOFTMAX: list[tuple[str, dict[str, Any]]] = [
    ("reset_attention_mask", {"reset_attention_mask": True}),
    (
        "train_impl",
        {"train_impl": "dpo", "dataset_impl": "pairwise", "pos_train_data_paths": ["a"], "neg_train_data_paths": ["b"]},
    ),
    (
        "train_impl",
        {
            "train_impl": "kto",
            "train_data_paths": ["a"],
            "train_label_data_paths": ["b"],
            "train_reward_data_paths": ["c"],
        },
    ),
    ("context_parallel_size", {"context_parallel_size": 2}),
]


@pytest.mark.parametrize(("named", "keys"), WITHOUT_FUSED_SOFTMAX, ids=["documents", "dpo", "kto", "context ranks"])
def test_flash_goes_before_the_fused_softmax(named: str, keys: dict[str, Any]) -> None:
    """gpt-neox builds no fused softmax in flash blocks: its own DPO and KTO files have both keys."""
    world = keys.get("context_parallel_size", 1)
    plan = resolve(NeoXConfig.from_flat({**SMALL, **FLASH, **keys}), world, 100)
    assert plan.attention == ("flash", "flash")
    windows = {**SMALL, "attention_config": [[["sliding_window"], 2]], "sliding_window_width": 8, FUSED: True}
    resolve(NeoXConfig.from_flat({**windows, **keys}), world, 100)
    for kinds in ([[["global", "flash"], 1]], None):  # one block is enough
        (found,) = problem_keys(world, **{**SMALL, FUSED: True, "attention_config": kinds, **keys})
        assert {named, FUSED} <= set(found)


@pytest.mark.parametrize(("given", "width"), [(14336, 14336), (None, 11008)], ids=["Mistral", "Llama"])
def test_the_width_of_mlp_type_llama_is_intermediate_size_itself(given: int | None, width: int) -> None:
    """gpt-neox PR 1131 and #1319: three matrices without biases, of the width that the file gives."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_kv_heads": 8}
    keys = {**SMALL, **sizes, "mlp_type": "llama", "activation": "silu", "intermediate_size": given}
    config = NeoXConfig.from_flat(keys)
    plan = resolve(config, 1, 100)
    mlp = [parameter for parameter in plan.layers.layers[2].parameters if parameter.name.startswith("mlp.")]
    assert sum(parameter.numel for parameter in mlp) == 3 * 4096 * width
    assert NeoXConfig.from_flat(config.to_flat()).model == config.model
    later = {**keys, "mlp_type": None, "activation": "swiglu", "intermediate_size": 3 * width, "use_bias_in_mlp": False}
    assert resolve(NeoXConfig.from_flat(later), 1, 100).architecture == plan.architecture
