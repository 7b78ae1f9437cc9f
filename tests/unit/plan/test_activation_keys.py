"""Keys of where inputs of recomputed layers are kept, and DeepSpeed's block of them."""

import pytest

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.plan import load_config, resolve, static_problems


def test_deepspeeds_block_sets_the_flat_keys(tiny, tmp_path):
    path = tmp_path / "a.yml"
    path.write_text(
        "activation_checkpointing:\n  cpu_checkpointing: true\n  contiguous_memory_optimization: true\n"
        "checkpoint_activations: true\n" + "".join(f"{key}: {value}\n" for key, value in tiny.items())
    )
    config = load_config([path])
    assert config.training.checkpoint_in_cpu
    assert not config.training.partition_activations
    assert config.source("checkpoint_in_cpu") == f"{path}:2"
    (note,) = (n for n in resolve(config, 1, 100).notes if "contiguous" in n)
    assert "expandable_segments" in note
    path.write_text(
        "partition_activations: false\nactivation_checkpointing: {partition_activations: true, number: 1}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config([path])
    text = str(caught.value)
    assert "contradicts `partition_activations: False`" in text
    assert "no key `number`" in text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {
                "hidden_size": 66,
                "head_dim": 16,
                "mlp_width": 64,
                "model_parallel_size": 4,
                "partition_activations": True,
            },
            ("partition_activations", "66"),
        ),
        (
            {"checkpoint_in_cpu": True, "recompute_granularity": "full_attn"},
            ("checkpoint_in_cpu", "recompute_granularity: full_attn"),
        ),
    ],
)
def test_inputs_that_cannot_be_kept_so_are_refused(tiny, keys, words):
    (problem,) = static_problems(NeoXConfig.from_flat({**tiny, "checkpoint_activations": True, **keys}))
    assert all(word in problem for word in words), problem
